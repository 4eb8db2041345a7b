"""Decide whether two recordings differ by more than their steps vary.

The criterion is a Welch-type interval for the difference of the two means over steps, adapted to
the few steps that people record. It is meant to claim nothing that is not there, and to see what is
clear:

- The degrees of freedom are one less than the smaller number of steps, the lower bound of
  Welch-Satterthwaite: with two steps a side the interval is 12.7 standard errors wide either way.
- A module's own variance over two or three steps is often small by luck. It counts as at least the
  module's mean times the typical (median) relative spread of all modules. This typical spread adds
  ``_BORROWED`` degrees of freedom.
- If both sides have ``_ENOUGH`` steps, a small variance is no longer luck, and the typical spread
  may be that of tiny modules. A second interval uses the module's own variance only. The narrower
  of the two intervals is used, each at half the level.
- Among hundreds of modules a few would pass by chance, so the level is divided by their number
  (Bonferroni). The whole backward is tested alone, with its own variance and the full level.
- The steps of one recording do not show how recordings differ (clocks, temperature, memory
  layout), so the interval extends at least ``FLOOR`` of the larger mean either way. A single module
  varies more between recordings: by up to 7% on an H200, in all of its steps. The floor of a module
  is therefore ``MODULE_FLOOR``.

With a single step on either side there is no spread, no interval, and no claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

__all__ = ["FLOOR", "MODULE_FLOOR", "Interval", "interval", "typical_spread"]

LEVEL = 0.05
FLOOR = 0.02
MODULE_FLOOR = 0.08
_BORROWED = 4
# A module that takes one of two times at random has 8 equal steps in one of 128 recordings.
_ENOUGH = 8
_MOST_FREEDOM = 200


@dataclass(frozen=True, slots=True)
class Interval:
    """Confidence interval for a difference of means, in the unit of the samples.

    Attributes:
        low: Lower end.
        high: Upper end.
        clear: Whether the difference is beyond the noise.
    """

    low: float
    high: float
    clear: bool


def typical_spread(samples: Iterable[Sequence[int]]) -> float:
    """Return the median over samples of standard deviation divided by mean."""
    spreads = [
        math.sqrt(_variance(sample)) / fmean(sample)
        for sample in samples
        if len(sample) > 1 and any(sample)
    ]
    return median(spreads) if spreads else 0.0


def interval(
    before: Sequence[int],
    after: Sequence[int],
    *,
    typical: float | None = None,
    among: int = 1,
    reach: float = 0.0,
) -> Interval | None:
    """Return the interval for ``mean(after) - mean(before)``.

    Args:
        before: Times before, one for each step.
        after: Times after, one for each step.
        typical: Typical relative spread of all modules. ``None`` (default) uses the variance of the
            samples only.
        among: Number of differences that are tested together. Default: 1.
        reach: Minimum half-width, because a smaller change is not worth a claim. Default: 0.

    Returns:
        The interval, or ``None`` if a side has fewer than two steps.
    """
    if len(before) < 2 or len(after) < 2:
        return None
    steps = min(len(before), len(after))
    # Least relative spread to assume, and the degrees of freedom added for assuming it.
    assumptions = [(0.0, 0)] if typical is None else [(typical, _BORROWED)]
    if typical is not None and steps >= _ENOUGH:
        assumptions.append((0.0, 0))
    level = LEVEL / max(1, among) / len(assumptions)
    half = min(
        _t_quantile(level, min(_MOST_FREEDOM, steps - 1) + borrowed)
        * math.sqrt(_squared_error(before, least) + _squared_error(after, least))
        for least, borrowed in assumptions
    )
    change = fmean(after) - fmean(before)
    floor = FLOOR if typical is None else MODULE_FLOOR
    half = max(half, floor * max(fmean(before), fmean(after)), reach)
    return Interval(change - half, change + half, abs(change) > half)


def _squared_error(sample: Sequence[int], least: float) -> float:
    """Return the squared standard error of the mean, for at least a relative spread."""
    return max(_variance(sample), (least * fmean(sample)) ** 2) / len(sample)


def _variance(sample: Sequence[int]) -> float:
    mean = fmean(sample)
    return sum((value - mean) ** 2 for value in sample) / (len(sample) - 1)


def _t_quantile(level: float, freedom: int) -> float:
    """Return the ``x`` for which Student's t has ``P(|t| > x) == level``, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if 1 - _t_probability(angle, freedom) > level else (low, angle)
    return math.tan(high) * math.sqrt(freedom)


def _t_probability(angle: float, freedom: int) -> float:
    """Return ``P(|t| < tan(angle) * sqrt(freedom))`` for Student's t.

    The series for whole degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    if freedom == 1:
        return 2 * angle / math.pi
    term = cosine if odd else 1.0
    total = term
    for index in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (index - 1) / index
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
