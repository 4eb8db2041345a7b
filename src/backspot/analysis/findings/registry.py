"""The rules, and how the modules of ``rules`` register theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import msgspec

from backspot.analysis.findings.costs import Placed, Removable
from backspot.analysis.findings.evidence import Evidence
from backspot.registry import Registry, Rule as AnyRule
from backspot.results.findings import Finding, Saving
from backspot.trace.events import Ints

Rule: TypeAlias = AnyRule[Evidence, Finding, Finding | str | None]

_HOME = "backspot.analysis.findings.rules"
_rules: Registry[Evidence, Finding, Finding | str | None] = Registry(_HOME)
rule = _rules.rule
fallback_rule = _rules.fallback_rule

FOUND, NOTHING_FOUND, CUT_SHORT = "found", "nothing", "the trace is cut short"
"""What rules can have done, beside those that need what a trace lacks."""


class Judged(msgspec.Struct, frozen=True):
    """What the rules find.

    Attributes:
        findings: the findings in order, each with the work of its cause.
        states: what each rule did, as ``Report.rules`` has it.
    """

    findings: tuple[Finding, ...]
    states: dict[str, str]


@dataclass(frozen=True, slots=True, repr=False)
class Found(Finding):
    """A finding with the work of its cause, before it is known what that would save.

    Attributes:
        removable: the work of the cause, ``None`` where that is not known.
        at_least: whether the remedy makes other work faster too, by what is not known.
        at_best: whether the remedy does the same in another form, which takes its time too.
        priced: whether a step is known to gain that work. It is not where the work may be what the
            step is for, or where another form can be slower.
        by_step: the clock time of the cause in each step.
        taken_ns: what host and devices take together for what the remedy takes away, above which
            no price can be; ``None`` where that is not known, or where waits of the host go.
        change: the remedy as changes by the names of ``analysis.replay.changes``, with what each is
            asked for; if there is none, the work of the cause is free.
    """

    removable: Removable | None = None
    at_least: bool = False
    at_best: bool = False
    priced: bool = True
    by_step: Ints | None = field(default=None, compare=False)
    change: Mapping[str, Any] = field(default_factory=dict)
    taken_ns: int | None = None

    def with_saves(self, saves: Saving | None) -> Finding:
        """Return the finding as reports have it."""
        values = {field.name: getattr(self, field.name) for field in fields(Finding)}
        return Finding(**values | {"saves": saves})


def all_rules() -> tuple[Rule, ...]:
    """Return every rule, sorted by name, with the fallback rules last."""
    return _rules.rules


def finding(
    cost: Placed,
    *,
    title: str = "",
    seen: str,
    remedy: str = "",
    link: str = "",
    nodes: tuple[str, ...] = (),
    operators: tuple[str, ...] = (),
    kernels: tuple[str, ...] = (),
    saves: Saving | None = None,
    at_least: bool = False,
    at_best: bool = False,
    priced: bool = True,
    change: Mapping[str, Any] | None = None,
    form: str = "",
    changes_training: bool = False,
) -> Found | None:
    """Return a finding with this cost, or ``None`` where there is no place.

    The other arguments are the fields of ``Found``. ``find_all`` fills in what the head of the rule
    says.
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
        saves=saves,
        removable=cost.removable,
        at_least=at_least,
        at_best=at_best,
        priced=priced,
        by_step=cost.by_step,
        change=change or {},
        form=form,
        changes_training=changes_training,
    )
