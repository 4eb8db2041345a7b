"""Whether one rank takes longer than the others in the same steps, by more than they vary.

Ranks of one job are compared step by step under one load, each with the median of the others. What
differs is no sample of recordings, so no standard error decides but how far apart the steps are:

- What all modules of a rank do alike is its machine. The *common shift* is the median over the
  modules of log(rank / others), and its *scatter* is 1.4826 times the median absolute deviation
  (Rousseeuw and Croux 1993).
- A difference is clear if it and what is left of it without the common shift both exceed the
  *reach*. That of a module is 4 standard deviations: those of the scatter, which is one of
  logarithms, and those of the median over its steps, added as squares. It is at least the *range*
  of its steps, without the outermost eighth on each side.
- A time of which a rank has one only, such as its wait for data, has a reach of 1.5 times the range
  of the steps. A difference of 8 times the range is clear without the common shift.
- Where the ranges are a factor of 3 apart, those of a module besides the common shift, the
  difference is clear: load on the machine hardly explains that in each step.
- Few steps show their range by luck only, so the range and that factor count (1 + (4 / steps)^2)
  times. With a single step there is no range, and nothing is clear.
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
    """What all modules of a rank have in common, compared with the other ranks.

    Attributes:
        common: Median of log(after / before).
        scatter: How much the modules deviate from it, as a standard deviation.
    """

    common: float
    scatter: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What a difference has to exceed, besides its uncertainty.

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
        """Return the limits of a time of which a rank has one only."""
        return cls(ranges=1.5, least=least, alone=8.0)


def common_shift(pairs: Iterable[tuple[float, float]], totals: tuple[float, float]) -> Shift | None:
    """Return what modules have in common, ``None`` if there are too few to know.

    Args:
        pairs: The time of each module on the other ranks, and on this one.
        totals: Times of all modules together, on both.
    """
    least = _SHARE * max(totals)
    ratios = [
        math.log(now / earlier)
        for earlier, now in pairs
        if earlier > 0 and now > 0 and max(earlier, now) >= least
    ]
    if len(ratios) < _FEWEST:
        return None
    common = median(ratios)
    return Shift(common, _NORMAL * median(abs(ratio - common) for ratio in ratios))


def is_apart(before: Times, after: Times, shift: Shift | None, limits: Limits) -> bool:
    """Return whether two times differ beyond the noise; not with fewer than two steps."""
    steps = min(len(before.by_step), len(after.by_step))
    if steps < 2:
        return False
    # Few steps show their range by luck only.
    luck = 1 + (4 / steps) ** 2
    half = shift.common / 2 if shift else 0.0
    earlier, now = before.typical * math.exp(half), after.typical * math.exp(-half)
    change, own = after.typical - before.typical, now - earlier
    spans = luck * math.hypot(_range(before.by_step), _range(after.by_step))
    is_module = limits.alone is None
    ranges, share = limits.ranges, limits.share
    if shift is None and is_module:
        ranges, share = 2 * ranges, max(share, _FLOOR_UNSHIFTED)
    least = max(share * max(before.typical, after.typical, earlier, now), limits.least)
    reach = max(ranges * spans, least)
    alone = False
    common = math.exp(2 * half) if is_module else 1.0
    gap = _gap([time * common for time in before.by_step], after.by_step, _APART * luck)
    if gap:
        reach, alone = min(reach, max(least, abs(change) - gap)), True
    elif limits.alone is None:
        scatter = -math.expm1(-_DEVIATIONS * shift.scatter) * max(earlier, now) if shift else 0.0
        uncertain = (_uncertainty(times.by_step) for times in (before, after))
        reach = max(
            reach, math.hypot(scatter, *(_DEVIATIONS * deviation for deviation in uncertain))
        )
    else:
        alone = abs(change) > limits.alone * spans
    apart = abs(own) > reach and (own > 0) == (change > 0) and (is_module or shift is not None)
    return abs(change) > reach and (apart or alone)


def _ends(by_step: Sequence[float]) -> tuple[float, float]:
    """Return the range of the steps without the outermost eighth on each side."""
    ordered = sorted(by_step)
    cut = (len(ordered) + 3) // 8
    return ordered[cut], ordered[-1 - cut]


def _range(by_step: Sequence[int]) -> float:
    low, high = _ends(by_step)
    return float(high - low)


def _gap(first: Sequence[float], second: Sequence[float], factor: float) -> float:
    """Return the time between the ranges of the steps, 0 if they are not this far apart."""
    lower, upper = sorted((_ends(first), _ends(second)))
    return float(upper[0] - lower[1]) if upper[0] > factor * lower[1] else 0.0


def _uncertainty(by_step: Sequence[int]) -> float:
    """Return the standard error of the median over the steps; 0 of no steps."""
    if not by_step:
        return 0.0
    middle = median(by_step)
    deviation = _NORMAL * median(abs(time - middle) for time in by_step)
    return float(_MEDIAN * deviation / math.sqrt(len(by_step)))
