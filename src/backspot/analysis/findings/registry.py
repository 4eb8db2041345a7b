"""What a rule is, and how the modules of ``rules`` register theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from backspot.analysis.findings.costs import Placed, Removable
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.memory_evidence import MemoryEvidence
from backspot.registry import Registry
from backspot.results.findings import Finding
from backspot.results.savings import Saving

__all__ = [
    "Found",
    "MemoryRule",
    "Rule",
    "all_rules",
    "fallback_rule",
    "finding",
    "memory_rule",
    "rule",
    "rules_about_memory",
]

Look: TypeAlias = Callable[[Evidence], Finding | None]
LookAfter: TypeAlias = Callable[[Evidence, Sequence[Finding]], Finding | None]
LookInMemory: TypeAlias = Callable[[MemoryEvidence], Finding | None]


@dataclass(frozen=True, slots=True, repr=False)
class Found(Finding):
    """A finding with the work of its cause, before it is known what that would save.

    Attributes:
        removable: the work of the cause, ``None`` where that is not known.
    """

    removable: Removable | None = None

    def with_saves(self, saves: Saving | None) -> Finding:
        """Return the finding as reports have it."""
        known = {field.name: getattr(self, field.name) for field in fields(Finding)}
        return Finding(**known | {"saves": saves})


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered rule.

    Attributes:
        name: the rule's section in ``docs/findings.md``.
        find: return the finding, or ``None`` where the rule finds nothing, from the evidence and
            the findings of earlier rules.
        needs_gpu: whether the rule can judge only traces with device work.
        fallback: whether the rule needs the findings of the others, and so runs after them.
    """

    name: str
    find: LookAfter
    needs_gpu: bool = False
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """A registered rule about memory.

    Attributes:
        name: the rule's section in ``docs/findings.md``.
        find: return the finding, or ``None`` where the rule finds nothing.
        fallback: never; no rule about memory needs the findings of others.
    """

    name: str
    find: LookInMemory
    fallback: bool = False


_rules: Registry[Rule] = Registry("backspot.analysis.findings.rules")
_memory_rules: Registry[MemoryRule] = Registry("backspot.analysis.findings.memory_rules")


def rule(name: str, *, needs_gpu: bool = False) -> Callable[[Look], Look]:
    """Register the decorated function as a rule.

    Args:
        name: the rule's name, which is its module's name with ``-`` for ``_``.
        needs_gpu: whether the rule looks at kernels or copies, and so can judge only traces with
            device work. It is not asked about others.

    Raises:
        ValueError: If the name is not the module's, or if a rule of this name exists already.
    """

    def register(find: Look) -> Look:
        _rules.add(Rule(name, lambda evidence, _: find(evidence), needs_gpu), find.__module__)
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


def memory_rule(name: str) -> Callable[[LookInMemory], LookInMemory]:
    """Register the decorated function as a rule about memory.

    Args:
        name: as for ``rule``.

    Raises:
        ValueError: as for ``rule``.
    """

    def register(find: LookInMemory) -> LookInMemory:
        _memory_rules.add(MemoryRule(name, find), find.__module__)
        return find

    return register


def all_rules() -> tuple[Rule, ...]:
    """Return every rule, sorted by name, with the fallback rules last."""
    return _rules.entries


def rules_about_memory() -> tuple[MemoryRule, ...]:
    """Return every rule about memory, sorted by name."""
    return _memory_rules.entries


def finding(
    cost: Placed,
    *,
    title: str,
    seen: str,
    remedy: str,
    link: str,
    nodes: tuple[str, ...] = (),
    operators: tuple[str, ...] = (),
    kernels: tuple[str, ...] = (),
) -> Found | None:
    """Return a finding with this cost, or ``None`` where there is no place.

    The other arguments are the fields of ``Finding``. ``find_all`` fills in the name of the rule.
    """
    if not cost.places:
        return None
    return Found(
        rule="",
        title=title,
        seen=seen,
        remedy=remedy,
        wall_ns=cost.wall_ns,
        places=cost.places,
        steps=cost.steps,
        nodes=nodes,
        operators=operators,
        kernels=kernels,
        link=link,
        removable=cost.removable,
    )
