"""What a step typically costs: the median over the recorded steps.

One step that is held up changes a mean by as much as it lasts, and a median hardly at all. The
median is taken of each thing by itself: of a module's time, of a phase, of the whole backward.
Sums of medians differ from the median of the sums by a little, and the report states that
difference as ``(unsteady)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backspot.trace.events import Ints

__all__ = ["typical", "typical_count", "typical_value"]


def typical(by_step: Ints) -> Ints:
    """Return the median over the last axis, in whole nanoseconds, rounded down.

    Where no entry of one array exceeds the entry of another, its median does not either: a part
    never costs more than its whole.

    Args:
        by_step: nanoseconds, with one entry a step along the last axis, at least one.
    """
    ordered, count = np.sort(by_step, axis=-1), by_step.shape[-1]
    # Half of the difference, because the sum of two large times can exceed 63 bits.
    low, high = ordered[..., (count - 1) // 2], ordered[..., count // 2]
    middle: Ints = low + (high - low) // 2
    return middle


def typical_value(by_step: Ints) -> int:
    """Return the median of one series; 0 for an empty one."""
    return int(typical(by_step)) if len(by_step) else 0


def typical_count(by_step: Ints) -> Ints:
    """Return the median of counts over the last axis; of two middle counts, the larger."""
    ordered: Any = np.sort(by_step, axis=-1)
    middle: Ints = ordered[..., by_step.shape[-1] // 2]
    return middle
