"""What chance does to variances that few values show: Student's t, and variances of one kind.

**Student's t** says how far a difference is from 0 by chance alone, if its variance is estimated.
Its distribution function is the regularised incomplete beta function, whose continued fraction
(DLMF 8.17.22) is evaluated by Lentz's method (1976), and the quantile is found by bisection. Both
are exact to ten digits, also for degrees of freedom that are no whole number.

**Moderated variances.** Three values say little of their variance, and one in fifty things seems
steady by luck. But things of one kind have variances of one kind: they are taken to be drawn from a
scaled inverse chi-square distribution, whose two parameters follow from all of them (Smyth 2004,
"Linear models and empirical Bayes methods"). The moderated variance of one thing is between its own
and the common one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, variance

_TINY = 1e-300
_TERMS = 500
_HALVINGS = 80
_FEWEST = 8
"""Variances from which their distribution is estimated."""
_FAR = 12.0
"""Argument from which the asymptotic series are exact to nine digits."""


@cache
def quantile(chance: float, freedom: float) -> float:
    """Return how many standard errors a difference exceeds by chance alone, in either direction.

    Args:
        chance: Probability of a larger difference on either side, above 0 and at most 1.
        freedom: Degrees of freedom, above 0; ``inf`` is the normal distribution.
    """
    low, high = 0.0, 1.0
    while _beyond(high, freedom) > chance:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _beyond(middle, freedom) > chance:
            low = middle
        else:
            high = middle
    return high


def _beyond(deviations: float, freedom: float) -> float:
    """Return the probability of more than so many standard errors, in either direction."""
    if math.isinf(freedom):
        return math.erfc(deviations / math.sqrt(2))
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + deviations**2))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(scale + a * math.log(x) + b * math.log1p(-x)) / a
    upper, lower = 1.0, 1.0 / _apart(1.0 - (a + b) * x / (a + 1))
    value = lower
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            lower = 1.0 / _apart(1.0 + term * lower)
            upper = _apart(1.0 + term / upper)
            value *= lower * upper
        if abs(lower * upper - 1.0) < 1e-14:
            break
    return front * value


def _apart(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a variance before anything is seen of it: as from ``freedom`` values."""

    variance: float
    freedom: float

    def moderated(self, own: float, freedom: float) -> tuple[float, float]:
        """Return the variance, and its degrees of freedom, after something was seen of it."""
        if math.isinf(self.freedom):
            return self.variance, self.freedom
        both = self.freedom + freedom
        return (self.freedom * self.variance + freedom * own) / both, both


def prior_of(variances: Sequence[float], freedom: float) -> Prior | None:
    """Return what many variances say of another one; ``None`` of fewer than eight.

    Args:
        variances: One of each thing; those of 0 do not count.
        freedom: The degrees of freedom of each.
    """
    logarithms = [math.log(one) for one in variances if one > 0]
    if len(logarithms) < _FEWEST:
        return None
    half = freedom / 2
    middle = fmean(logarithms) - _digamma(half) + math.log(half)
    beyond_chance = variance(logarithms) - _trigamma(half)
    if beyond_chance <= 0:  # all have the same variance
        return Prior(math.exp(middle), math.inf)
    half_freedom = _inverse_of_trigamma(beyond_chance)
    return Prior(
        math.exp(middle + _digamma(half_freedom) - math.log(half_freedom)), 2 * half_freedom
    )


def _digamma(x: float) -> float:
    """Return the derivative of the logarithm of the gamma function, for x > 0."""
    below = 0.0
    while x < _FAR:
        below += 1 / x
        x += 1
    square = 1 / x**2
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    return math.log(x) - 1 / (2 * x) - series - below


def _trigamma(x: float) -> float:
    """Return its second derivative."""
    below = 0.0
    while x < _FAR:
        below += 1 / x**2
        x += 1
    square = 1 / x**2
    series = square * (1 / 6 - square * (1 / 30 - square * (1 / 42 - square / 30)))
    return (1 + 1 / (2 * x) + series) / x + below


def _inverse_of_trigamma(value: float) -> float:
    """Return where the second derivative has a value above 0; it falls all the way."""
    low, high = 0.0, 1.0
    while _trigamma(high) > value:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _trigamma(middle) > value:
            low = middle
        else:
            high = middle
    return high
