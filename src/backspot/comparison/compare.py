"""Compare two reports: the step, its phases and the backward module by module, with cautions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Literal, get_args

from backspot.comparison.align import aligned
from backspot.comparison.clocks import on_one_clock
from backspot.comparison.jobs import compare_jobs
from backspot.comparison.judge import Cost, Noise, build, by_size, of_whole, warnings_of_both
from backspot.comparison.noise import Times
from backspot.errors import UsageError
from backspot.formatting import counted, quoted
from backspot.results.comparison import (
    Change,
    ChangeKind,
    Comparison,
    Move,
    Side,
)
from backspot.results.costs import PhaseName, Row
from backspot.results.job import JobReport
from backspot.results.report import Report

_LEAST_PHASE = 0.01
"""Share of the step below which a phase's change is not claimed."""
LEFT_OUT = "(rows left out)"
NO_NODE = "(no autograd node)"


def compare(
    before: Report | JobReport, after: Report | JobReport, *, names: tuple[str, str] = ("", "")
) -> Comparison:
    """Compare two reports: the step, its phases, and the backward module by module.

    Modules are matched by path, also where they moved or were renamed and the match is unambiguous.
    They are compared by GPU time, or without it by clock time. A change is claimed (``slower`` or
    ``faster``) beyond the noise and beyond what all modules have in common; ``docs/json.md`` has
    the limits. With one step on a side nothing is claimed. Without module labels, autograd nodes
    are compared by name, and no change of them is claimed.

    Two jobs of many ranks are compared by clock time, on their typical rank: the median of each
    module, forward and backward, and of the waits. ``Comparison.ranks`` has each rank's own time.

    Args:
        before: The first report, or the first job.
        after: The second one, of the same kind.
        names: Names of the two, such as ``("main", "branch")``. Default: what was read.

    Returns:
        The comparison, with times in milliseconds per step.

    Raises:
        UsageError: If ``before`` and ``after`` are not two reports or two jobs, or ``names`` is
            invalid.

    Example:
        >>> before = backspot.locate("main.trace.json.gz")
        >>> after = backspot.locate("branch.trace.json.gz")
        >>> print(backspot.compare(before, after))
        The step got slower by 20%: 31.7 ms before, 38.2 ms after, per step; ...
    """
    for report in (before, after):
        if not isinstance(report, (Report, JobReport)):
            raise UsageError(
                f"compare takes two reports, not {type(report).__name__}: backspot.locate(trace) "
                "or backspot.Report.load(path) gives one"
            )
    if (
        not isinstance(names, (tuple, list))
        or len(names) != 2
        or not all(isinstance(name, str) for name in names)
    ):
        raise UsageError(f"names={quoted(names)}: give two texts, what to call before and after")
    if isinstance(before, JobReport) and isinstance(after, JobReport):
        return compare_jobs(before, after, names)
    if isinstance(before, JobReport) or isinstance(after, JobReport):
        raise UsageError(
            "one is a job of many ranks and the other is a report of one: compare two jobs, or the "
            "same rank of both"
        )
    before, after, other_clock = on_one_clock(before, after)
    by: Literal["module", "node"] = (
        "module" if _names_modules(before) and _names_modules(after) else "node"
    )
    noise = Noise(Cost.of(before), Cost.of(after), by_gpu=before.has_gpu and after.has_gpu)
    moves: tuple[Move, ...] = ()
    unlike: tuple[str, ...] = ()
    if by == "node":
        changes = [*_by_node(before, after)]
    else:
        pairs, moves = _pairs(before, after)
        shared = [(was, now) for was, now in pairs if was and now]
        same = [pair for pair in shared if _is_same_work(*pair)]
        noise = noise.with_shifts(
            [(Cost.of(was), Cost.of(now)) for was, now in same],
            work_differs=len(same) < len(pairs),
        )
        changes = [_of_module(was, now, noise) for was, now in pairs]
        changes += _unowned(before, after, noise)
        unlike = tuple(_other_work(pairs)) if shared else (_UNLIKE,)
    changes.sort(key=by_size)
    was, now = (Times(report.step_ns, report.step_ns_by_step) for report in (before, after))
    step = of_whole("step", "", was, now, noise)
    whole = of_whole("whole", "", noise.before.wall, noise.after.wall, noise)
    threads = "" if before.has_gpu else ", on one thread (OMP_NUM_THREADS=1)"
    return Comparison(
        step=step,
        phases=tuple(_phases(before, after, noise)),
        whole=whole,
        changes=tuple(changes),
        by=by,
        moves=moves,
        before=Side(before.trace, before.steps, before.step_unit, names[0]),
        after=Side(after.trace, after.steps, after.step_unit, names[1]),
        notes=(
            *unlike,
            *noise.common(),
            *([other_clock] if other_clock else []),
            *_cautions(before, after, by),
            *([_TOO_NOISY.format(threads)] if step.is_noisy or whole.is_noisy else []),
        ),
    )


def _is_same_work(was: Row, now: Row) -> bool:
    return was.class_name == now.class_name and not _differ_in_calls(was, now)


def _differ_in_calls(was: Row, now: Row) -> bool:
    """Return whether a module is called more or less often; less than half a call is chance."""
    return abs(now.calls - was.calls) >= 0.5


def _other_work(pairs: Sequence[tuple[Row | None, Row | None]]) -> Iterator[str]:
    """Yield a note if modules are new or gone, or are called more or less often."""
    both = [(was, now) for was, now in pairs if was and now]
    other = [pair for pair in both if _differ_in_calls(*pair)]
    said = []
    if other:
        was, now = max(other, key=lambda pair: abs(pair[1].wall_ns - pair[0].wall_ns))
        said.append(f"{now.label} is called {now.calls:.3g} times per step, {was.calls:.3g} before")
        if len(other) > 1:
            said.append(f"{counted(len(other) - 1, 'more module')} with other calls")
    for side, what in ((1, "new"), (0, "gone")):
        if number := sum(pair[side] is not None and pair[1 - side] is None for pair in pairs):
            said.append(f"{counted(number, 'module')} {'is' if number == 1 else 'are'} {what}")
    if said:
        yield f"The work differs: {'; '.join(said)}."


_UNLIKE = "The two reports share no module: they are of different models."
_TOO_NOISY = "The steps vary too much to compare: record both on an idle machine{}."


# The step ----------------------------------------------------------------------------------------


def _phases(before: Report, after: Report, noise: Noise) -> Iterator[Change]:
    """Yield the change of each phase, if both reports have phases."""
    if not before.phases or not after.phases:
        return
    old, new = (
        {phase.name: Times(phase.wall_ns, phase.wall_ns_by_step) for phase in report.phases}
        for report in (before, after)
    )
    least = _LEAST_PHASE * max(before.step_ns, after.step_ns)
    for name in get_args(PhaseName):
        if name in old or name in new:
            was = old.get(name, Times(0, (0,) * before.steps))
            now = new.get(name, Times(0, (0,) * after.steps))
            yield of_whole("phase", name, was, now, noise, least)


# The backward ------------------------------------------------------------------------------------


def _pairs(
    before: Report, after: Report
) -> tuple[list[tuple[Row | None, Row | None]], tuple[Move, ...]]:
    """Return the modules of both reports in pairs, ``None`` for gone and new, and the moves."""
    old, new = _by_path(before, after)
    paths, moves = aligned(old, new)
    pairs = [
        (None if was is None else old[was], None if now is None else new[now]) for was, now in paths
    ]
    return pairs, moves


def _of_module(was: Row | None, now: Row | None, noise: Noise) -> Change:
    known = next(row for row in (now, was) if row is not None)
    start = Cost.of(was) if was else Cost.nothing(len(noise.before.wall.by_step))
    end = Cost.of(now) if now else Cost.nothing(len(noise.after.wall.by_step))
    judged = noise.of_part(start, end, held_up=True)
    return build(
        "module",
        known.path,
        was.path if was else None,
        known.class_name,
        (start, end),
        judged,
        by_gpu=noise.by_gpu,
        gone=now is None,
    )


def _unowned(before: Report, after: Report, noise: Noise) -> Iterator[Change]:
    """Yield the change of what no module owns, by name."""
    sides: list[dict[str, Cost]] = []
    for report, whole in ((before, noise.before), (after, noise.after)):
        costs = {row.path: Cost.of(row) for row in report.modules if not row.is_module}
        rest = whole.without(report.modules)
        if rest.is_something:
            costs[LEFT_OUT] = rest
        sides.append(costs)
    for name in sorted({*sides[0], *sides[1]}):
        start = sides[0].get(name, Cost.nothing(before.steps))
        end = sides[1].get(name, Cost.nothing(after.steps))
        judged = noise.of_part(start, end, held_up=False)
        yield build("unowned", name, name, "", (start, end), judged, by_gpu=noise.by_gpu)


def _by_path(*reports: Report) -> list[dict[str, Row]]:
    """Return the modules of each report by path, or by label if two groups share a pattern."""
    modules = [[row for row in report.modules if row.is_module] for report in reports]
    shared: set[str] = set()
    for rows in modules:
        known: set[str] = set()
        for row in rows:
            (shared if row.path in known else known).add(row.path)
    return [
        {row.label if row.path in shared else row.path: row for row in rows} for rows in modules
    ]


def _by_node(before: Report, after: Report) -> Iterator[Change]:
    sides = [{op.name: op.wall_ns for op in report.operators} for report in (before, after)]
    for report, times in zip((before, after), sides, strict=True):
        rest = report.wall_ns - sum(times.values())
        if rest:
            times[NO_NODE] = times.get(NO_NODE, 0) + rest
    for name in sorted({*sides[0], *sides[1]}):
        start, end = (Cost(Times(times.get(name, 0), ()), Times(0, ())) for times in sides)
        kind: ChangeKind = "unowned" if name == NO_NODE else "node"
        before_name = name if name in sides[0] or name == NO_NODE else None
        gone = name not in sides[1] and name != NO_NODE
        yield build(kind, name, before_name, "", (start, end), ("wall", None), gone=gone)


def _names_modules(report: Report) -> bool:
    """Return whether the trace names modules."""
    return any(row.is_module for row in report.modules)


def _cautions(before: Report, after: Report, by: str) -> Iterable[str]:
    """Yield what to know before trusting the numbers, one note at a time."""
    for warning in warnings_of_both(before.warnings, after.warnings):
        if by == "module" or "names no modules" not in warning:
            yield warning
    if by == "node":
        if _names_modules(before) or _names_modules(after):
            unnamed = "after" if _names_modules(before) else "before"
            yield f"The recording {unnamed} names no modules, so {_BY_NODE}"
        else:
            yield f"Neither recording names modules, so {_BY_NODE}"
    if min(before.steps, after.steps) < 2:
        yield "One step has no spread: record several on both sides to tell a change from noise."
    elif min(before.steps, after.steps) < 4:
        yield "Two or three steps show only large changes. profile(steps=10) records more."
    if before.step_unit != after.step_unit:
        yield (
            f"The steps differ in kind: {before.step_unit} before, {after.step_unit} after. "
            "Times per step may not be comparable."
        )
    if before.has_gpu != after.has_gpu:
        yield f"Only the recording {'before' if before.has_gpu else 'after'} has GPU work."


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
    matched, _ = _pairs(before, after)
    pairs = [(was, now) for was, now in matched if was and now and _is_same_work(was, now)]
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

    made: Report = scaled(scaled(before, ("step_ns", "wall_ns"), wall), ("gpu_ns",), gpu)
    made = replace(
        made,
        modules=tuple(
            scaled(scaled(row, ("wall_ns",), wall), ("gpu_ns",), gpu) for row in before.modules
        ),
        phases=tuple(scaled(phase, ("wall_ns",), wall) for phase in before.phases),
    )
    both = before.has_gpu and after.has_gpu
    times = f"{wall:.2f} (GPU times: by {gpu:.2f})" if both else f"{wall:.2f}"
    return made, (
        f"The report before may be of another machine: its times are multiplied by {times}, which "
        f"is what {modules} modules with the same work have in common. A slowdown of everything at "
        "once would look the same."
    )


def _factor(
    before: Report, after: Report, time: str, pairs: Sequence[tuple[Row, Row]]
) -> tuple[float, int]:
    """Return how many times as long the pairs typically take after, and how many say so."""
    least_before, least_after = (_SHARE * getattr(one, time) for one in (before, after))
    ratios = [
        new / old
        for old, new in ((getattr(was, time), getattr(now, time)) for was, now in pairs)
        if old > 0 and new > 0 and (old >= least_before or new >= least_after)
    ]
    return (median(ratios) if len(ratios) >= _FEWEST else 1.0), len(ratios)
