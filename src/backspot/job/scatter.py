"""Whether a time is longer on one rank than on the others, beyond the noise.

Ranks differ from each other for no reason, as recordings do: one process has a busier host, and
kernels that run beside a waiting collective take longer. So a difference is claimed by the rules of
``noise.py``: it exceeds what all modules of that rank have in common, the scatter of the
modules, the uncertainty of the steps and their range.

Of few ranks, the scatter over the ranks is not known, and a difference counts from 2% of the step.
Of eight or more, it is known: 1.4826 times the median absolute deviation, which a few slow ranks do
not change (Rousseeuw and Croux 1993). The largest of n normal deviations is about sqrt(2 ln n)
(Donoho and Johnstone 1994). A difference counts beyond that, with one chance in twenty for all
comparisons together, and from 0.5% of the step.
"""

from __future__ import annotations

import math

import numpy as np

from backspot.job.noise import Limits, Shift, Times, common_shift, is_apart
from backspot.trace.events import Ints


class Others:
    """The median over all ranks but one, along the first axis, without sorting again for each."""

    def __init__(self, values: Ints) -> None:
        count = len(values)
        self._is_even = count % 2 == 0
        middle = (count - 1) // 2
        near = [max(middle - 1, 0), middle, middle + 1]
        self._below, self._middle, self._above = np.partition(values, near, axis=0)[near]

    def of(self, values: Ints) -> Ints:
        """Return the median over the ranks without one that has these values."""
        below, middle, above = self._below, self._middle, self._above
        if self._is_even:  # of an odd number of others, the one in the middle
            medians: Ints = np.where(values <= middle, above, middle)
            return medians
        low: Ints = np.where(values <= below, middle, below)
        high: Ints = np.where(values >= above, middle, above)
        return low + (high - low) // 2


MANY = 8
"""Ranks from which the scatter over them is known."""
_NORMAL = 1.4826
"""Standard deviation of normal noise in median absolute deviations."""
_CHANCE = 0.05
"""Chance that noise alone exceeds the reach in any of the comparisons."""
MATTERS, MATTERS_OF_MANY = 0.02, 0.005
"""Share of the step from which a difference is worth a claim, of few ranks and of many."""


def reach(values: np.ndarray, comparisons: int) -> np.ndarray | None:
    """Return how far noise alone takes a rank from the others; ``None`` of fewer than eight ranks.

    The first axis of ``values`` is that of the ranks; ``comparisons`` are made in all.
    """
    if len(values) < MANY:
        return None
    scatter = _NORMAL * np.median(np.abs(values - np.median(values, axis=0)), axis=0)
    reach_ns: np.ndarray = scatter * math.sqrt(2 * math.log(max(comparisons, 1) / _CHANCE))
    return reach_ns


def middle(by_step: Ints) -> Ints:
    """Return the median over the last axis, rounded down, to compare ranks by.

    A rank that is held up once does not change a median. Of what happens in some of the steps only,
    it is the median of these steps times their share.
    """
    ordered = np.sort(by_step, axis=-1)
    present = np.count_nonzero(by_step, axis=-1)
    low, high = (
        np.take_along_axis(ordered, place[..., None], axis=-1)[..., 0]
        for place in _middle_places(present, by_step.shape[-1])
    )
    return _halfway(low, high, present, by_step.shape[-1])


def in_middle_steps(parts: Ints, by_step: Ints) -> Ints:
    """Return the parts of a time in the one or two steps whose times make its ``middle``.

    The last axis of ``parts``, and the only one of ``by_step``, is that of the steps. Parts that
    are no more than the time in each step are together no more than its middle.
    """
    present, order = np.count_nonzero(by_step), np.argsort(by_step, kind="stable")
    low, high = (order[place] for place in _middle_places(np.asarray(present), len(by_step)))
    return _halfway(parts[..., low], parts[..., high], np.asarray(present), len(by_step))


def _middle_places(present: Ints, steps: int) -> tuple[Ints, Ints]:
    """Return where the middle of the times above 0 is among all of them, ascending."""
    first = steps - present  # the zeros come first
    low, high = first + (present - 1) // 2, first + present // 2
    return np.clip(low, 0, steps - 1), np.clip(high, 0, steps - 1)


def _halfway(low: Ints, high: Ints, present: Ints, steps: int) -> Ints:
    """Return the time halfway between two, times the share of steps in which there is any."""
    # Half of the difference, because the sum of two large times can exceed 63 bits.
    median = low + (high - low) // 2
    shared: Ints = median // steps * present + median % steps * present // steps
    return shared


def least(values: np.ndarray, comparisons: int, step_ns: int) -> np.ndarray:
    """Return from which difference a claim is made, in nanoseconds; arguments as of ``reach``."""
    noise = reach(values, comparisons)
    if noise is None:
        return np.full(values.shape[1:], MATTERS * step_ns)
    least_ns: np.ndarray = np.maximum(noise, MATTERS_OF_MANY * step_ns)
    return least_ns


def shift_of(earlier: Ints, now: Ints) -> Shift | None:
    """Return what all modules have in common, of times by module and step."""
    before, after = middle(earlier), middle(now)
    pairs = zip(before.tolist(), after.tolist(), strict=True)
    return common_shift(pairs, (float(before.sum()), float(after.sum())))


def is_clear(earlier: Ints, now: Ints, shift: Shift | None, limits: Limits) -> bool:
    """Return whether times by step are longer than those of the other ranks, beyond the noise."""
    before, after = (Times(int(middle(of_ranks)), of_ranks.tolist()) for of_ranks in (earlier, now))
    return after.typical > before.typical and is_apart(before, after, shift, limits)
