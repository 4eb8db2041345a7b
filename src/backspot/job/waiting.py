"""How long ranks wait for each other in collectives, and how long the transfers take.

A rank waits from its own entry into a collective until the last rank enters, or until it leaves,
if a rooted collective lets it leave before. The rest of its time in the collective is transfer.

Waits are times of collectives, and a collective can run while a rank computes. So the sum of the
waits can exceed the time that the job loses by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backspot.job.align import ROOTED, RankClock, aligned
from backspot.job.matching import Matched
from backspot.trace.events import Ints


@dataclass(frozen=True, slots=True)
class GroupWaits:
    """Waits and transfers of one process group, with one row a rank and one column a collective.

    In each entry, wait and transfer sum to the time that the rank is in the collective.

    Attributes:
        ranks: the ranks of the rows, ascending.
        wait: nanoseconds, never negative, 0 for the last rank to enter.
        transfer: nanoseconds, never negative.
        last: for each collective the rank that enters last; of several, the lowest.
    """

    group: Matched
    ranks: tuple[int, ...]
    wait: Ints
    transfer: Ints
    last: Ints

    def by_step(self, steps: int) -> tuple[Ints, Ints]:
        """Return the sums of waits and of transfers, with one row a rank and one column a step."""
        sums = []
        for times in (self.wait, self.transfer):
            summed = np.zeros((len(self.ranks), steps), np.int64)
            for row, of_rank in zip(summed, times, strict=True):
                np.add.at(row, self.group.step, of_rank)
            sums.append(summed)
        return sums[0], sums[1]


def find_waits(
    groups: Sequence[Matched], clocks: Mapping[int, RankClock]
) -> tuple[GroupWaits, ...]:
    """Divide the time in each collective into wait and transfer, on ranks that have a clock."""
    job_waits = []
    for group in groups:
        start, end, ranks = aligned(group, clocks)
        if len(ranks) < 2:
            continue
        entered = np.broadcast_to(start.max(axis=0), start.shape).copy()
        for column, call in enumerate(group.call):
            if call.kind in ROOTED:
                # Who has left before a rank entered did not wait for that rank.
                entries = np.sort(start[:, column])
                before = np.searchsorted(entries, end[:, column], side="right") - 1
                entered[:, column] = entries[np.maximum(before, 0)]
        wait = np.clip(entered - start, 0, end - start)
        last = np.array(ranks)[start.argmax(axis=0)]
        job_waits.append(GroupWaits(group, ranks, wait, end - start - wait, last))
    return tuple(job_waits)
