"""Decide whether two recordings differ by more than chance, load and clock explain.

The steps of one recording share what the machine did at the time, so no number of steps shows how
recordings differ. On a busy machine, two recordings of the same thing differ by up to 70%, and a
confidence interval of the mean over the steps is far too narrow. The rules below were chosen by
such recordings (``benchmarks/accuracy/compare_runs.py`` evaluates it):

- What all modules do alike is the machine, or everything. The *common shift* is the median over the
  modules of log(after / before), and its *scatter* is 1.4826 times the median absolute deviation
  (Rousseeuw and Croux 1993): how much modules differ between recordings for no reason. The
  uncertainty of a module's steps is taken off its deviation, as squares: a tiny module that varies
  from step to step says nothing about the others.
- The *own change* of a time is what is left of its change without the common shift. A change is
  clear if the change and the own change both exceed the *reach* of the noise.
- The reach of a module is 4 standard deviations: those of the scatter, which is one of logarithms,
  and those of the median over its steps, from their median absolute deviation, added as squares. A
  module is beyond the scatter if its times are a factor of exp(4 * scatter) apart. The reach is at
  least the *range* of its
  steps, without the outermost eighth on each side, and at least a small share of the module and
  of the whole.
- The backward, the step and its phases have one time each, and no others of their kind to compare
  with. Their reach is 1.5 times the range of the steps. A change of 8 times the range is clear
  without the common shift: then the machine was steady in both recordings. So is a change by which
  the ranges are a factor of 3 apart, which load on the machine hardly explains.
- Few steps show their range by luck only, so the range and that factor count (1 + (4 / steps)^2)
  times.

Only modules that did the same work count for the common shift: of the same class, and called as
often on both sides. With fewer than eight of them, or three beside new modules or other numbers of
calls, there is no common shift. Then only a change of 8 times the range is
clear for the whole, and one of 2 times the range and 8% for a module. With a single step on either
side there is no range, no reach and no claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

_NORMAL = 1.4826
"""Standard deviation of normal noise in median absolute deviations."""
_MEDIAN = 1.2533
"""Standard error of a median in those of a mean, for normal noise."""
_DEVIATIONS = 4.0
_FEWEST = 8
"""Modules from which a common shift is estimated."""
_FEWEST_BESIDE = 3
"""The same beside modules with other work."""
_SHARE = 0.003
"""Share of the whole from which a module counts for the common shift."""
_APART = 3.0
_FLOOR = 0.02
_FLOOR_UNSHIFTED = 0.08


@dataclass(frozen=True, slots=True)
class Times:
    """What one thing takes: typically, and in each step, in one unit."""

    typical: float
    by_step: Sequence[int]


@dataclass(frozen=True, slots=True)
class Shift:
    """What all modules have in common between two recordings.

    Attributes:
        common: Median of log(after / before).
        scatter: How much the modules deviate from it, as a standard deviation.
    """

    common: float
    scatter: float

    @property
    def percent(self) -> float:
        """The common change in percent of the time before."""
        return math.expm1(self.common) * 100


@dataclass(frozen=True, slots=True)
class Limits:
    """What a change has to exceed, besides its uncertainty.

    Attributes:
        ranges: So many times the range of the steps.
        share: Share of the larger of the two times.
        alone: So many times the range of the steps is clear whatever the modules have in common;
            ``None`` for a module.
    """

    ranges: float = 1.0
    share: float = _FLOOR
    least: float = 0.0
    alone: float | None = None

    @classmethod
    def of_whole(cls, least: float = 0.0) -> Limits:
        """Return the limits of the backward, the step and a phase."""
        return cls(ranges=1.5, least=least, alone=8.0)


@dataclass(frozen=True, slots=True)
class Interval:
    """By how much a time changes, give or take the noise, in the unit of the times.

    It is ``clear`` beyond the noise and what all modules do, ``doubtful`` beyond one of them.
    """

    low: float
    high: float
    clear: bool
    doubtful: bool


def common_shift(
    pairs: Iterable[tuple[Times, Times]],
    wholes: tuple[float, float],
    *,
    work_differs: bool = False,
) -> Shift | None:
    """Return what modules have in common, ``None`` if there are too few to know.

    Args:
        pairs: Times before and after of each module that did the same work.
        wholes: Typical times of all modules together, before and after.
        work_differs: Whether other modules did other work. Then three modules are enough.
    """
    least = _SHARE * max(wholes)
    counted = [
        (was, now)
        for was, now in pairs
        if was.typical > 0 and now.typical > 0 and max(was.typical, now.typical) >= least
    ]
    if len(counted) < (_FEWEST_BESIDE if work_differs else _FEWEST):
        return None
    ratios = [math.log(now.typical / was.typical) for was, now in counted]
    common = median(ratios)
    # What a module varies by from step to step is its own, and no scatter between recordings.
    own = [
        math.hypot(*(_uncertainty(one.by_step) / one.typical for one in pair)) for pair in counted
    ]
    beyond = (
        max(0.0, (ratio - common) ** 2 - of_steps**2)
        for ratio, of_steps in zip(ratios, own, strict=True)
    )
    return Shift(common, _NORMAL * math.sqrt(median(beyond)))


def interval(before: Times, after: Times, shift: Shift | None, limits: Limits) -> Interval | None:
    """Return by how much a time changes; ``None`` if a side has fewer than two steps."""
    steps = min(len(before.by_step), len(after.by_step))
    if steps < 2:
        return None
    # Few steps show their range by luck only.
    luck = 1 + (4 / steps) ** 2
    # Half of the shift on each side, so that the sides can be turned around.
    half = shift.common / 2 if shift else 0.0
    was, now = before.typical * math.exp(half), after.typical * math.exp(-half)
    change, own = after.typical - before.typical, now - was
    spans = luck * math.hypot(_range(before.by_step), _range(after.by_step))
    is_module = limits.alone is None
    ranges, share = limits.ranges, limits.share
    if shift is None and is_module:
        ranges, share = 2 * ranges, max(share, _FLOOR_UNSHIFTED)
    least = max(share * max(before.typical, after.typical, was, now), limits.least)
    reach = max(ranges * spans, least)
    alone = False
    if limits.alone is None:
        scatter = -math.expm1(-_DEVIATIONS * shift.scatter) * max(was, now) if shift else 0.0
        uncertain = (_uncertainty(times.by_step) for times in (before, after))
        reach = max(reach, math.hypot(scatter, *(_DEVIATIONS * one for one in uncertain)))
    elif gap := _gap(before.by_step, after.by_step, _APART * luck):
        reach, alone = min(reach, max(least, abs(change) - gap)), True
    else:
        alone = abs(change) > limits.alone * spans
    beyond = abs(change) > reach
    apart = abs(own) > reach and (own > 0) == (change > 0) and (is_module or shift is not None)
    clear = beyond and (apart or alone)
    return Interval(change - reach, change + reach, clear, not clear and (beyond or apart))


def _ends(by_step: Sequence[int]) -> tuple[int, int]:
    """Return the range of the steps without the outermost eighth on each side."""
    ordered = sorted(by_step)
    cut = (len(ordered) + 3) // 8
    return ordered[cut], ordered[-1 - cut]


def _range(by_step: Sequence[int]) -> float:
    low, high = _ends(by_step)
    return float(high - low)


def _gap(one: Sequence[int], other: Sequence[int], factor: float) -> float:
    """Return the time between the ranges of the steps, 0 if they are not this far apart."""
    lower, upper = sorted((_ends(one), _ends(other)))
    return float(upper[0] - lower[1]) if upper[0] > factor * lower[1] else 0.0


def _uncertainty(by_step: Sequence[int]) -> float:
    """Return the standard error of the median over the steps; 0 of no steps."""
    if not by_step:
        return 0.0
    middle = median(by_step)
    deviation = _NORMAL * median(abs(time - middle) for time in by_step)
    return float(_MEDIAN * deviation / math.sqrt(len(by_step)))
