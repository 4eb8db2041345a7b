"""Decide the verdict of each change, from the costs on both sides and the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, get_args

from backspot.comparison.noise import (
    Common,
    Interval,
    Limits,
    Runs,
    Times,
    common_to,
    interval,
    is_about_code,
    mean_of,
)
from backspot.formatting import MANY_PERCENT, MINUS, duration, times_as_long
from backspot.results.comparison import About, Change, ChangeKind, Comparison, Side, Time, Verdict
from backspot.results.costs import Phase, Row
from backspot.results.report import Report, StepUnit

_SHARE, _LEAST = 0.02, 0.005
"""Shares of a module's clock time and of the backward below which no change is claimed."""
_GPU_SHARE, _GPU_LEAST = 0.05, 0.001
"""The same of GPU times."""
_HELD_UP_SHARE, _HELD_UP_LEAST = 0.1, 0.05
"""The same of clock times where both sides have GPU times."""
_ALIKE = 0.05
"""Common change of all modules from which a note says so."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one thing takes in the recordings of a side, in clock time and in device time."""

    wall: Runs
    gpu: Runs

    @classmethod
    def of(cls, costs: Sequence[Report | Row | Phase | None], reports: Sequence[Report]) -> Cost:
        """Return what each report, or its row or phase, has; ``None`` is nothing."""
        wall, gpu = [], []
        for cost, report in zip(costs, reports, strict=True):
            none, left_out = (0,) * report.steps, left_out_of(report)
            real = report.unprofiled_step_ns_by_step if report.clock == "real" else ()
            if cost is None:
                wall.append(Times(0, none, left_out, real))
            else:
                wall.append(Times(cost.wall_ns, cost.wall_ns_by_step, left_out, real))
            if cost is None or isinstance(cost, Phase):
                gpu.append(Times(0, none, left_out))
            else:
                gpu.append(Times(cost.gpu_ns, cost.gpu_ns_by_step, left_out))
        return cls(wall, gpu)

    @classmethod
    def of_clock(cls, runs: Runs) -> Cost:
        """Return what takes clock time only."""
        return cls(runs, [Times(0, ()) for _ in runs])

    @property
    def is_something(self) -> bool:
        """Whether there is any time, in any step."""
        return any(times.typical or any(times.by_step) for times in (*self.wall, *self.gpu))

    def to(self, time: Time) -> Runs:
        """Return one of the two."""
        return self.wall if time == "wall" else self.gpu

    def without(self, costs: Sequence[Cost]) -> Cost:
        """Return what parts leave over of a whole."""

        def rest(time: Time) -> Runs:
            return [
                replace(
                    total,
                    typical=total.typical - sum(cost.typical for cost in of_parts),
                    by_step=tuple(
                        ns - sum(cost.by_step[step] for cost in of_parts)
                        for step, ns in enumerate(total.by_step)
                    ),
                )
                for total, *of_parts in zip(
                    self.to(time), *(cost.to(time) for cost in costs), strict=True
                )
            ]

        return Cost(rest("wall"), rest("gpu"))


def left_out_of(report: Report) -> frozenset[int]:
    """Return the steps that something held up."""
    return frozenset(hiccup.step for hiccup in report.hiccups)


@dataclass(frozen=True, slots=True)
class Noise:
    """What decides whether a change is more than noise.

    Attributes:
        before: The whole backward before.
        after: The whole backward after.
        by_gpu: Whether all recordings have device work.
        modules: How many modules are looked at together.
        wholes: How many phases, and the backward.
        wall: What all modules have in common in clock time.
        gpu: The same in device time.
    """

    before: Cost
    after: Cost
    by_gpu: bool
    modules: int = 1
    wholes: int = 1
    wall: Common | None = None
    gpu: Common | None = None

    @property
    def about(self) -> About:
        """What is told apart: the code, or no more than the recordings."""
        return "code" if is_about_code(self.before.wall, self.after.wall) else "recordings"

    def with_modules(
        self, same: Sequence[tuple[Cost, Cost]], modules: int, *, work_differs: bool = False
    ) -> Noise:
        """Return the same with what modules of both sides have in common that did the same work.

        ``work_differs`` is whether there are other modules, which did other work.
        """
        wall, gpu = (
            common_to(
                ((old.to(time), new.to(time)) for old, new in same),
                (mean_of(self.before.to(time)), mean_of(self.after.to(time))),
                work_differs=work_differs,
            )
            for time in get_args(Time)
        )
        return replace(self, modules=max(1, modules), wall=wall, gpu=gpu)

    def of_part(self, old: Cost, new: Cost, *, held_up: bool) -> tuple[Time, Interval | None]:
        """Return the time by which a part of the backward is judged, and the interval.

        ``held_up``: a host that holds it up counts too, if the device does the same work.
        """
        if not self.by_gpu:
            return "wall", self._interval("wall", old, new, _SHARE, _LEAST)
        by_gpu = self._interval("gpu", old, new, _GPU_SHARE, _GPU_LEAST)
        if held_up and not (by_gpu and by_gpu.clear):
            by_wall = self._interval("wall", old, new, _HELD_UP_SHARE, _HELD_UP_LEAST)
            if by_wall and by_wall.clear:
                return "wall", by_wall
        return "gpu", by_gpu

    def _interval(
        self, time: Time, old: Cost, new: Cost, share: float, least: float
    ) -> Interval | None:
        total = max(mean_of(self.before.to(time)), mean_of(self.after.to(time)))
        common = self.wall if time == "wall" else self.gpu
        limits = Limits(self.modules, is_module=True, share=share, least=least * total)
        return interval(old.to(time), new.to(time), common, limits)

    def common(self) -> Iterator[str]:
        """Yield a note if all modules changed alike."""
        if self.by_gpu and (alike := _alike(self.gpu)):
            yield f"All modules alike are {alike} in GPU time: {_EVERYTHING}"
        elif alike := _alike(self.wall):
            if self.by_gpu:
                yield f"All modules alike are {alike}, but not in GPU time: the host or its load."
            else:
                yield f"All modules alike are {alike}: {_EVERYTHING}"


_EVERYTHING = "the machine (its load or clock), or everything (batch size, precision)."


def _alike(common: Common | None) -> str:
    if common is None or abs(common.shift) < max(_ALIKE, common.scatter):
        return ""
    return f"about {abs(common.percent):.0f}% {'slower' if common.shift > 0 else 'faster'}"


def by_size(change: Change) -> tuple[bool, float, float, float, str]:
    """Return what to sort changes by: those beyond the noise first, then the largest."""
    _, after, by = change.judged_ms
    return not change.differs, -abs(by), -after, -abs(change.change_ms), change.path


def of_whole(
    kind: ChangeKind, name: str, old: Runs, new: Runs, noise: Noise, least: float = 0.0
) -> Change:
    """Return the change of the step, of a phase, or of the whole backward."""
    difference = interval(
        old, new, None, Limits(1 if kind == "step" else noise.wholes, least=least)
    )
    costs = Cost.of_clock(old), Cost.of_clock(new)
    whole_change = build(kind, name, name, "", costs, ("wall", difference), noise)
    if kind == "whole" and noise.by_gpu:
        before, after = (mean_of(cost.gpu) / 1e6 for cost in (noise.before, noise.after))
        whole_change = replace(whole_change, before_gpu_ms=before, after_gpu_ms=after)
    return whole_change


def build(
    kind: ChangeKind,
    path: str,
    before_path: str | None,
    class_name: str,
    costs: tuple[Cost, Cost],
    judged: tuple[Time, Interval | None],
    noise: Noise,
    *,
    gone: bool = False,
) -> Change:
    """Return the change from the first of the costs to the second."""
    old, new = costs
    time, difference = judged
    by_gpu = noise.by_gpu and kind in ("module", "unowned")
    start, end = mean_of(old.wall), mean_of(new.wall)
    change = mean_of(new.to(time)) - mean_of(old.to(time))
    return Change(
        kind=kind,
        path=path,
        before_path=before_path,
        class_name=class_name,
        before_ms=start / 1e6,
        after_ms=end / 1e6,
        change_ms=end / 1e6 - start / 1e6,
        percent=(end - start) / start * 100 if start else None,
        before_gpu_ms=mean_of(old.gpu) / 1e6 if by_gpu else None,
        after_gpu_ms=mean_of(new.gpu) / 1e6 if by_gpu else None,
        judged_by=time,
        low_ms=None if difference is None else difference.low / 1e6,
        high_ms=None if difference is None else difference.high / 1e6,
        verdict=_verdict(before_path, path, change, difference, noise.about, gone=gone),
        before_ns_by_step=() if before_path is None else _each_step(old.wall),
        after_ns_by_step=() if gone else _each_step(new.wall),
        before_ms_by_recording=tuple(times.typical / 1e6 for times in old.to(time)),
        after_ms_by_recording=tuple(times.typical / 1e6 for times in new.to(time)),
    )


def _each_step(runs: Runs) -> tuple[int, ...]:
    """Return the times of each step, those of several recordings one after the other."""
    return tuple(ns for times in runs for ns in times.by_step)


_BEYOND: dict[About, tuple[Verdict, Verdict]] = {
    "code": ("slower", "faster"),
    "recordings": ("longer", "shorter"),
}


def _verdict(
    before_path: str | None,
    path: str,
    change: float,
    noise: Interval | None,
    about: About,
    *,
    gone: bool,
) -> Verdict:
    if before_path is None:
        return "new"
    if gone:
        return "gone"
    if noise is not None and noise.clear:
        more, less = _BEYOND[about]
        return more if change > 0 else less
    if before_path != path:
        return "moved"
    if noise is not None:
        return "undecided" if noise.doubtful else "within the noise"
    return "undecided" if change else "within the noise"


def too_noisy(change: Change, percent: float, about: About) -> str:
    """Return why nobody can tell whether a change exceeds a limit in percent, and a remedy."""
    question = f"whether {change.title} got more than {percent:g}% slower"
    noise, before = change.noise_ms, change.judged_ms[0]
    if noise is None:
        return f"too few steps to tell {question}: record ten steps or more on both sides"
    why = "too noisy to tell" if noise > before * percent / 100 else "cannot tell"
    more = "recordings on each side" if about == "code" else "steps"
    return (
        f"{why} {question}: {measured(change)}; record more {more}, on an idle machine and, on a "
        "CPU, with OMP_NUM_THREADS=1, or allow more"
    )


def measured(change: Change) -> str:
    """Return what was measured: ``22.0 ms, then 61.4 ms (+179%), noise ±39.1 ms (±178%)``."""
    before, after, _ = change.judged_ms
    times = [duration(ms * 1e6) for ms in (before, after)]
    text = f"{times[0]}, then {times[1]}"
    if change.judged_percent is not None:
        by = times_as_long(change.judged_percent)
        by = by or f"{change.judged_percent:+.0f}%".replace("-", MINUS)
        text += f" ({by})" if by[1:] != "0%" else " (0%)"
    if change.noise_ms is not None:
        text += f", noise ±{duration(change.noise_ms * 1e6)}"
        if before and change.noise_ms < before * MANY_PERCENT / 100:
            text += f" (±{change.noise_ms / before:.0%})"
    return text


class _Warned(Protocol):
    """What was recorded, with warnings."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before trusting it."""


@dataclass(frozen=True)
class Comparer:
    """What compares a kind of result other than reports.

    Attributes:
        kind: the class of these results.
        compare: compares two sides, of one result or several each, with their two names.
        mixed: what to say where only some results are of this kind.
    """

    kind: type
    compare: Callable[..., Comparison]
    mixed: str


def warnings_of_sides(before: Sequence[_Warned], after: Sequence[_Warned]) -> Iterator[str]:
    """Yield each warning once, with the side that has it: ``Before``, ``After`` or ``Both``."""
    old, new = ([text for report in side for text in report.warnings] for side in (before, after))
    for warning in dict.fromkeys((*old, *new)):
        if warning in old:
            yield f"{'Both' if warning in new else 'Before'}: {warning}"
        else:
            yield f"After: {warning}"


def side_of(traces: Sequence[str], steps: int, unit: StepUnit, name: str) -> Side:
    """Return what is said of a side: of several recordings, the first and the last of them."""
    trace = traces[0] if len(traces) == 1 else " … ".join(dict.fromkeys((traces[0], traces[-1])))
    return Side(trace, steps, unit, name, len(traces))
