"""What a rule over ranks is, and how the modules of ``rules`` register theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from backspot.job.findings.evidence import Evidence
from backspot.registry import Registry
from backspot.results.job import JobFinding

__all__ = ["Rule", "all_rules", "fallback_rule", "rule"]

Look: TypeAlias = Callable[[Evidence], Iterable[JobFinding]]
LookAfter: TypeAlias = Callable[[Evidence, Sequence[JobFinding]], Iterable[JobFinding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered rule.

    Attributes:
        name: the name of its module, with ``-`` for ``_``.
        find: return findings from the evidence and from the findings of earlier rules.
        fallback: whether the rule needs the findings of the others, and so runs after them.
    """

    name: str
    find: LookAfter
    fallback: bool = False


_rules: Registry[Rule] = Registry("backspot.job.findings.rules")


def rule(name: str) -> Callable[[Look], Look]:
    """Register the decorated function as a rule.

    Args:
        name: the rule's name, which is its module's name with ``-`` for ``_``.

    Raises:
        ValueError: If the name is not the module's, or if a rule of this name exists already.
    """

    def register(find: Look) -> Look:
        _rules.add(Rule(name, lambda evidence, _: find(evidence)), find.__module__)
        return find

    return register


def fallback_rule(name: str) -> Callable[[LookAfter], LookAfter]:
    """Register the decorated function as a rule that is given what the other rules found.

    Args:
        name: as for ``rule``.

    Raises:
        ValueError: as for ``rule``.
    """

    def register(find: LookAfter) -> LookAfter:
        _rules.add(Rule(name, find, fallback=True), find.__module__)
        return find

    return register


def all_rules() -> tuple[Rule, ...]:
    """Return every rule, sorted by name, with the fallback rules last."""
    return _rules.entries
