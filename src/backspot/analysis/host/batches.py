"""The batches that worker processes load: which were ready, and for which ones the program waited.

The time in which a batch is fetched says little. The program may have waited for the workers, and
then they decide how long a step takes, whatever the model does. Or the batch was ready, and was
unpickled: that takes from 0.05 ms, with pinned memory, to 10 ms, where processes share few cores.

The live half marks which it was. A trace without these marks has to decide by evidence: a program
that computes for longer between two batches waits for less. Where neither is shown, it is unknown.
"""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.timeline import NOTHING, grouped
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints

_SMALL = 0.05
"""Of the time from a batch to the next: a fetch that is shorter was no wait. Workers that are just
so much slower than the model are rare, and batches that take so long to unpickle are not."""
_APART = 10
"""How many times longer a fetch is than all short ones if it waited: batches are alike."""
_MOST = 0.5
"""Of the time from a batch to the next: a fetch that is longer waited. To unpickle a batch takes no
longer than to load and pickle it, so that the workers would not be ahead."""
_FEWEST = 4
_SURE = 2.0
"""Standard errors of a slope."""


class Batches(msgspec.Struct, frozen=True):
    """Fetches of batches that workers loaded, by start; arrays with one entry a fetch.

    Attributes:
        event: index into ``Events``.
        start: nanoseconds.
        end: nanoseconds.
        waited: nanoseconds from ``start`` until the batch had arrived: 0 if it was ready,
            ``NOTHING`` if that is unknown.
        loader: tells loaders apart.
        workers: how many processes load, 0 if unknown.
        queue: how many batches they keep ready at most, 0 if unknown.
    """

    event: Ints
    start: Ints
    end: Ints
    waited: Ints
    loader: Ints
    workers: Ints
    queue: Ints

    @property
    def arrived(self) -> Ints:
        """When each batch had arrived at the latest; nanoseconds."""
        found: Ints = self.start + np.maximum(self.waited, 0)
        return found

    def moved(self, place: Ints) -> Batches:
        """Return those of a part of the trace, which has each event at this place or not at all."""
        event = place[self.event]
        kept = event >= 0
        others = (getattr(self, name)[kept] for name in self.__struct_fields__[1:])
        return Batches(event[kept], *others)


def find_batches(events: Events) -> Batches:
    """Find the fetches of batches that workers loaded."""
    index = events.chosen(events.names_where(names.is_fetch_from_workers), Category.ANNOTATION)
    index = index[np.argsort(events.start[index], kind="stable")]
    start, end = events.start[index], events.end[index]
    marked = _of_marks(events, index)
    batches = Batches(index, start, end, *marked)
    # One that PyTorch marks, and nobody else, is the end of an epoch: no batch came.
    for name, mine in grouped(events.name[index]):
        if (marked[1][mine] > 0).any():
            continue
        for thread, some in grouped(events.thread[index], mine):
            batches.loader[some] = -1 - name - len(events.names) * thread
            batches.waited[some] = _by_evidence(start[some], end[some])
    return batches


def _of_marks(events: Events, index: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return ``waited``, ``loader``, ``workers`` and ``queue`` as marks say, 0 without a mark."""
    waited, loader, workers, queue = (np.zeros(len(index), np.int64) for _ in range(4))
    marks = events.named(Category.ANNOTATION, names.BATCH)
    for thread, mine in grouped(events.thread[index]):
        here = marks[events.thread[marks] == thread]
        ends = np.sort(events.end[index[mine]])
        by_end = mine[np.argsort(events.end[index[mine]], kind="stable")]
        before = np.searchsorted(ends, events.start[here], side="right") - 1
        for mark, at in zip(here.tolist(), before.tolist(), strict=True):
            said = names.read_batch_mark(events.names[events.name[mark]])
            if said is not None and at >= 0:
                fetch = by_end[at]
                loader[fetch], workers[fetch], queue[fetch], waited[fetch] = said
    waited = np.minimum(waited, events.duration[index])
    return waited, loader, workers, queue


def _by_evidence(start: Ints, end: Ints) -> Ints:
    """Return how long fetches without marks waited, ``NOTHING`` where it is unknown."""
    length = end - start
    waited = np.zeros(len(length), np.int64)
    if len(length) < 2:
        waited[:] = NOTHING
        return waited
    period = float(end[-1] - end[0]) / (len(end) - 1)
    long = length > _SMALL * period
    if not long.any():
        return waited
    shortest = int(length.min())
    waits = length >= _APART * max(1, int(length[~long].max(initial=0)))
    if not long.all() and waits[long].all():
        waited[long] = length[long] - shortest
        return waited
    answer = _answers(length[1:], start[1:] - end[:-1])
    if answer is None and length[long].mean() < _MOST * period:
        waited[long] = NOTHING
    elif answer is not False:
        waited[long] = length[long] - (0 if long.all() else shortest)
    return waited


def _answers(fetch: Ints, computing: Ints) -> bool | None:
    """Return whether fetches are shorter by as much as the program computed for longer before.

    ``None`` if they vary too much, or the program computes too evenly, to tell.
    """
    if len(fetch) < _FEWEST or not (spread := float(np.square(computing - computing.mean()).sum())):
        return None
    off = computing - computing.mean()
    slope = float((off * (fetch - fetch.mean())).sum()) / spread
    rest = fetch - fetch.mean() - slope * off
    error = _SURE * float(np.square(rest).sum() / (len(fetch) - 2) / spread) ** 0.5
    waits, is_ready = abs(slope + 1) <= error + 0.2, abs(slope) <= error + 0.2
    return None if waits == is_ready else waits
