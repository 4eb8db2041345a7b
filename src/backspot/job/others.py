"""What the other ranks typically take, for each rank of many."""

from __future__ import annotations

import numpy as np

from backspot.trace.events import Ints

__all__ = ["Others"]


class Others:
    """The median over all ranks but one, without sorting again for each.

    Args:
        values: one entry a rank along the first axis, of two ranks or more.
    """

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
            found: Ints = np.where(values <= middle, above, middle)
            return found
        low: Ints = np.where(values <= below, middle, below)
        high: Ints = np.where(values >= above, middle, above)
        return low + (high - low) // 2
