"""Compare two reports: the step, its phases and the backward module by module, with cautions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from backspot.comparison.align import aligned
from backspot.comparison.changes import (
    Change,
    ChangeKind,
    Comparison,
    Move,
    Side,
    Time,
    Verdict,
)
from backspot.comparison.noise import Interval, Limits, Shift, Times, common_shift, interval
from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.results.report import UNSTEADY, PhaseName, Report, Row

__all__ = ["compare"]


_SHARE, _LEAST = 0.02, 0.005
"""Shares of a module's clock time and of the backward below which no change is claimed."""
_GPU_SHARE, _GPU_LEAST = 0.05, 0.001
"""The same of GPU times."""
_HELD_UP_SHARE, _HELD_UP_LEAST = 0.1, 0.05
"""The same of clock times where both reports have GPU times."""
_LEAST_PHASE = 0.01
"""Share of the step below which a phase's change is not claimed."""
_ALIKE = 0.05
"""Common change of all modules from which a note says so."""

LEFT_OUT = "(rows left out)"
NO_NODE = "(no autograd node)"


def compare(before: Report, after: Report, *, names: tuple[str, str] = ("", "")) -> Comparison:
    """Compare two reports: the step, its phases, and the backward module by module.

    Modules are matched by path. A module that moved or was renamed is recognised if the match is
    unambiguous. If a side has no module labels, autograd nodes are compared by name, and no change
    of a node is claimed, because a report does not have the times of nodes by step.

    All times are those of a typical step (medians). If both reports have device work, modules are
    compared by GPU time, which hardly depends on how busy the host is. Otherwise they are compared
    by clock time, with what the other modules did: a change is claimed (``slower`` or ``faster``)
    if it is beyond the noise, and beyond what all modules have in common. The noise is estimated
    from how much the modules scatter and how much the steps vary. A module must change by at least
    2% (GPU time: 5%) and by 0.5% (GPU time: 0.1%) of the backward. With a single step on either
    side nothing is claimed.

    If all modules changed alike, the cause is the machine or something that concerns everything,
    and a note says so. What differs between two processes in one module only, such as another
    algorithm of a convolution, cannot be told apart from a change of the code.

    Args:
        before: The first report.
        after: The second report.
        names: Names of the two, such as ``("main", "branch")``. Without a name (default), a
            recording is named by what was read.

    Returns:
        The comparison, with times in milliseconds per step.

    Raises:
        UsageError: If ``before`` or ``after`` is not a report, or ``names`` is not two strings.

    Example:
        >>> before = backspot.locate("main.trace.json.gz")
        >>> after = backspot.locate("branch.trace.json.gz")
        >>> print(backspot.compare(before, after))
        The step got slower by 20%: 31.7 ms before, 38.2 ms after, per step; ...
    """
    for report in (before, after):
        if not isinstance(report, Report):
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
    by: Literal["module", "node"] = (
        "module" if _names_modules(before) and _names_modules(after) else "node"
    )
    noise = _Noise(_Cost.of(before), _Cost.of(after), by_gpu=before.has_gpu and after.has_gpu)
    moves: tuple[Move, ...] = ()
    unlike: tuple[str, ...] = ()
    if by == "node":
        changes = [*_by_node(before, after)]
    else:
        pairs, moves = _pairs(before, after)
        shared = [(was, now) for was, now in pairs if was and now]
        noise = noise.with_shifts(shared)
        changes = [_of_module(was, now, noise) for was, now in pairs]
        changes += _unowned(before, after, noise)
        if not shared:
            unlike = (_UNLIKE,)
    changes.sort(key=_rank)
    return Comparison(
        step=_step(before, after, noise),
        phases=tuple(_phases(before, after, noise)),
        whole=_of_whole("whole", "", noise.before.wall, noise.after.wall, noise),
        changes=tuple(changes),
        by=by,
        moves=moves,
        before=Side(before.trace, before.steps, before.step_unit, names[0]),
        after=Side(after.trace, after.steps, after.step_unit, names[1]),
        notes=(*unlike, *noise.common(), *_cautions(before, after, by)),
    )


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one thing takes in the backward, in clock time and in device time."""

    wall: Times
    gpu: Times

    @classmethod
    def of(cls, cost: Report | Row) -> _Cost:
        """Return what a report or a row has."""
        return cls(
            Times(cost.wall_ns, cost.wall_ns_by_step), Times(cost.gpu_ns, cost.gpu_ns_by_step)
        )

    @property
    def is_something(self) -> bool:
        """Whether there is any time, in any step."""
        return any(times.typical or any(times.by_step) for times in (self.wall, self.gpu))

    def to(self, time: Time) -> Times:
        """Return one of the two."""
        return self.wall if time == "wall" else self.gpu

    @classmethod
    def nothing(cls, steps: int) -> _Cost:
        """Return what takes no time in any step."""
        return cls(Times(0, (0,) * steps), Times(0, (0,) * steps))

    def without(self, rows: Sequence[Row]) -> _Cost:
        """Return what the rows leave over of a whole."""

        def rest(whole: Times, parts: Sequence[Times]) -> Times:
            return Times(
                whole.typical - sum(part.typical for part in parts),
                tuple(
                    time - sum(part.by_step[step] for part in parts)
                    for step, time in enumerate(whole.by_step)
                ),
            )

        costs = [_Cost.of(row) for row in rows]
        return _Cost(
            rest(self.wall, [cost.wall for cost in costs]),
            rest(self.gpu, [cost.gpu for cost in costs]),
        )


@dataclass(frozen=True, slots=True)
class _Noise:
    """What decides whether a change is more than noise.

    Attributes:
        before: The whole backward before.
        after: The whole backward after.
        by_gpu: Whether both reports have device work.
        wall: What all modules have in common in clock time.
        gpu: What all modules have in common in device time.
    """

    before: _Cost
    after: _Cost
    by_gpu: bool
    wall: Shift | None = None
    gpu: Shift | None = None

    def with_shifts(self, shared: Sequence[tuple[Row, Row]]) -> _Noise:
        """Return the same with what modules of both reports have in common."""
        wall = common_shift(
            ((was.wall_ns, now.wall_ns) for was, now in shared),
            (self.before.wall.typical, self.after.wall.typical),
        )
        gpu = common_shift(
            ((was.gpu_ns, now.gpu_ns) for was, now in shared),
            (self.before.gpu.typical, self.after.gpu.typical),
        )
        return replace(self, wall=wall, gpu=gpu)

    def of_part(self, was: _Cost, now: _Cost, *, held_up: bool) -> tuple[Time, Interval | None]:
        """Return the time by which a part of the backward is judged, and the interval.

        Args:
            was: Its cost before.
            now: Its cost after.
            held_up: Whether a host that holds it up counts too, if the device does the same work.
        """
        if not self.by_gpu:
            return "wall", self._interval("wall", was, now, _SHARE, _LEAST)
        by_gpu = self._interval("gpu", was, now, _GPU_SHARE, _GPU_LEAST)
        if held_up and not (by_gpu and by_gpu.clear):
            by_wall = self._interval("wall", was, now, _HELD_UP_SHARE, _HELD_UP_LEAST)
            if by_wall and by_wall.clear:
                return "wall", by_wall
        return "gpu", by_gpu

    def _interval(
        self, time: Time, was: _Cost, now: _Cost, share: float, least: float
    ) -> Interval | None:
        whole = max(self.before.to(time).typical, self.after.to(time).typical)
        shift = self.wall if time == "wall" else self.gpu
        return interval(was.to(time), now.to(time), shift, Limits(share=share, least=least * whole))

    def common(self) -> Iterator[str]:
        """Yield a note if all modules changed alike."""
        if self.by_gpu and (seen := _alike(self.gpu)):
            yield f"All modules alike are {seen} in GPU time: {_EVERYTHING}"
        elif seen := _alike(self.wall):
            if self.by_gpu:
                yield f"All modules alike are {seen}, but not in GPU time: the host or its load."
            else:
                yield f"All modules alike are {seen}: {_EVERYTHING}"


_EVERYTHING = "the machine (its load or clock), or everything (batch size, precision)."
_UNLIKE = "The two reports share no module: they are of different models."


def _alike(shift: Shift | None) -> str:
    if shift is None or abs(shift.common) < max(_ALIKE, shift.scatter):
        return ""
    return f"about {abs(shift.percent):.0f}% {'slower' if shift.common > 0 else 'faster'}"


def _rank(change: Change) -> tuple[bool, float, float, float, str]:
    _, after, by = change.judged_ms
    return not change.claimed, -abs(by), -after, -abs(change.change_ms), change.path


# The step ----------------------------------------------------------------------------------------


def _step(before: Report, after: Report, noise: _Noise) -> Change:
    was, now = (Times(report.step_ns, report.step_ns_by_step) for report in (before, after))
    return _of_whole("step", "", was, now, noise)


def _phases(before: Report, after: Report, noise: _Noise) -> Iterator[Change]:
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
            yield _of_whole("phase", name, was, now, noise, least)


def _of_whole(
    kind: ChangeKind, name: str, was: Times, now: Times, noise: _Noise, least: float = 0.0
) -> Change:
    """Return the change of the step, of a phase, or of the whole backward."""
    found = interval(was, now, noise.wall, Limits.of_whole(least))
    none = Times(0, ())
    made = _build(kind, name, name, "", (_Cost(was, none), _Cost(now, none)), ("wall", found))
    if kind == "whole" and noise.by_gpu:
        before, after = (cost.gpu.typical / 1e6 for cost in (noise.before, noise.after))
        made = replace(made, before_gpu_ms=before, after_gpu_ms=after)
    return made


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


def _of_module(was: Row | None, now: Row | None, noise: _Noise) -> Change:
    known = next(row for row in (now, was) if row is not None)
    start = _Cost.of(was) if was else _Cost.nothing(len(noise.before.wall.by_step))
    end = _Cost.of(now) if now else _Cost.nothing(len(noise.after.wall.by_step))
    judged = noise.of_part(start, end, held_up=True)
    return _build(
        "module",
        known.path,
        was.path if was else None,
        known.class_name,
        (start, end),
        judged,
        by_gpu=noise.by_gpu,
        gone=now is None,
    )


def _unowned(before: Report, after: Report, noise: _Noise) -> Iterator[Change]:
    """Yield the change of what no module owns, by name."""
    sides: list[dict[str, _Cost]] = []
    for report, whole in ((before, noise.before), (after, noise.after)):
        costs = {row.path: _Cost.of(row) for row in report.modules if not row.is_module}
        rest = whole.without(report.modules)
        if rest.is_something:
            costs[LEFT_OUT] = rest
        sides.append(costs)
    for name in sorted({*sides[0], *sides[1]}):
        start = sides[0].get(name, _Cost.nothing(before.steps))
        end = sides[1].get(name, _Cost.nothing(after.steps))
        judged = noise.of_part(start, end, held_up=False)
        yield _build("unowned", name, name, "", (start, end), judged, by_gpu=noise.by_gpu)


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
        start, end = (_Cost(Times(times.get(name, 0), ()), Times(0, ())) for times in sides)
        kind: ChangeKind = "unowned" if name == NO_NODE else "node"
        before_name = name if name in sides[0] or name == NO_NODE else None
        gone = name not in sides[1] and name != NO_NODE
        yield _build(kind, name, before_name, "", (start, end), ("wall", None), gone=gone)


def _build(
    kind: ChangeKind,
    path: str,
    before_path: str | None,
    class_name: str,
    costs: tuple[_Cost, _Cost],
    judged: tuple[Time, Interval | None],
    *,
    by_gpu: bool = False,
    gone: bool = False,
) -> Change:
    """Return the change from the first of the costs to the second."""
    was, now = costs
    time, noise = judged
    start, end = was.wall.typical, now.wall.typical
    change = now.to(time).typical - was.to(time).typical
    return Change(
        kind=kind,
        path=path,
        before_path=before_path,
        class_name=class_name,
        before_ms=start / 1e6,
        after_ms=end / 1e6,
        change_ms=end / 1e6 - start / 1e6,
        percent=(end - start) / start * 100 if start else None,
        before_gpu_ms=was.gpu.typical / 1e6 if by_gpu else None,
        after_gpu_ms=now.gpu.typical / 1e6 if by_gpu else None,
        judged_by=time,
        low_ms=None if noise is None else noise.low / 1e6,
        high_ms=None if noise is None else noise.high / 1e6,
        verdict=_verdict(kind, before_path, path, change, noise, gone=gone),
        before_ns_by_step=() if before_path is None else tuple(was.wall.by_step),
        after_ns_by_step=() if gone else tuple(now.wall.by_step),
    )


def _verdict(
    kind: ChangeKind,
    before_path: str | None,
    path: str,
    change: float,
    noise: Interval | None,
    *,
    gone: bool,
) -> Verdict:
    if before_path is None:
        return "new"
    if gone:
        return "gone"
    if (kind, path) in _LEFT_OVER:
        return "within the noise"
    if noise is not None and noise.clear:
        return "slower" if change > 0 else "faster"
    if before_path != path:
        return "moved"
    if noise is not None:
        return "undecided" if noise.doubtful else "within the noise"
    return "undecided" if change else "within the noise"


_LEFT_OVER = (("unowned", UNSTEADY), ("phase", "unsteady"))
"""What is no time of its own."""


def _names_modules(report: Report) -> bool:
    """Return whether the trace names modules."""
    return any(row.is_module for row in report.modules)


def _cautions(before: Report, after: Report, by: str) -> Iterable[str]:
    """Yield what to know before trusting the numbers, one note at a time."""
    for name, report in (("Before", before), ("After", after)):
        for warning in report.warnings:
            if by == "module" or "names no modules" not in warning:
                yield f"{name}: {warning}"
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
