"""Consistency of a report that was read from a file: whether its numbers add up.

The file may come from anywhere. The types of the fields say which numbers there can be; everything
else that outputs and comparisons rely on is checked here, once, so that they need no checks of
their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import astuple
from operator import attrgetter
from typing import Any

from backspot.formatting import counted, visible
from backspot.results.costs import Row
from backspot.results.findings import ReplayedStep, Saving
from backspot.results.report import Report

_SHOWN = 60  # characters of a name
_COSTS = ("wall_ns", "gpu_ns", "cpu_ns")


def contradiction(report: Report) -> str:
    """The first inconsistency of a report, in words; ``""`` if there is none."""
    return next(_contradictions(report), "")


def _contradictions(report: Report) -> Iterator[str]:
    """All inconsistencies; later checks rely on earlier ones."""
    steps = len(report.step_ns_by_step)
    yield from _of_range(report.replayed_step, "its replayed_step")
    for row in report.modules:
        yield from _of_row(row, steps)
    for phase in report.phases:
        yield from _of_steps(phase, f"the phase {phase.name}", steps, "wall_ns")
    yield from _of_steps(report, "the report", steps, *_COSTS)
    for cost in _COSTS:
        columns = zip(*(getattr(row, f"{cost}_by_step") for row in report.modules), strict=True)
        wholes = getattr(report, f"{cost}_by_step")
        if any(sum(parts) > whole for parts, whole in zip(columns, wholes, strict=False)):
            yield f"its rows sum to more than its {cost}_by_step in a step"
        if _summed(report.modules, cost) > getattr(report, cost):
            yield f"its rows sum to more than its {cost}"
    if _summed(report.operators, "wall_ns") > report.wall_ns:
        yield "its operators sum to more than its wall_ns"
    yield from _of_passes(report)
    yield from _of_phases(report)
    for part in type(report).__mro__:
        if (of_part := vars(part).get("_contradictions")) is not None:
            yield from of_part(report, report.steps)
    for hiccup in report.hiccups:
        yield from _of_step(hiccup.step, report, "a hiccup")
    if len(report.hiccups) >= report.steps:
        yield "no step is left beside its hiccups"
    for finding in report.findings:
        what = f"the finding {_named(finding.rule)}"
        if not finding.places:
            yield f"{what} has no place"
        if finding.steps > report.steps:
            yield f"{what} holds in {finding.steps} steps, of {report.steps}"
        yield from _of_range(finding.saves, f"what {what} saves")
    for layers, saving in report.layers.items():
        yield from _of_range(saving, f"what {_named(layers)} saves")
    keys: dict[str, Iterable[Hashable]] = {
        # A pattern of paths can match modules of several classes, with a row for each.
        "row": ((row.path, row.is_module and row.class_name) for row in report.modules),
        "operator": (one.name for one in report.operators),
        "hiccup": (one.step for one in report.hiccups),
        "device": (one.device for one in report.devices),
        "phase": (one.name for one in report.phases),
    }
    for kind, found in keys.items():
        every = [*found]
        if len({*every}) < len(every):
            yield f"it has a {kind} twice"


def _of_row(row: Row, steps: int) -> Iterator[str]:
    what = f"the row {_named(row.name)}"
    yield from _of_steps(row, what, steps, *_COSTS, "forward_ns")
    if sum(astuple(row.wall_on)) > row.wall_ns:
        yield f"wall_on of {what} has more than its wall_ns"
    if row.split_ns > row.wall_ns:
        yield f"split_ns of {what} is more than its wall_ns"
    for saving in (row.saves, row.total_saves):
        yield from _of_range(saving, f"what {what} saves")
    if not row.members:
        yield f"{what} has no members"
    for parts, kind in ((row.nodes, "nodes"), (row.lines, "lines")):
        if _summed(parts, "wall_ns") > row.wall_ns:
            yield f"the {kind} of {what} sum to more than its wall_ns"
    for cost in _COSTS:
        if getattr(row, f"total_{cost}") < getattr(row, cost):
            yield f"total_{cost} of {what} is less than its {cost}"


def _of_range(one: Saving | ReplayedStep | None, what: str) -> Iterator[str]:
    """What is wrong with a time and its range."""
    if one is not None and not one.low_ns <= one.ns <= one.high_ns:
        yield f"{what} is outside of its range"


def _of_step(step: int, report: Report, what: str) -> Iterator[str]:
    """What is wrong with the number of a step."""
    if step >= report.steps:
        yield f"{what} is of step {step}, of {report.steps}"


def _of_steps(one: Any, what: str, steps: int, *costs: str) -> Iterator[str]:
    """What is wrong with the times by step of a report, a row or a phase."""
    for cost in costs:
        if (found := len(getattr(one, f"{cost}_by_step"))) != steps:
            held = counted(found, "step")
            yield f"{cost}_by_step of {what} has {held}, step_ns_by_step has {steps}"


def _of_passes(report: Report) -> Iterator[str]:
    for index, one in enumerate(report.passes):
        yield from _of_step(one.step, report, f"pass {index}")
        if one.duration_ns != one.wall_ns + one.forward_ns + one.other_ns:
            yield f"the parts of pass {index} do not sum to its duration_ns"
    if report.passes and _summed(report.passes, "wall_ns") != sum(report.wall_ns_by_step):
        yield "its passes do not sum to its wall_ns_by_step"


def _of_phases(report: Report) -> Iterator[str]:
    for phase in report.phases:
        if phase.busy_ns > phase.wall_ns:
            yield f"the phase {phase.name} is busy for longer than it lasts"
    by_step = zip(*(phase.wall_ns_by_step for phase in report.phases), strict=True)
    if report.phases and tuple(map(sum, by_step)) != report.step_ns_by_step:
        yield "its phases do not sum to its step_ns_by_step"
    if report.phases and _summed(report.phases, "wall_ns") != report.step_ns:
        yield "its phases do not sum to its step_ns"


def _summed(parts: Iterable[object], field: str) -> int:
    return sum(map(attrgetter(field), parts))


def _named(name: str) -> str:
    return repr(visible(name if len(name) <= _SHOWN else f"…{name[-_SHOWN:]}"))
