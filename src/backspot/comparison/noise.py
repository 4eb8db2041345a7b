"""Whether a difference between two recordings is more than their steps vary among themselves.

The criterion is a Welch-type interval for the difference of the two means over steps, made for the
few steps that people record. It shall claim nothing that is not there, and see what is clear:

- The degrees of freedom are one less than the fewer steps, the least that Welch and Satterthwaite
  can give: with two steps a side the interval is 12.7 standard errors wide either way.
- A module's own variance over two or three steps is often small by luck. It counts as no less than
  the module's mean times the typical (median) relative spread of all modules, and the spread of
  all adds ``_BORROWED`` degrees of freedom.
- Where both sides have ``_ENOUGH`` steps, luck is no longer what makes a spread small, and what is
  typical of all may be the spread of tiny modules. There the module's own variance is asked as
  well, with nothing borrowed: the narrower of the two intervals holds, each at half the level.
- Among hundreds of modules a few would pass by chance: the level is divided by their number
  (Bonferroni). The whole backward stands alone, with its own variance and the plain level.
- Steps of one recording do not show how recordings differ (clocks, temperature, where memory
  lies): the interval is never narrower than ``FLOOR`` of the larger mean either way. One module
  alone varies more from recording to recording, by up to 7% as measured on an H200, the same way in
  all of its steps: for a module it is ``MODULE_FLOOR``.

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
# All steps of a module that takes one of two times, in turn, are alike by luck once in 128.
_ENOUGH = 8
_MOST_FREEDOM = 200


@dataclass(frozen=True, slots=True)
class Interval:
    """What is known of a difference of means.

    Attributes:
        low: the least difference that the steps allow.
        high: the largest.
        clear: whether the difference is beyond the noise.
    """

    low: float
    high: float
    clear: bool


def typical_spread(samples: Iterable[Sequence[int]]) -> float:
    """The median over samples of their standard deviation as a part of their mean."""
    found = [
        math.sqrt(_variance(sample)) / fmean(sample)
        for sample in samples
        if len(sample) > 1 and any(sample)
    ]
    return median(found) if found else 0.0


def interval(
    before: Sequence[int],
    after: Sequence[int],
    *,
    typical: float | None = None,
    among: int = 1,
    reach: float = 0.0,
) -> Interval | None:
    """The interval for ``mean(after) - mean(before)``, or ``None`` where there is no spread.

    Args:
        before: one time a step.
        after: one time a step.
        typical: the typical relative spread of all modules; ``None`` trusts the samples alone.
        among: how many such differences are asked about.
        reach: what the interval reaches in any case, either way: less is not worth a claim.
    """
    if len(before) < 2 or len(after) < 2:
        return None
    steps = min(len(before), len(after))
    # What a module's spread counts as at the least, and the degrees of freedom lent for it.
    ways = [(0.0, 0)] if typical is None else [(typical, _BORROWED)]
    if typical is not None and steps >= _ENOUGH:
        ways.append((0.0, 0))
    level = LEVEL / max(1, among) / len(ways)
    wide = min(
        _quantile(level, min(_MOST_FREEDOM, steps - 1) + lent)
        * math.sqrt(_squared_error(before, least) + _squared_error(after, least))
        for least, lent in ways
    )
    change = fmean(after) - fmean(before)
    floor = FLOOR if typical is None else MODULE_FLOOR
    wide = max(wide, floor * max(fmean(before), fmean(after)), reach)
    return Interval(change - wide, change + wide, abs(change) > wide)


def _squared_error(sample: Sequence[int], least: float) -> float:
    """Of the sample's mean; its relative spread counts as no less than ``least``."""
    return max(_variance(sample), (least * fmean(sample)) ** 2) / len(sample)


def _variance(sample: Sequence[int]) -> float:
    mean = fmean(sample)
    return sum((value - mean) ** 2 for value in sample) / (len(sample) - 1)


def _quantile(level: float, freedom: int) -> float:
    """What Student's t exceeds, on either side, with a chance of ``level``."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if 1 - _within(angle, freedom) > level else (low, angle)
    return math.tan(high) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The chance of ``|t| < tan(angle) * sqrt(freedom)``, by the series for whole freedoms."""
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
