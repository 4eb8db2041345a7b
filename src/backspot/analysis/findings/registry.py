"""What a rule is, and how the rules are found.

The decorators follow the idiom of ``torch.utils.flop_counter.register_flop_formula``: a module of
``rules`` registers its function when it is imported, and ``all_rules`` imports every module there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeAlias

from backspot.analysis.findings.costs import Placed, Removable
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.memory_evidence import MemoryEvidence
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

_RULES = "backspot.analysis.findings.rules"
_MEMORY_RULES = "backspot.analysis.findings.memory_rules"

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
    """

    name: str
    find: LookInMemory


_registered: dict[str, Rule] = {}
_registered_in_memory: dict[str, MemoryRule] = {}


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
        _register(Rule(name, lambda evidence, _: find(evidence), needs_gpu), find.__module__)
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
        _register(Rule(name, find, fallback=True), find.__module__)
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
        _check_name(name, find.__module__)
        _registered_in_memory[name] = MemoryRule(name, find)
        return find

    return register


def _register(new: Rule, module: str) -> None:
    _check_name(new.name, module)
    _registered[new.name] = new


def _check_name(name: str, module: str) -> None:
    expected = module.rpartition(".")[2].replace("_", "-")
    if name != expected:
        raise ValueError(f"rule {name!r} in {module}: its name must be {expected!r}")
    if name in _registered or name in _registered_in_memory:
        raise ValueError(f"rule {name!r} in {module}: a rule of this name exists already")


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return every rule, sorted by name, with the fallback rules last.

    The first call imports the modules of ``rules``. They are listed through the package's own
    import path, so this works from a source tree, an installed wheel or a zip file.
    """
    _import_all(_RULES)
    return tuple(sorted(_registered.values(), key=lambda rule: (rule.fallback, rule.name)))


@cache
def rules_about_memory() -> tuple[MemoryRule, ...]:
    """Return every rule about memory, sorted by name."""
    _import_all(_MEMORY_RULES)
    return tuple(_registered_in_memory[name] for name in sorted(_registered_in_memory))


def _import_all(folder: str) -> None:
    for module in iter_modules(import_module(folder).__path__, f"{folder}."):
        import_module(module.name)


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
