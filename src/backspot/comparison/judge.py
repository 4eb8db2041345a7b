"""Decide the verdict of each change, from the costs on both sides and the noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from backspot.comparison.noise import Interval, Limits, Shift, Times, common_shift, interval
from backspot.formatting import MINUS, duration
from backspot.results.comparison import Change, ChangeKind, Time, Verdict
from backspot.results.costs import Row
from backspot.results.report import Report

_SHARE, _LEAST = 0.02, 0.005
"""Shares of a module's clock time and of the backward below which no change is claimed."""
_GPU_SHARE, _GPU_LEAST = 0.05, 0.001
"""The same of GPU times."""
_HELD_UP_SHARE, _HELD_UP_LEAST = 0.1, 0.05
"""The same of clock times where both reports have GPU times."""
_ALIKE = 0.05
"""Common change of all modules from which a note says so."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one thing takes in the backward, in clock time and in device time."""

    wall: Times
    gpu: Times

    @classmethod
    def of(cls, cost: Report | Row) -> Cost:
        """Return what a report or a row has."""
        return cls(
            Times(cost.wall_ns, cost.wall_ns_by_step), Times(cost.gpu_ns, cost.gpu_ns_by_step)
        )

    @classmethod
    def of_clock(cls, by_step: Sequence[int], typical: int) -> Cost:
        """Return what takes clock time only."""
        return cls(Times(typical, by_step), Times(0, ()))

    @property
    def is_something(self) -> bool:
        """Whether there is any time, in any step."""
        return any(times.typical or any(times.by_step) for times in (self.wall, self.gpu))

    def to(self, time: Time) -> Times:
        """Return one of the two."""
        return self.wall if time == "wall" else self.gpu

    @classmethod
    def nothing(cls, steps: int) -> Cost:
        """Return what takes no time in any step."""
        return cls(Times(0, (0,) * steps), Times(0, (0,) * steps))

    def without(self, rows: Sequence[Row]) -> Cost:
        """Return what the rows leave over of a whole."""

        def rest(whole: Times, parts: Sequence[Times]) -> Times:
            return Times(
                whole.typical - sum(part.typical for part in parts),
                tuple(
                    time - sum(part.by_step[step] for part in parts)
                    for step, time in enumerate(whole.by_step)
                ),
            )

        costs = [Cost.of(row) for row in rows]
        return Cost(
            rest(self.wall, [cost.wall for cost in costs]),
            rest(self.gpu, [cost.gpu for cost in costs]),
        )


@dataclass(frozen=True, slots=True)
class Noise:
    """What decides whether a change is more than noise.

    Attributes:
        before: The whole backward before.
        after: The whole backward after.
        wall: What all modules have in common in clock time.
        gpu: The same in device time.
    """

    before: Cost
    after: Cost
    by_gpu: bool
    wall: Shift | None = None
    gpu: Shift | None = None

    def with_shifts(
        self, same: Sequence[tuple[Cost, Cost]], *, work_differs: bool = False
    ) -> Noise:
        """Return the same with what modules of both sides have in common that did the same work.

        ``work_differs`` is whether there are other modules, which did other work.
        """
        wall, gpu = (
            common_shift(
                ((was.to(time), now.to(time)) for was, now in same),
                (self.before.to(time).typical, self.after.to(time).typical),
                work_differs=work_differs,
            )
            for time in get_args(Time)
        )
        return replace(self, wall=wall, gpu=gpu)

    def of_part(self, was: Cost, now: Cost, *, held_up: bool) -> tuple[Time, Interval | None]:
        """Return the time by which a part of the backward is judged, and the interval.

        ``held_up``: a host that holds it up counts too, if the device does the same work.
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
        self, time: Time, was: Cost, now: Cost, share: float, least: float
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


def _alike(shift: Shift | None) -> str:
    if shift is None or abs(shift.common) < max(_ALIKE, shift.scatter):
        return ""
    return f"about {abs(shift.percent):.0f}% {'slower' if shift.common > 0 else 'faster'}"


def by_size(change: Change) -> tuple[bool, float, float, float, str]:
    """Return what to sort changes by: those beyond the noise first, then the largest."""
    _, after, by = change.judged_ms
    return not change.claimed, -abs(by), -after, -abs(change.change_ms), change.path


def of_whole(
    kind: ChangeKind, name: str, was: Times, now: Times, noise: Noise, least: float = 0.0
) -> Change:
    """Return the change of the step, of a phase, or of the whole backward."""
    found = interval(was, now, noise.wall, Limits.of_whole(least))
    none = Times(0, ())
    made = build(kind, name, name, "", (Cost(was, none), Cost(now, none)), ("wall", found))
    if kind == "whole" and noise.by_gpu:
        before, after = (cost.gpu.typical / 1e6 for cost in (noise.before, noise.after))
        made = replace(made, before_gpu_ms=before, after_gpu_ms=after)
    return made


def build(
    kind: ChangeKind,
    path: str,
    before_path: str | None,
    class_name: str,
    costs: tuple[Cost, Cost],
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
        verdict=_verdict(before_path, path, change, noise, gone=gone),
        before_ns_by_step=() if before_path is None else tuple(was.wall.by_step),
        after_ns_by_step=() if gone else tuple(now.wall.by_step),
    )


def _verdict(
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
    if noise is not None and noise.clear:
        return "slower" if change > 0 else "faster"
    if before_path != path:
        return "moved"
    if noise is not None:
        return "undecided" if noise.doubtful else "within the noise"
    return "undecided" if change else "within the noise"


def too_noisy(change: Change, percent: float) -> str:
    """Return why nobody can tell whether a change exceeds a limit in percent, and a remedy."""
    asked = f"whether {change.title} got more than {percent:g}% slower"
    noise, before = change.noise_ms, change.judged_ms[0]
    if noise is None:
        return f"too few steps to tell {asked}: record ten steps or more on both sides"
    larger = noise > before * percent / 100
    why = "too noisy to tell" if larger else "cannot tell"
    machine = "" if larger else ", which may be the machine"
    return (
        f"{why} {asked}: {measured(change)}{machine}; record both on an idle machine and, on a "
        "CPU, with OMP_NUM_THREADS=1, or allow more"
    )


def measured(change: Change) -> str:
    """Return what was measured: ``22.0 ms, then 61.4 ms (+179%), noise ±39.1 ms (±178%)``."""
    before, after, _ = change.judged_ms
    times = [duration(ms * 1e6) for ms in (before, after)]
    said = f"{times[0]}, then {times[1]}"
    if change.judged_percent is not None:
        by = f"{change.judged_percent:+.0f}%".replace("-", MINUS)
        said += f" ({by})" if by[1:] != "0%" else " (0%)"
    if change.noise_ms is not None:
        said += f", noise ±{duration(change.noise_ms * 1e6)}"
        said += f" (±{change.noise_ms / before:.0%})" if before else ""
    return said


def warnings_of_both(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """Yield each warning once, with the side that has it: ``Before``, ``After`` or ``Both``."""
    for warning in dict.fromkeys((*before, *after)):
        if warning in before:
            yield f"{'Both' if warning in after else 'Before'}: {warning}"
        else:
            yield f"After: {warning}"
