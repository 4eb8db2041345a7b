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
        totals = getattr(report, f"{cost}_by_step")
        if any(sum(cells) > total for cells, total in zip(columns, totals, strict=False)):
            yield f"its rows sum to more than its {cost}_by_step in a step"
        if _summed(report.modules, cost) > getattr(report, cost):
            yield f"its rows sum to more than its {cost}"
    if _summed(report.operators, "wall_ns") > report.wall_ns:
        yield "its operators sum to more than its wall_ns"
    yield from _of_passes(report)
    yield from _of_phases(report)
    for base in type(report).__mro__:
        if (of_part := vars(base).get("_contradictions")) is not None:
            yield from of_part(report, report.steps)
    for hiccup in report.hiccups:
        yield from _of_step(hiccup.step, report, "a hiccup")
    if len(report.hiccups) >= report.steps:
        yield "no step is left beside its hiccups"
    for finding in report.findings:
        subject = f"the finding {_named(finding.rule)}"
        if not finding.places:
            yield f"{subject} has no place"
        if finding.steps > report.steps:
            yield f"{subject} holds in {finding.steps} steps, of {report.steps}"
        yield from _of_range(finding.saves, f"what {subject} saves")
    for layers, saving in report.layers.items():
        yield from _of_range(saving, f"what {_named(layers)} saves")
    keys: dict[str, Iterable[Hashable]] = {
        # A pattern of paths can match modules of several classes, with a row for each.
        "row": ((row.path, row.is_module and row.class_name) for row in report.modules),
        "operator": (operator.name for operator in report.operators),
        "hiccup": (hiccup.step for hiccup in report.hiccups),
        "device": (device.device for device in report.devices),
        "phase": (phase.name for phase in report.phases),
    }
    for kind, values in keys.items():
        keys_found = [*values]
        if len({*keys_found}) < len(keys_found):
            yield f"it has a {kind} twice"


def _of_row(row: Row, steps: int) -> Iterator[str]:
    subject = f"the row {_named(row.name)}"
    yield from _of_steps(row, subject, steps, *_COSTS, "forward_ns")
    if sum(astuple(row.wall_on)) > row.wall_ns:
        yield f"wall_on of {subject} has more than its wall_ns"
    if row.split_ns > row.wall_ns:
        yield f"split_ns of {subject} is more than its wall_ns"
    for saving in (row.saves, row.total_saves):
        yield from _of_range(saving, f"what {subject} saves")
    if not row.members:
        yield f"{subject} has no members"
    for costs, kind in ((row.nodes, "nodes"), (row.lines, "lines")):
        if _summed(costs, "wall_ns") > row.wall_ns:
            yield f"the {kind} of {subject} sum to more than its wall_ns"
    for cost in _COSTS:
        if getattr(row, f"total_{cost}") < getattr(row, cost):
            yield f"total_{cost} of {subject} is less than its {cost}"


def _of_range(saving: Saving | ReplayedStep | None, subject: str) -> Iterator[str]:
    """What is wrong with a time and its range."""
    if saving is not None and not saving.low_ns <= saving.ns <= saving.high_ns:
        yield f"{subject} is outside of its range"


def _of_step(step: int, report: Report, subject: str) -> Iterator[str]:
    """What is wrong with the number of a step."""
    if step >= report.steps:
        yield f"{subject} is of step {step}, of {report.steps}"


def _of_steps(one: Any, subject: str, steps: int, *costs: str) -> Iterator[str]:
    """What is wrong with the times by step of a report, a row or a phase."""
    for cost in costs:
        if (length := len(getattr(one, f"{cost}_by_step"))) != steps:
            length_text = counted(length, "step")
            yield f"{cost}_by_step of {subject} has {length_text}, step_ns_by_step has {steps}"


def _of_passes(report: Report) -> Iterator[str]:
    for index, run in enumerate(report.passes):
        yield from _of_step(run.step, report, f"pass {index}")
        if run.duration_ns != run.wall_ns + run.forward_ns + run.other_ns:
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


def _summed(costs: Iterable[object], field: str) -> int:
    return sum(map(attrgetter(field), costs))


def _named(name: str) -> str:
    return repr(visible(name if len(name) <= _SHOWN else f"…{name[-_SHOWN:]}"))
