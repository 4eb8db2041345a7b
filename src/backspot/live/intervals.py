"""Which module made an autograd node, by the node's sequence number.

A thread numbers its autograd nodes one by one. The calls of instrumented modules cut these numbers
into intervals, and the owner of an interval is the module of the innermost call. So a node's own
number tells which module made the node, wherever the node's tensor went afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

from backspot.live.owner import Owner

__all__ = ["Intervals"]

_MOST = 1 << 16  # some hundred steps of a large model; the oldest half goes first
_first = itemgetter(0)


class Intervals(list[tuple[int, Owner | None]]):
    """The intervals of one thread: the first number of each, ascending, and its owner.

    A list, as every recorded call appends to it twice, without a call of Python. Whoever appends a
    number below the last one calls ``restart`` first: a user has set autograd's counter back.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__([(-1, None)])  # no owner before the first call of a session

    def restart(self) -> None:
        """Forget all intervals: the numbers begin again, or a new session began."""
        self[:] = [(-1, None)]

    def trim(self) -> None:
        """Forget the oldest half if there are too many."""
        if len(self) > _MOST:
            del self[1 : _MOST // 2]

    def cut(self, number: int, owner: Owner | None) -> None:
        """Begin an interval after an interrupt: the nodes since the last call have no owner."""
        last, _ = self[-1]
        self[-1] = last, None
        self.append((max(number, last), owner))

    def owner_of(self, number: int, following: int) -> Owner | None:
        """Return the module that made a node; ``None`` if none did or if it is not known.

        Args:
            number: the node's sequence number.
            following: the sequence number of the thread's next node.
        """
        last, owner = self[-1]
        if number >= last:
            # A number that is still to come on this thread is another thread's node.
            return owner if number < following else None
        return self[bisect_right(self, number, key=_first) - 1][1]
