"""Decide whether two sides differ by more than chance explains.

**One recording a side** tells what differs between these two recordings. The noise of a mean over
steps is its standard error, and falls with the number of steps:

- Steps that follow each other are alike, so the standard error is that of overlapping batch means
  (Meketon and Schmeiser 1984), with batches of the square root of the number of steps, and at least
  that of independent steps. The degrees of freedom of a difference are those of Satterthwaite
  (1946), and its interval holds in 95 of 100. The noise of a real step is that of the steps that
  were timed without the profiler; recorded parts in real time have both noises.
- Steps that something held up do not count (``analysis/typical.py``).

That says nothing of the code: recordings of the same code differ by the machine's load and clock,
and by what is different in all steps of one process. No number of steps shows it.

**Three recordings a side** show how much recordings of the same code differ. The test is Student's
for two samples, of the logarithms of times, whose standard deviation is taken to be that of both
sides: a busy machine makes all times longer by the same factor, and of so few recordings, one
deviation is known better than two, as in Welch's test. It is at least what the steps of each
recording leave open, so that three recordings that are alike by luck claim nothing. A rank test is
of no use: of three and three, its smallest chance is one in ten. An interval holds in 995 of 1,000.
Several times that are looked at together (phases; modules) have intervals that hold together
(Bonferroni).

**Modules** are compared with each other as well, since what all modules of a recording do alike is
the machine, or everything. Each recording has a *factor*: the median, over the modules, of what a
module takes in it as a multiple of its mean (Anders and Huber 2010). The *own change* of a module
is that of its times without the factors. A change of a module is clear if both the change and the
own change exceed the noise.

- With one recording a side, the noise contains the *scatter* of the modules around what they have
  in common: 4 times 1.4826 median absolute deviations (Rousseeuw and Croux 1993) of the logarithms,
  after what the steps explain is taken off.
- The variance of one module, over the steps or over the recordings, is moderated by those of the
  other modules (Smyth 2004): three times of one module say little of how it varies, but those
  of fifty modules do.

Only modules that did the same work count for this: of the same class, and called as often on both
sides. With fewer than eight of them, or three beside new modules or other numbers of calls, there
are no factors. With a single step on a side there is no noise and no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median, variance
from typing import NamedTuple, TypeAlias

from backspot.comparison.distributions import Prior, prior_of, quantile
from backspot.results.comparison import About

ENOUGH = 3
"""Recordings on each side from which the code can be told from the machine."""
_CHANCE: dict[About, float] = {"recordings": 0.05, "code": 0.005}
"""Probability that an interval misses the change by chance."""
_BATCHED = 8
"""Steps from which those that follow each other can be told to be alike."""
_NORMAL = 1.4826
"""Standard deviation of normal noise in median absolute deviations."""
_DEVIATIONS = 4.0
_OTHERS = 2.0
"""So many times as much as its own values, those of the others count at most for the variance of a
module: they vary together, so that they are fewer than they seem."""
_FEWEST = 8
"""Modules from which the factors of recordings are estimated."""
_FEWEST_BESIDE = 3
"""The same beside modules with other work."""
_SHARE = 0.003
"""Share of the whole from which a module counts for the factors."""


class Error(NamedTuple):
    """The uncertainty of a mean: its variance, and how many degrees of freedom that has."""

    variance: float
    freedom: float

    def scaled(self, factor: float) -> Error:
        """Return the uncertainty of so many times the mean."""
        return Error(self.variance * factor**2, self.freedom)


def sum_of(errors: Sequence[Error]) -> Error:
    """Return the uncertainty of a sum, or of a difference (Satterthwaite 1946)."""
    total = sum(error.variance for error in errors)
    if not total:
        return Error(0.0, sum(error.freedom for error in errors))
    # As shares, because squares of small variances are too small for a number.
    inverse_freedom = sum((error.variance / total) ** 2 / error.freedom for error in errors)
    return Error(total, 1 / inverse_freedom)


def error_of_mean(by_step: Sequence[float]) -> Error | None:
    """Return the uncertainty of the mean over steps; ``None`` with fewer than two."""
    steps = len(by_step)
    if steps < 2:
        return None
    mean = fmean(by_step)
    alone = Error(fmean((time - mean) ** 2 for time in by_step) / (steps - 1), steps - 1)
    length = math.isqrt(steps)
    if steps < _BATCHED:
        return alone
    sums = [0.0]
    for time in by_step:
        sums.append(sums[-1] + time - mean)
    squares = sum(
        ((sums[end] - sums[end - length]) / length) ** 2 for end in range(length, steps + 1)
    )
    together = squares * length / ((steps - length + 1) * (steps - length))
    return Error(max(alone.variance, together), 1.5 * (steps / length - 1))


@dataclass(frozen=True)
class Times:
    """What one thing takes in one recording.

    Attributes:
        typical: In a typical step.
        by_step: In each recorded step, in the same unit or as a multiple of it.
        left_out: Steps that do not count.
        real_steps: Steps by which recorded times were put into real time, if they were.
    """

    typical: float
    by_step: Sequence[int]
    left_out: frozenset[int] = frozenset()
    real_steps: Sequence[int] = ()

    @cached_property
    def of_steps(self) -> Error | None:
        """The uncertainty that the steps of the recording leave."""
        return self._as_typical(
            [time for step, time in enumerate(self.by_step) if step not in self.left_out]
        )

    @cached_property
    def of_recording(self) -> Error | None:
        """The same with that of the real steps."""
        scale = self._as_typical(self.real_steps)
        if self.of_steps is None or scale is None:
            return self.of_steps
        return sum_of([self.of_steps, scale])

    def _as_typical(self, by_step: Sequence[int]) -> Error | None:
        error = error_of_mean(by_step)
        if error is None:
            return None
        mean = fmean(by_step)
        return error.scaled(self.typical / mean if mean else 1.0)


Runs: TypeAlias = Sequence[Times]
"""What one thing takes in each recording of a side."""


def mean_of(runs: Runs) -> float:
    """Return the mean over the recordings of a side."""
    return sum(times.typical for times in runs) / len(runs)


@dataclass(frozen=True, slots=True)
class Common:
    """What all modules do alike.

    Attributes:
        before: The logarithm of the factor of each recording before.
        after: The same after.
        scatter: How much modules deviate, as a standard deviation of logarithms. 0 with several
            recordings a side, where it is not needed.
        prior: The variance of one module: of its logarithm over the recordings of a side, or with
            one recording a side that which its steps leave, as a share of the larger time squared.
            ``None`` if too few modules vary.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]
    scatter: float = 0.0
    prior: Prior | None = None

    @property
    def shift(self) -> float:
        """The common change, as a logarithm."""
        return fmean(self.after) - fmean(self.before)

    @property
    def percent(self) -> float:
        """The common change in percent of the time before."""
        return math.expm1(self.shift) * 100

    def own(self, before: Runs, after: Runs) -> tuple[list[float], list[float]]:
        """Return the times of both sides without the factors."""
        return _without(before, self.before), _without(after, self.after)


def _without(runs: Runs, logarithms: Sequence[float]) -> list[float]:
    return [
        times.typical * math.exp(-logarithm)
        for times, logarithm in zip(runs, logarithms, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a change has to exceed, besides the noise.

    Attributes:
        together: How many times are looked at together.
        is_module: Whether all modules together say something of this one.
        share: Share of the larger of the two times, with fewer than three recordings a side.
        least: An amount of time.
    """

    together: int = 1
    is_module: bool = False
    share: float = 0.0
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """By how much a time changes, give or take the noise, in the unit of the times.

    It is ``clear`` beyond the noise and what all modules do, ``doubtful`` beyond the noise alone.
    """

    low: float
    high: float
    clear: bool
    doubtful: bool


def is_about_code(before: Sequence[object], after: Sequence[object]) -> bool:
    """Return whether there are enough recordings on both sides."""
    return min(len(before), len(after)) >= ENOUGH


def common_to(
    pairs: Iterable[tuple[Runs, Runs]],
    totals: tuple[float, float],
    *,
    work_differs: bool = False,
) -> Common | None:
    """Return what modules have in common, ``None`` if there are too few to know.

    Args:
        pairs: Times before and after of each module that did the same work.
        totals: Times of all modules together, before and after.
        work_differs: Whether other modules did other work. Then three modules are enough.
    """
    least = _SHARE * max(totals)
    counted = [
        (old, new)
        for old, new in pairs
        if all(times.typical > 0 for times in (*old, *new))
        and max(mean_of(old), mean_of(new)) >= least
    ]
    if len(counted) < (_FEWEST_BESIDE if work_differs else _FEWEST):
        return None
    sides = []
    middles = [(_log_mean(old) + _log_mean(new)) / 2 for old, new in counted]
    for side in (0, 1):
        recordings = zip(*(pair[side] for pair in counted), strict=True)
        sides.append(
            tuple(
                median(
                    math.log(times.typical) - middle
                    for times, middle in zip(recording, middles, strict=True)
                )
                for recording in recordings
            )
        )
    common = Common(sides[0], sides[1])
    if is_about_code(*sides):
        errors = [_over_recordings(common, old, new) for old, new in counted]
        return replace(common, prior=_prior(errors))
    of_steps = [_over_steps(old, new) for old, new in counted]
    prior = _prior([error for error in of_steps if error is not None])
    return replace(common, scatter=_scatter(common, counted), prior=prior)


def _prior(errors: Sequence[Error]) -> Prior | None:
    """Return what the variances of all modules say of that of one of them."""
    if not errors:
        return None
    freedom = fmean(error.freedom for error in errors)
    prior = prior_of([error.variance for error in errors], freedom)
    return prior and replace(prior, freedom=min(prior.freedom, _OTHERS * freedom))


def _log_mean(runs: Runs) -> float:
    return fmean(math.log(times.typical) for times in runs)


def _scatter(common: Common, pairs: Sequence[tuple[Runs, Runs]]) -> float:
    """Return how much modules deviate from what they have in common, beyond their steps."""
    beyond = []
    for pair in pairs:
        old, new = map(fmean, common.own(*pair))
        errors = [
            error.scaled(1 / times.typical / len(runs))
            for runs in pair
            for times in runs
            if (error := times.of_steps) is not None
        ]
        of_steps = sum(error.variance for error in errors)
        beyond.append(max(0.0, math.log(new / old) ** 2 - of_steps))
    return _NORMAL * math.sqrt(median(beyond))


def _over_steps(before: Runs, after: Runs) -> Error | None:
    """Return the variance of a difference, as a share of the larger time squared."""
    largest = max(mean_of(before), mean_of(after))
    errors = []
    for runs in (before, after):
        for times in runs:
            if times.of_recording is None:
                return None
            errors.append(times.of_recording.scaled(1 / len(runs)))
    return sum_of(errors).scaled(1 / largest if largest else 0.0)


def _over_recordings(common: Common | None, before: Runs, after: Runs) -> Error:
    """Return the variance over the recordings of one side, as a share of the mean squared."""
    sides = _values(common, before, after)
    squares = freedom = 0.0
    for values in sides:
        mean = fmean(values)
        if mean > 0:
            squares += variance(values) * (len(values) - 1) / mean**2
            freedom += len(values) - 1
    steps = [
        error.variance / times.typical**2
        for times in (*before, *after)
        if times.typical > 0 and (error := times.of_steps) is not None
    ]
    if not freedom:
        return Error(0.0, 1.0)
    return Error(max(squares / freedom, fmean(steps) if steps else 0.0), freedom)


def _values(common: Common | None, before: Runs, after: Runs) -> tuple[list[float], list[float]]:
    if common is None:
        return [times.typical for times in before], [times.typical for times in after]
    return common.own(before, after)


def interval(before: Runs, after: Runs, common: Common | None, limits: Limits) -> Interval | None:
    """Return by how much a time changes; ``None`` if a recording has fewer than two steps."""
    of_steps = _over_steps(before, after)
    if of_steps is None:
        return None
    common = common if limits.is_module else None
    old, new = _values(common, before, after)
    change, own = mean_of(after) - mean_of(before), fmean(new) - fmean(old)
    largest = max(mean_of(before), mean_of(after), fmean(old), fmean(new))
    about: About = "code" if is_about_code(before, after) else "recordings"
    error = _over_recordings(common, before, after) if about == "code" else of_steps
    if common is not None and common.prior is not None:
        error = Error(*common.prior.moderated(error.variance, error.freedom))
    noise = quantile(_CHANCE[about] / limits.together, error.freedom) * math.sqrt(error.variance)
    least = limits.least
    if about == "code":
        reach = _part(noise * math.sqrt(1 / len(before) + 1 / len(after))) * largest
    else:
        scatter = _part(_DEVIATIONS * common.scatter) if common else 0.0
        reach = math.hypot(noise * max(mean_of(before), mean_of(after)), scatter * largest)
        least = max(least, limits.share * largest)
    reach = max(reach, least)
    beyond = abs(change) > reach
    clear = beyond and abs(own) > reach and (own > 0) == (change > 0)
    return Interval(change - reach, change + reach, clear, beyond and not clear)


def _part(logarithm: float) -> float:
    """Return by which part of the larger one two times differ, of the logarithm of their ratio."""
    return -math.expm1(-logarithm)
