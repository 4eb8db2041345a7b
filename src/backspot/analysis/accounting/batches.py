"""The batches that worker processes load: which were ready, and for which ones the program waited.

The time in which a batch is fetched says little. The program may have waited for the workers, and
then they decide how long a step takes, whatever the model does. Or the batch was ready, and was
unpickled: that takes from 0.05 ms, with pinned memory, to 10 ms, where processes share few cores.

The live half marks which it was. A trace without these marks has to decide by evidence: a program
that computes for longer between two batches waits for less. Where neither is shown, it is unknown.

Beside a device a fetch costs less than it takes: until the device has done what was launched
before, nothing waits. How long that is, the recorded steps show, though their own fetches may have
been short, as workers are ahead after a pause.
"""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.attribution.launches import DeviceWork
from backspot.analysis.timeline import NOTHING, grouped
from backspot.results.training import Training
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
        arrived: Ints = self.start + np.maximum(self.waited, 0)
        return arrived

    def moved(self, place: Ints) -> Batches:
        """Return those of a part of the trace, which has each event at this place or not at all."""
        event = place[self.event]
        is_inside = event >= 0
        others = (getattr(self, name)[is_inside] for name in self.__struct_fields__[1:])
        return Batches(event[is_inside], *others)


def find_batches(events: Events) -> Batches:
    """Find the fetches of batches that workers loaded."""
    index = events.chosen(events.names_where(names.is_fetch_from_workers), Category.ANNOTATION)
    index = index[np.argsort(events.start[index], kind="stable")]
    start, end = events.start[index], events.end[index]
    marked = _of_marks(events, index)
    batches = Batches(index, start, end, *marked)
    # One that PyTorch marks, and nobody else, is the end of an epoch: no batch came.
    for name, members in grouped(events.name[index]):
        if (marked[1][members] > 0).any():
            continue
        for thread, fetches in grouped(events.thread[index], members):
            batches.loader[fetches] = -1 - name - len(events.names) * thread
            batches.waited[fetches] = _by_evidence(start[fetches], end[fetches])
    return batches


def left_waiting(events: Events, work: DeviceWork, steps: int, training: Training) -> int:
    """Return for how long devices have no work while a mean step of a training fetches batches.

    Args:
        work: the device work of the recorded steps.
        steps: how many steps were recorded.
        training: all steps, with how long they fetch.

    Returns:
        Nanoseconds.
    """
    fetches = _outermost_fetches(events)
    launched = np.flatnonzero((work.device >= 0) & (work.launch >= 0))
    if not len(launched):
        return training.data_ns
    launched = launched[np.argsort(work.launch[launched], kind="stable")]
    busy_until = np.maximum.accumulate(work.end[launched])
    start = events.start[fetches]
    before = np.searchsorted(work.launch[launched], start, side="right") - 1
    # What came before the recording is not known.
    start, before = start[before >= 0], before[before >= 0]
    if not len(start):
        return training.data_ns
    still = float(np.maximum(busy_until[before] - start, 0).mean())
    number = len(fetches) / max(1, steps)
    late, taken_ns = _late(training), float(_taken_if_ready(find_batches(events)))
    fetch = training.data_ns / number
    waited = (fetch - (1 - late) * taken_ns) / late if late else 0.0
    if waited < taken_ns:
        late, waited = 1.0, fetch
    fetch_ns = late * max(0.0, waited - still) + (1 - late) * max(0.0, taken_ns - still)
    return round(number * fetch_ns)


def _outermost_fetches(events: Events) -> Ints:
    """Return the marks of fetches that lie in no other: a trainer marks what PyTorch marks."""
    marks = events.chosen(events.names_where(names.is_fetch_mark), Category.ANNOTATION)
    marks = marks[np.argsort(events.start[marks], kind="stable")]
    outermost = [marks[:0]]
    for _, members in grouped(events.thread, marks):
        ended = np.maximum.accumulate(np.append(-1, events.end[members][:-1]))
        outermost.append(members[events.start[members] >= ended])
    return np.concatenate(outermost)


def _late(training: Training) -> float:
    """Return the share of the batches of workers that were late; 1 if there are no workers."""
    batches = sum(use.batches for use in training.loaders)
    return sum(use.late for use in training.loaders) / batches if batches else 1.0


def _taken_if_ready(batches: Batches) -> float:
    """Return how long a fetch takes once its batch has arrived, in nanoseconds; 0 if unknown."""
    is_known = batches.waited >= 0
    return float((batches.end - batches.arrived)[is_known].mean()) if is_known.any() else 0.0


def _of_marks(events: Events, index: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return ``waited``, ``loader``, ``workers`` and ``queue`` as marks say, 0 without a mark."""
    waited, loader, workers, queue = (np.zeros(len(index), np.int64) for _ in range(4))
    marks = events.prefixed(Category.ANNOTATION, names.BATCH)
    for thread, members in grouped(events.thread[index]):
        own_marks = marks[events.thread[marks] == thread]
        ends = np.sort(events.end[index[members]])
        by_end = members[np.argsort(events.end[index[members]], kind="stable")]
        before = np.searchsorted(ends, events.start[own_marks], side="right") - 1
        for mark, position in zip(own_marks.tolist(), before.tolist(), strict=True):
            values = names.read_batch_mark(events.names[events.name[mark]])
            if values is not None and position >= 0:
                fetch = by_end[position]
                loader[fetch], workers[fetch], queue[fetch], waited[fetch] = values
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
