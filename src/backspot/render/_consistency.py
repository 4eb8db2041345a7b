"""Consistency of a report that was read from a file: whether its numbers add up.

The file may come from anywhere. Everything that outputs and comparisons rely on is checked here,
once, so that they need no checks of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import astuple, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from backspot.formatting import counted, visible
from backspot.results.costs import Row
from backspot.results.findings import ReplayedStep, Saving
from backspot.results.report import Report

__all__ = ["contradiction"]

_LIMIT = 1 << 63
_SHOWN = 60  # characters of a name
_COSTS = ("wall_ns", "gpu_ns", "cpu_ns")
_SHARES = {"noise", "share", "unknown_share", "wall", "gpu", "cpu"}
"""Numbers of at most 1."""
_SIGNED = {"device", "timeline", "least_by_step"}
"""Numbers that may be below 0: the host is device -1, and memory is counted from a start."""


def contradiction(report: Report) -> str:
    """The first inconsistency of a report, in words; ``""`` if there is none."""
    return next(_contradictions(report), "")


def _contradictions(report: Report) -> Iterator[str]:
    """All inconsistencies; later checks rely on earlier ones."""
    if found := _impossible(report):
        yield found.removeprefix(".")
    if report.replayed_step is not None:
        yield from _of_range(report.replayed_step, "its replayed_step")
    for row in report.modules:
        yield from _of_row(row, len(report.step_ns_by_step))
    for cost in ("wall", "gpu", "cpu"):
        yield from _of_steps(report, "the report", cost, len(report.step_ns_by_step))
        sums = [
            sum(column)
            for column in zip(*(_by_step(row, cost) for row in report.modules), strict=False)
        ]
        if any(part > whole for part, whole in zip(sums, _by_step(report, cost), strict=False)):
            yield f"its rows sum to more than its {cost}_ns_by_step in a step"
    for cost in _COSTS:
        if _summed(report.modules, cost) > getattr(report, cost):
            yield f"its rows sum to more than its {cost}"
    # A pattern of paths can match modules of several classes, with a row for each.
    yield from _twice(
        "row", report.modules, lambda row: (row.path, row.is_module and row.class_name)
    )
    if _summed(report.operators, "wall_ns") > report.wall_ns:
        yield "its operators sum to more than its wall_ns"
    yield from _twice("operator", report.operators, lambda operator: operator.name)
    yield from _of_passes(report)
    yield from _of_hiccups(report)
    yield from _twice("device", report.devices, lambda device: device.device)
    yield from _of_phases(report)
    yield from _of_memory(report)
    for finding in report.findings:
        what = f"the finding {_named(finding.rule)}"
        if not finding.places:
            yield f"{what} has no place"
        if finding.steps > report.steps:
            yield f"{what} holds in {finding.steps} steps, of {report.steps}"
        if finding.saves is not None:
            yield from _of_range(finding.saves, f"what {what} saves")


def _impossible(one: Any, most: int = _LIMIT - 1) -> str:
    """Where a result has a number that no time, count or share can be; ``""`` if nowhere."""
    kind = type(one)
    if kind in (int, float):
        return "" if 0 <= one <= most else f" is not from 0 to {most}"  # nor is NaN
    if kind is tuple:
        for index, part in enumerate(one):
            if found := _impossible(part, most):
                return f"[{index}]{found}"
    elif kind is dict:
        for key, part in one.items():
            if found := _impossible(part, most):
                return f"[{_named(str(key))}]{found}"
    elif is_dataclass(kind):
        for name in _names(kind):
            if found := _impossible(getattr(one, name), 1 if name in _SHARES else most):
                return f".{name}{found}"
    return ""


@cache
def _names(kind: type) -> list[str]:
    """The names of a class's fields that may hold numbers."""
    return [one.name for one in fields(kind) if one.name not in _SIGNED and one.type != "str"]


def _of_row(row: Row, steps: int) -> Iterator[str]:
    what = f"the row {_named(row.name)}"
    for cost in ("wall", "gpu", "cpu", "forward"):
        yield from _of_steps(row, what, cost, steps)
    if sum(astuple(row.wall_on)) > row.wall_ns:
        yield f"wall_on of {what} has more than its wall_ns"
    if row.split_ns > row.wall_ns:
        yield f"split_ns of {what} is more than its wall_ns"
    for saving in (row.saves, row.total_saves):
        if saving is not None:
            yield from _of_range(saving, f"what {what} saves")
    if not row.members:
        yield f"{what} has no members"
    for parts, kind in ((row.nodes, "nodes"), (row.lines, "lines")):
        if _summed(parts, "wall_ns") > row.wall_ns:
            yield f"the {kind} of {what} sum to more than its wall_ns"
    for cost in _COSTS:
        if getattr(row, f"total_{cost}") < getattr(row, cost):
            yield f"total_{cost} of {what} is less than its {cost}"


def _of_range(one: Saving | ReplayedStep, what: str) -> Iterator[str]:
    """What is wrong with a time and its range."""
    if not one.low_ns <= one.ns <= one.high_ns:
        yield f"{what} is outside of its range"


def _of_steps(one: Any, what: str, cost: str, steps: int) -> Iterator[str]:
    """What is wrong with the times by step of a report, a row or a phase."""
    times = _by_step(one, cost)
    if len(times) != steps:
        held = counted(len(times), "step")
        yield f"{cost}_ns_by_step of {what} has {held}, step_ns_by_step has {steps}"


def _by_step(one: Any, cost: str) -> tuple[int, ...]:
    times: tuple[int, ...] = getattr(one, f"{cost}_ns_by_step")
    return times


def _of_passes(report: Report) -> Iterator[str]:
    for index, one in enumerate(report.passes):
        if one.step >= report.steps:
            yield f"pass {index} is of step {one.step}, of {report.steps}"
        if one.duration_ns != one.wall_ns + one.forward_ns + one.other_ns:
            yield f"the parts of pass {index} do not sum to its duration_ns"
    if report.passes and _summed(report.passes, "wall_ns") != report.recorded_wall_ns:
        yield "its passes do not sum to its wall_ns_by_step"


def _of_hiccups(report: Report) -> Iterator[str]:
    for hiccup in report.hiccups:
        if hiccup.step >= report.steps:
            yield f"it has a hiccup in step {hiccup.step}, of {report.steps}"
    yield from _twice("hiccup", report.hiccups, lambda hiccup: hiccup.step)
    if len(report.hiccups) >= report.steps:
        yield "no step is left beside its hiccups"


def _of_memory(report: Report) -> Iterator[str]:
    for one in report.memory:
        what = f"the memory of {one.name}"
        if _summed(one.live, "bytes") != one.peak_bytes:
            yield f"what is live in {what} does not sum to its peak_bytes"
        if one.peak_step >= report.steps:
            yield f"{what} has its peak in step {one.peak_step}, of {report.steps}"
        line = one.timeline
        columns = (line.ns, line.allocated_bytes, *line.bytes_by_path)
        if len(line.paths) != len(line.bytes_by_path) or len(set(map(len, columns))) > 1:
            yield f"the columns of {what} over time have different lengths"
        if any(not -_LIMIT <= value < _LIMIT for column in columns for value in column):
            yield f"{what} over time holds a number beyond 63 bits"
    yield from _twice("device in memory", report.memory, lambda one: one.device)


def _of_phases(report: Report) -> Iterator[str]:
    for phase in report.phases:
        what = f"the phase {phase.name}"
        if phase.busy_ns > phase.wall_ns:
            yield f"{what} is busy for longer than it lasts"
        yield from _of_steps(phase, what, "wall", len(report.step_ns_by_step))
    if report.phases and _summed(report.phases, "wall_ns") != report.step_ns:
        yield "its phases do not sum to its step_ns"
    by_step = zip(*(phase.wall_ns_by_step for phase in report.phases), strict=False)
    if report.phases and tuple(map(sum, by_step)) != report.step_ns_by_step:
        yield "its phases do not sum to its step_ns_by_step"
    yield from _twice("phase", report.phases, lambda phase: phase.name)


def _twice(kind: str, found: Sequence[Any], key: Callable[[Any], Hashable]) -> Iterator[str]:
    if len({key(one) for one in found}) < len(found):
        yield f"it has a {kind} twice"


def _summed(parts: Iterable[object], field: str) -> int:
    return sum(map(attrgetter(field), parts))


def _named(name: str) -> str:
    return repr(visible(name if len(name) <= _SHOWN else f"…{name[-_SHOWN:]}"))
