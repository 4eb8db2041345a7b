"""What a step typically costs: the median over the recorded steps.

One step that is held up changes a mean by as much as it lasts, and a median hardly at all. The
median is taken of each thing by itself: of a module's time, of a phase, of the whole backward.
Sums of medians differ from the median of the sums by a little, and the report states that
difference as ``(unsteady)``.

Some things happen in some of the steps only: an optimizer's step after four passes, a layer that is
dropped at random, the two backward passes of a GAN. Such a thing costs the median of the steps in
which it happens, shared over all steps. It must happen in a quarter of them, and more than once;
what happens less often is no part of a typical step.
"""

from __future__ import annotations

import numpy as np

from backspot.trace.events import Ints

__all__ = ["typical", "typical_count", "typical_value"]

_FEW = 4
"""In fewer steps than this, what happens once may be what each round of steps does once."""


def typical(by_step: Ints) -> Ints:
    """Return the median over the last axis, in whole nanoseconds, rounded down.

    Args:
        by_step: nanoseconds, with one entry a step along the last axis, at least one. Where some
            entries are 0, the median is that of the others times their share.
    """
    ordered, steps = np.sort(by_step, axis=-1), by_step.shape[-1]
    present = np.count_nonzero(by_step, axis=-1)
    often = (4 * present >= steps) & ((present > 1) | (steps < _FEW))
    first = np.maximum(steps - present, 0)  # the zeros come first

    def at(index: Ints) -> Ints:
        index = np.clip(index, 0, steps - 1)
        found: Ints = np.take_along_axis(ordered, index[..., None], axis=-1)[..., 0]
        return found

    low, high = at(first + (present - 1) // 2), at(first + present // 2)
    # Half of the difference, because the sum of two large times can exceed 63 bits.
    middle = low + (high - low) // 2
    shared = middle // steps * present + middle % steps * present // steps
    result: Ints = np.where(often, shared, 0)
    return result


def typical_value(by_step: Ints) -> int:
    """Return the median of one series; 0 for an empty one."""
    return int(typical(by_step)) if len(by_step) else 0


def typical_count(by_step: Ints) -> Ints:
    """Return the mean of counts over the last axis, rounded up, because counts have no hiccups."""
    steps = by_step.shape[-1]
    mean: Ints = -(-by_step.sum(axis=-1) // steps)
    return mean
