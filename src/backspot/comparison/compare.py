"""Compare two sides: the step, its phases and the backward module by module, with cautions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, median
from typing import Any, Literal, TypeAlias, get_args

from backspot.comparison.align import aligned
from backspot.comparison.clocks import on_one_clock
from backspot.comparison.judge import (
    Comparer,
    Cost,
    Noise,
    build,
    by_size,
    left_out_of,
    of_whole,
    side_of,
    warnings_of_sides,
)
from backspot.comparison.noise import ENOUGH, Runs, Times
from backspot.errors import UsageError
from backspot.formatting import counted, quoted
from backspot.imports import modules_of
from backspot.presented import Presented
from backspot.results.comparison import Change, ChangeKind, Comparison, Move
from backspot.results.costs import Phase, PhaseName, Row
from backspot.results.report import Report

Recorded: TypeAlias = Presented | str | os.PathLike[str]
"""A report or the result of a part, such as a job of many ranks; or the path of a saved report."""

_LEAST_PHASE = 0.01
"""Share of the step below which a phase's change is not claimed."""
LEFT_OUT = "(rows left out)"
NO_NODE = "(no autograd node)"

Reports: TypeAlias = Sequence[Report]
_Rows: TypeAlias = Sequence["Row | None"]
"""A module in each recording of a side; ``None`` where it is not."""


def compare(
    before: Recorded | Sequence[Recorded],
    after: Recorded | Sequence[Recorded],
    *,
    names: tuple[str, str] = ("", ""),
) -> Comparison:
    """Compare two sides: the step, its phases, and the backward module by module.

    A side is one recording or several of the same code. One on each side tells by how much these
    recordings differ (``longer``, ``shorter``), give or take the noise of their steps; a busier
    machine differs as well. From three on each side on, each of a process of its own and recorded
    in turns, it tells how much slower or faster the code is (``slower``, ``faster``).

    Modules are matched by path, also where they moved or were renamed and the match is unambiguous.
    They are compared by GPU time, or without it by clock time; ``docs/json.md`` has the limits.
    Times are real ones where all recordings have them, else recorded ones. With one step in a
    recording there is no verdict. Without module labels, autograd nodes are compared by name, and
    there is no verdict on them.

    Two jobs of many ranks are compared by clock time, on their typical rank: the median of each
    module, forward and backward, and of the waits. ``Comparison.ranks`` has each rank's own time.

    Args:
        before: A report or a job, the path of a saved one (``.json``), or a list of several.
        after: The same, of the same kind.
        names: Names of the two, such as ``("main", "branch")``. Default: what was read.

    Returns:
        The comparison, with times in milliseconds per step.

    Raises:
        UsageError: If a side is empty or has one recording twice, ``before`` and ``after`` are not
            two sides of reports or of jobs, several recordings are of several devices, or ``names``
            is invalid.
        SourceNotFoundError: If a path cannot be read.
        NotATraceError: If there is no saved report at a path.

    Example:
        >>> before = backspot.locate("main.trace.json.gz")
        >>> after = backspot.locate("branch.trace.json.gz")
        >>> print(backspot.compare(before, after))
        These two recordings differ by +20% ± 3: the step took 31.7 ms before, 38.2 ms after, ...
        >>> mains = ["main1.json", "main2.json", "main3.json"]
        >>> branches = ["branch1.json", "branch2.json", "branch3.json"]
        >>> print(backspot.compare(mains, branches))  # doctest: +SKIP
        The step got slower by 20% ± 4: 31.7 ms before, 38.2 ms after, ...
    """
    sides = _side(before, "before"), _side(after, "after")
    if (
        not isinstance(names, (tuple, list))
        or len(names) != 2
        or not all(isinstance(name, str) for name in names)
    ):
        raise UsageError(f"names={quoted(names)}: give two texts, what to call before and after")
    for other in _others():
        of_it = [[isinstance(result, other.kind) for result in side] for side in sides]
        if all(map(all, of_it)):
            return other.compare(*sides, names)
        if any(map(any, of_it)):
            raise UsageError(other.mixed)
    reports = [[_report(result) for result in side] for side in sides]
    if len(sides[0]) + len(sides[1]) > 2:
        _check_devices([*reports[0], *reports[1]])
    comparison = _compare(reports[0], reports[1], names)
    for add in _listed("ADDING"):
        comparison = add(comparison, *reports)
    return comparison


@cache
def _others() -> tuple[Comparer, ...]:
    """What compares other results than reports: ``COMPARERS`` of the modules of this folder."""
    return tuple(_listed("COMPARERS"))


def _listed(name: str) -> list[Any]:
    """What the modules of this folder have in their lists of a name."""
    return [
        entry for module in modules_of("backspot.comparison") for entry in getattr(module, name, ())
    ]


def _side(recordings: Recorded | Sequence[Recorded], name: str) -> list[object]:
    several = list(recordings) if isinstance(recordings, (list, tuple)) else [recordings]
    if not several:
        raise UsageError(f"{name} is empty: give a report, or a list of them")
    read = [
        Report.load(recording) if isinstance(recording, (str, os.PathLike)) else recording
        for recording in several
    ]
    for number, report in enumerate(read):
        if any(_is_same(report, other) for other in read[:number]):
            raise UsageError(
                f"{name} has one recording twice, the second time as number {number + 1}: that "
                "tells no more than once; record again"
            )
    return read


def _is_same(first: object, second: object) -> bool:
    """Whether two reports are of one recording, whatever its file is called."""
    if isinstance(first, Report) and isinstance(second, Report):
        same_run = first.recorded == second.recorded  # when, for example
        return same_run and replace(first, trace="") == replace(second, trace="")
    return first == second


def _report(result: object) -> Report:
    if isinstance(result, Report):
        return result
    raise UsageError(
        f"compare takes two reports, or two lists of them, not {type(result).__name__}: "
        "backspot.locate(trace) or backspot.Report.load(path) gives one"
    )


def _check_devices(reports: Reports) -> None:
    """Refuse recordings of several devices, as their mean is that of nothing."""
    by_device: dict[str, Report] = {}
    for report in reports:
        device = report.recorded.get("device", "")
        by_device.setdefault(device or ("a GPU" if report.has_gpu else "a CPU"), report)
    if len({report.has_gpu for report in reports}) > 1 or len(by_device) > 1:
        (device, one), (other, another) = list(by_device.items())[:2]
        raise UsageError(
            f"{quoted(one.trace)} is of {device} and {quoted(another.trace)} of {other}: several "
            "recordings a side must all be of one device; leave out those of the other"
        )


def _compare(before: Reports, after: Reports, names: tuple[str, str]) -> Comparison:
    before, after, other_clock = on_one_clock(before, after)
    by: Literal["module", "node"] = (
        "module" if all(map(_names_modules, (*before, *after))) else "node"
    )
    noise = Noise(
        Cost.of(before, before),
        Cost.of(after, after),
        by_gpu=all(report.has_gpu for report in (*before, *after)),
        wholes=1 + len({phase.name for report in (*before, *after) for phase in report.phases}),
    )
    moves: tuple[Move, ...] = ()
    unlike: tuple[str, ...] = ()
    if by == "node":
        changes = [*_by_node(before, after, noise)]
    else:
        pairs, moves = _pairs(before, after)
        shared = [(old, new) for old, new in pairs if old and new]
        same = [pair for pair in shared if _is_same_work(*pair)]
        noise = noise.with_modules(
            [(Cost.of(old, before), Cost.of(new, after)) for old, new in same],
            len(pairs),
            work_differs=len(same) < len(pairs),
        )
        changes = [_of_module(old, new, before, after, noise) for old, new in pairs]
        changes += _unowned(before, after, noise, pairs)
        unlike = tuple(_other_work(pairs)) if shared else (_UNLIKE,)
    changes.sort(key=by_size)
    step = of_whole("step", "", _steps(before), _steps(after), noise)
    whole_change = of_whole("whole", "", noise.before.wall, noise.after.wall, noise)
    return Comparison(
        step=step,
        phases=tuple(_phases(before, after, noise)),
        whole=whole_change,
        changes=tuple(changes),
        by=by,
        moves=moves,
        before=_described(before, names[0]),
        after=_described(after, names[1]),
        notes=(
            *unlike,
            *noise.common(),
            *([other_clock] if other_clock else []),
            *_cautions(before, after, by, noise),
            *([_too_noisy(noise)] if step.is_noisy or whole_change.is_noisy else []),
        ),
        about=noise.about,
        clock=before[0].clock,
    )


def _steps(reports: Reports) -> Runs:
    """Return what a step takes in each recording: a real one, where it was timed."""
    return [
        Times(report.step_ns, report.unprofiled_step_ns_by_step)
        if report.clock == "real" and len(report.unprofiled_step_ns_by_step) > 1
        else Times(report.step_ns, report.step_ns_by_step, left_out_of(report))
        for report in reports
    ]


def _described(reports: Reports, name: str) -> Any:
    steps = sum(report.steps for report in reports)
    return side_of([report.trace for report in reports], steps, reports[0].step_unit, name)


_Pair: TypeAlias = "tuple[_Rows | None, _Rows | None]"


def _any_of(rows: _Rows) -> Row:
    return next(row for row in rows if row is not None)


def _calls(rows: _Rows) -> float:
    """Return the calls of a module, the mean over the recordings that have it."""
    return fmean(row.calls for row in rows if row is not None)


def _is_same_work(old: _Rows, new: _Rows) -> bool:
    alike = _any_of(old).class_name == _any_of(new).class_name
    return alike and not _differ_in_calls(old, new)


def _differ_in_calls(old: _Rows, new: _Rows) -> bool:
    """Return whether a module is called more or less often; less than half a call is chance."""
    return abs(_calls(new) - _calls(old)) >= 0.5


def _other_work(pairs: Sequence[_Pair]) -> Iterator[str]:
    """Yield a note if modules are new or gone, or are called more or less often."""
    both = [(old, new) for old, new in pairs if old and new]
    other = [pair for pair in both if _differ_in_calls(*pair)]
    sentences = []
    if other:
        old, new = max(other, key=lambda pair: abs(_wall(pair[1]) - _wall(pair[0])))
        sentences.append(
            f"{_any_of(new).label} is called {_calls(new):.3g} times per step, "
            f"{_calls(old):.3g} before"
        )
        if len(other) > 1:
            sentences.append(f"{counted(len(other) - 1, 'more module')} with other calls")
    for side, state in ((1, "new"), (0, "gone")):
        if number := sum(pair[side] is not None and pair[1 - side] is None for pair in pairs):
            sentences.append(
                f"{counted(number, 'module')} {'is' if number == 1 else 'are'} {state}"
            )
    if sentences:
        yield f"The work differs: {'; '.join(sentences)}."


def _wall(rows: _Rows) -> float:
    return fmean(row.wall_ns if row else 0 for row in rows)


_UNLIKE = "The two reports share no module: they are of different models."


def _too_noisy(noise: Noise) -> str:
    one_thread = "" if noise.by_gpu else ", on one thread (OMP_NUM_THREADS=1)"
    if noise.about == "code":
        return (
            "The recordings of a side vary too much to compare: record more on each side, in "
            f"turns, on an idle machine{one_thread}."
        )
    return f"The steps vary too much to compare: record more steps, on an idle machine{one_thread}."


# The step ----------------------------------------------------------------------------------------


def _phases(before: Reports, after: Reports, noise: Noise) -> Iterator[Change]:
    """Yield the change of each phase, if all reports have phases."""
    if not all(report.phases for report in (*before, *after)):
        return
    old, new = (
        [{phase.name: phase for phase in report.phases} for report in side]
        for side in (before, after)
    )
    least = _LEAST_PHASE * max(fmean(report.step_ns for report in side) for side in (before, after))

    def times(
        name: PhaseName, reports: Reports, phases: Sequence[Mapping[PhaseName, Phase]]
    ) -> Runs:
        return Cost.of([phases_of.get(name) for phases_of in phases], reports).wall

    for name in get_args(PhaseName):
        if any(name in side_phases for side_phases in (*old, *new)):
            earlier, later = times(name, before, old), times(name, after, new)
            yield of_whole("phase", name, earlier, later, noise, least)


# The backward ------------------------------------------------------------------------------------


def _pairs(before: Reports, after: Reports) -> tuple[list[_Pair], tuple[Move, ...]]:
    """Return the modules of both sides in pairs, ``None`` for gone and new, and the moves."""
    rows = _by_path(*before, *after)
    old, new = (_by_side(side_rows) for side_rows in (rows[: len(before)], rows[len(before) :]))
    paths, moves = aligned(
        *({path: _any_of(module_rows) for path, module_rows in side.items()} for side in (old, new))
    )
    pairs: list[_Pair] = [
        (None if old_path is None else old[old_path], None if new_path is None else new[new_path])
        for old_path, new_path in paths
    ]
    return pairs, moves


def _by_side(recordings: Sequence[Mapping[str, Row]]) -> dict[str, _Rows]:
    """Return the rows of each name, one for each recording of a side."""
    names = dict.fromkeys(name for rows in recordings for name in rows)
    return {name: [rows.get(name) for rows in recordings] for name in names}


def _of_module(
    old: _Rows | None, new: _Rows | None, before: Reports, after: Reports, noise: Noise
) -> Change:
    row = _any_of(new or old or ())
    costs = (
        Cost.of(old or [None] * len(before), before),
        Cost.of(new or [None] * len(after), after),
    )
    judged = noise.of_part(*costs, held_up=True)
    before_path = _any_of(old).path if old else None
    return build(
        "module",
        row.path,
        before_path,
        row.class_name,
        costs,
        judged,
        noise,
        gone=new is None,
    )


def _unowned(
    before: Reports, after: Reports, noise: Noise, pairs: Sequence[_Pair]
) -> Iterator[Change]:
    """Yield the change of what no module owns, by name, and of what neither has of the whole."""
    sides: list[dict[str, Cost]] = []
    wholes = ((before, noise.before), (after, noise.after))
    for (reports, whole_cost), modules in zip(wholes, zip(*pairs, strict=True), strict=True):
        named = _by_side(
            [{row.path: row for row in report.modules if not row.is_module} for report in reports]
        )
        named.pop(LEFT_OUT, None)  # what it has is left out once more
        costs = {path: Cost.of(rows, reports) for path, rows in named.items()}
        owned = [Cost.of(rows, reports) for rows in modules if rows]
        rest = whole_cost.without([*owned, *costs.values()])
        if rest.is_something:
            costs[LEFT_OUT] = rest
        sides.append(costs)
    nothing = [Cost.of([None] * len(reports), reports) for reports in (before, after)]
    for name in sorted({*sides[0], *sides[1]}):
        start, end = (costs.get(name, none) for costs, none in zip(sides, nothing, strict=True))
        judged = noise.of_part(start, end, held_up=False)
        yield build("unowned", name, name, "", (start, end), judged, noise)


def _by_path(*reports: Report) -> list[dict[str, Row]]:
    """Return the modules of each report by path, or by label if two groups share a pattern."""
    modules = [[row for row in report.modules if row.is_module] for report in reports]
    shared: set[str] = set()
    for rows in modules:
        seen_paths: set[str] = set()
        for row in rows:
            (shared if row.path in seen_paths else seen_paths).add(row.path)
    return [
        {row.label if row.path in shared else row.path: row for row in rows} for rows in modules
    ]


def _by_node(before: Reports, after: Reports, noise: Noise) -> Iterator[Change]:
    sides = [[_nodes(report) for report in reports] for reports in (before, after)]
    node_names = {name for side in sides for times in side for name in times}
    names_by_side = [{name for times in side for name in times} for side in sides]
    for name in sorted(node_names):
        start, end = (
            Cost.of_clock([Times(times.get(name, 0), ()) for times in side]) for side in sides
        )
        kind: ChangeKind = "unowned" if name == NO_NODE else "node"
        before_name = name if name in names_by_side[0] or name == NO_NODE else None
        gone = name not in names_by_side[1] and name != NO_NODE
        by_clock = replace(noise, by_gpu=False)
        yield build(kind, name, before_name, "", (start, end), ("wall", None), by_clock, gone=gone)


def _nodes(report: Report) -> dict[str, int]:
    """Return the time of each autograd node by name, and what they leave over."""
    times = {op.name: op.wall_ns for op in report.operators}
    if rest := report.wall_ns - sum(times.values()):
        times[NO_NODE] = times.get(NO_NODE, 0) + rest
    return times


def _names_modules(report: Report) -> bool:
    """Return whether the trace names modules."""
    return any(row.is_module for row in report.modules)


# Cautions ----------------------------------------------------------------------------------------


def _cautions(before: Reports, after: Reports, by: str, noise: Noise) -> Iterable[str]:
    """Yield what to know before trusting the numbers, one note at a time."""
    for warning in warnings_of_sides(before, after):
        if by == "module" or "names no modules" not in warning:
            yield warning
    if by == "node":
        named = [any(map(_names_modules, side)) for side in (before, after)]
        if any(named):
            side = "after" if named[0] else "before"
            yield f"The recording {side} names no modules, so {_BY_NODE}"
        else:
            yield f"Neither recording names modules, so {_BY_NODE}"
    fewest = min(report.steps for report in (*before, *after))
    if fewest < 2:
        yield "One step has no spread: record several on both sides to tell a change from noise."
    elif fewest < 4:
        yield "Two or three steps show only large changes. profile(steps=10) records more."
    units = [{report.step_unit for report in side} for side in (before, after)]
    if len(units[0] | units[1]) > 1:
        unit_names = [" or ".join(sorted(side)) for side in units]
        yield (
            f"The steps differ in kind: {unit_names[0]} before, {unit_names[1]} after. "
            "Times per step may not be comparable."
        )
    if before[0].has_gpu != after[0].has_gpu:
        yield f"Only the recording {'before' if before[0].has_gpu else 'after'} has GPU work."
    if noise.about == "code":
        yield from _in_turns(before, after)
    elif max(len(before), len(after)) > 1:
        yield f"{ENOUGH} recordings or more on each side tell what is the code."


def _in_turns(before: Reports, after: Reports) -> Iterator[str]:
    """Yield a note if all recordings of one side were made before those of the other."""
    times = [[report.recorded.get("time", "") for report in side] for side in (before, after)]
    if not all(times[0] + times[1]):
        return
    if max(times[0]) < min(times[1]) or max(times[1]) < min(times[0]):
        yield (
            "All of one side was recorded before the other, so what the machine did in between "
            "counts as the code: record in turns, one of each side after the other."
        )


_BY_NODE = (
    "autograd nodes are compared by name. No change of a node is claimed, because a report does "
    "not have the times of nodes by step."
)


# Another machine ---------------------------------------------------------------------------------

_FEWEST = 3
"""Modules with the same work from which a machine is known: one that got slower is outvoted."""
_SHARE = 0.003
"""Share of the backward from which a module counts."""


def scaled_to(after: Report, before: Report) -> tuple[Report, str]:
    """Return ``before`` with its times on the scale of ``after``, and a note about that.

    Two machines differ in all modules at once. So the times before are multiplied by the median,
    over the modules, of how many times as long they take now. What is left is how the modules
    differ from each other. Only modules that did the same work on both sides count: of the same
    class, and called as often. New modules and more calls say nothing about a machine, and stay a
    slowdown.

    A slowdown of everything at once looks like another machine, and nothing here tells them apart.
    """
    matched, _ = _pairs([before], [after])
    pairs = [
        (_any_of(old), _any_of(new))
        for old, new in matched
        if old and new and _is_same_work(old, new)
    ]
    wall, modules = _factor(before, after, "wall_ns", pairs)
    gpu, _ = _factor(before, after, "gpu_ns", pairs)
    if modules < _FEWEST:
        return before, (
            "The report before may be of another machine, and fewer than three modules do the same "
            "work in both reports, so the speed of the machine is not known: the times are "
            "compared as they are."
        )

    def scaled(costs: Any, times: Sequence[str], factor: float) -> Any:
        changes: dict[str, Any] = {name: round(getattr(costs, name) * factor) for name in times}
        for name in times:
            by_step = f"{name}_by_step"
            changes[by_step] = tuple(round(time * factor) for time in getattr(costs, by_step))
        return replace(costs, **changes)

    scaled_before: Report = scaled(scaled(before, ("step_ns", "wall_ns"), wall), ("gpu_ns",), gpu)
    scaled_before = replace(
        scaled_before,
        modules=tuple(
            scaled(scaled(row, ("wall_ns",), wall), ("gpu_ns",), gpu) for row in before.modules
        ),
        phases=tuple(scaled(phase, ("wall_ns",), wall) for phase in before.phases),
    )
    both = before.has_gpu and after.has_gpu
    times = f"{wall:.2f} (GPU times: by {gpu:.2f})" if both else f"{wall:.2f}"
    return scaled_before, (
        f"The report before may be of another machine: its times are multiplied by {times}, which "
        f"is what {modules} modules with the same work have in common. A slowdown of everything at "
        "once would look the same."
    )


def _factor(
    before: Report, after: Report, time: str, pairs: Sequence[tuple[Row, Row]]
) -> tuple[float, int]:
    """Return how many times as long the pairs typically take after, and how many say so."""
    least_before, least_after = (_SHARE * getattr(report, time) for report in (before, after))
    ratios = [
        new / old
        for old, new in (
            (getattr(old_row, time), getattr(new_row, time)) for old_row, new_row in pairs
        )
        if old > 0 and new > 0 and (old >= least_before or new >= least_after)
    ]
    return (median(ratios) if len(ratios) >= _FEWEST else 1.0), len(ratios)
