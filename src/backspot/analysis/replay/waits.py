"""What the host waited for: the ends of device work, and batches that worker processes load."""

from __future__ import annotations

import re

import msgspec
import numpy as np

from backspot.analysis.accounting.batches import Batches
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.replay.devices import DeviceGraph
from backspot.analysis.timeline import NOTHING, distinct, grouped, is_in, take
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints

_AT_ONCE = re.compile(r"Memcpy \w+ \(\w+ -> Pinned|Memcpy \w+ \((Pinned|Device) -> Device")
"""A call for such a copy waits for nothing, as CUDA's "API synchronization behavior" says. On a
slow host, some copies have ended by chance when it returns."""
_OWN = 5_000  # nanoseconds that a call that waits takes itself
_RETURN = 3_000  # nanoseconds from the end of work until a call that waits for it returns
_ROUNDING = 2_000  # nanoseconds between the clocks of host and device
_REST = 0.02  # of a copy: what the device may still do of it when the call returns
_BLOCKED = 100_000  # nanoseconds: a launch takes a few thousand
_FULL = 256  # pieces of work that wait in a queue when a launch that takes long is held back
_HELD, _BRIM = 12_000, 990
"""The same where a queue is full: then each launch waits until one piece of work has ended."""


class HostWait(msgspec.Struct, frozen=True):
    """A call that returns after device work has ended, or a fetch that waits for a batch.

    Attributes:
        event: index into ``Events``.
        start: nanoseconds.
        end: nanoseconds; of a fetch, when the batch has arrived.
        own: nanoseconds that the call takes where it waits for nothing.
        causes: the works that it waits for, each with the nanoseconds from the end of that work
            until the call returns.
        follows: a moment of the host that this one cannot end sooner after than recorded;
            ``NOTHING`` for none.
        for_room: whether it is a launch, which waits for room in its queue.
    """

    event: int
    start: int
    end: int
    own: float
    causes: list[tuple[int, float]]
    follows: int = NOTHING
    for_room: bool = False


def find_host_waits(
    events: Events, ownership: Ownership, graph: DeviceGraph, threads: list[int]
) -> list[HostWait]:
    """Find the calls of the program's threads that wait for a device.

    A trace does not name the queue or the event that a call waits for. A call waits for all work
    that was launched before, except in queues that had not finished when it returned. A call that
    waits for an event waits for the work that ended last while it ran.
    """
    finder = _Finder(ownership, graph)
    calls = events.of(Category.RUNTIME)
    calls = calls[is_in(events.thread[calls], threads)]
    waiting = events.names_where(names.is_synchronization)[events.name[calls]]
    of_events = events.names_where(names.is_event_synchronization)[events.name[calls]]
    copies = _own_work(events, ownership, calls, Category.MEMCPY)
    at_once = events.names_where(lambda name: _AT_ONCE.match(name) is not None)
    at_once = take(at_once[events.name[ownership.work.event]], copies, False)
    at_once &= events.names_where(lambda name: "Async" in name)[events.name[calls]]
    copies[at_once] = NOTHING
    launched = _own_work(events, ownership, calls, Category.KERNEL)
    long = (launched >= 0) & (events.duration[calls] >= _HELD)
    full = np.full(len(calls), NOTHING)
    full[long] = finder.of_full_queues(
        launched[long], events.start[calls[long]], events.end[calls[long]]
    )
    # From pageable memory, a call hands the last part to the device and returns before the end.
    began, copied = take(ownership.work.start, copies), take(ownership.work.end, copies)
    soon = copied - events.end[calls] <= _REST * (copied - began) + _ROUNDING
    near = (copies >= 0) & (events.start[calls] < copied) & soon
    chosen = np.flatnonzero(np.where(copies >= 0, near, waiting | long))
    columns = (calls, events.start[calls], events.end[calls], copies, long, full, of_events)
    waits = []
    for event, start, end, copy, is_for_room, room, of_event in zip(
        *(column[chosen].tolist() for column in columns), strict=True
    ):
        if copy >= 0:
            causes = [copy]
        elif is_for_room:
            causes = [room] if room >= 0 else []
        elif of_event:
            causes = finder.of_event(start, end)
        else:
            causes = finder.of_queues(start, end)
        if causes and end > start:
            waits.append(_wait(ownership.work.end, event, start, end, causes, is_for_room))
    return waits


def waits_for_batches(batches: Batches, begin: int) -> list[HostWait]:
    """Return where the host waits for worker processes that load batches.

    How fast these load does not depend on the host, as long as they have something to load. So a
    batch comes as long after the recorded steps began as it did, whatever the host does; unless all
    that the workers may load ahead was ready before. Then they had to wait for the host to fetch a
    batch, and it comes as long after that as it did.

    Args:
        begin: when the first step begins, in nanoseconds. What comes before is no wait.
    """
    waits = []
    for _, members in grouped(batches.loader):
        since, late = begin, NOTHING
        times = (batches.event, batches.start, batches.end, batches.arrived, batches.queue)
        columns = zip(*(column[members].tolist() for column in times), strict=True)
        ends: list[int] = []
        for place, (event, start, end, arrived, queue) in enumerate(columns):
            ends.append(end)
            if arrived <= start or start < begin:
                continue
            request = place - queue
            if queue and late < request and request >= 0:
                since = ends[request]
            late = place
            own = float(min(arrived - start, _OWN))
            waits.append(HostWait(event, start, arrived, own, [], since))
    return waits


def _wait(
    ended: Ints, event: int, start: int, end: int, causes: list[int], is_for_room: bool
) -> HostWait:
    latest = max(int(ended[cause]) for cause in causes)
    waited = latest > start
    lags = [
        (cause, float(min(end - int(ended[cause]), _RETURN)))
        if int(ended[cause]) < latest or not waited
        else (cause, float(end - latest))
        for cause in causes
    ]
    own = float(min(end - start, _OWN) if waited else end - start)
    return HostWait(event, start, end, own, lags, for_room=is_for_room)


def _own_work(events: Events, ownership: Ownership, calls: Ints, category: Category) -> Ints:
    """Return the device work of this category that each call launched, ``NOTHING`` for none."""
    work = ownership.work
    own = np.full(len(calls), NOTHING, np.int64)
    launched = np.flatnonzero(events.category[work.event] == category)
    launched = launched[events.correlation[work.event[launched]] > 0]
    if not len(launched):
        return own
    number = events.correlation[work.event[launched]]
    order = np.argsort(number, kind="stable")
    launched, number = launched[order], number[order]
    wanted = events.correlation[calls]
    position = np.minimum(np.searchsorted(number, wanted), len(launched) - 1)
    same = (number[position] == wanted) & (wanted > 0)
    own[same] = launched[position[same]]
    return own


class _Finder:
    """Finds works by their launches and their ends."""

    def __init__(self, ownership: Ownership, graph: DeviceGraph) -> None:
        self._work, self._launch = ownership.work, graph.launch
        self._queues = [
            (members, graph.launch[members]) for _, members in grouped(ownership.work.queue)
        ]
        self._by_end = np.argsort(ownership.work.end, kind="stable")
        self._ended = ownership.work.end[self._by_end]
        self._of_device = {}
        for device in distinct(ownership.work.device):
            own_work = ownership.work.device == device
            times = graph.launch[own_work], self._work.end[own_work]
            self._of_device[device] = tuple(np.sort(times_of, kind="stable") for times_of in times)

    def of_queues(self, start: int, end: int) -> list[int]:
        """Return the last launch before into each queue that had finished."""
        finished = []
        for queue, launched in self._queues:
            last = int(np.searchsorted(launched, start, side="right")) - 1
            if last >= 0 and self._work.end[queue[last]] <= end + _ROUNDING:
                finished.append(int(queue[last]))
        return finished

    def of_event(self, start: int, end: int) -> list[int]:
        """Return the work that ended last while the call ran."""
        last = int(np.searchsorted(self._ended, end, side="right")) - 1
        while last >= 0 and self._ended[last] > start:
            item = int(self._by_end[last])
            if self._launch[item] <= start:
                return [item]
            last -= 1
        return []

    def of_full_queues(self, launched: Ints, start: Ints, end: Ints) -> Ints:
        """Return the work whose end made room for each launch, ``NOTHING`` if none did."""
        room_makers = np.full(len(launched), NOTHING)
        for device, members in grouped(self._work.device[launched]):
            launches, ends = self._of_device[device]
            queued = np.searchsorted(launches, start[members])
            queued -= np.searchsorted(ends, start[members], side="right")
            members = members[
                queued >= np.where(end[members] - start[members] < _BLOCKED, _BRIM, _FULL)
            ]
            last = np.searchsorted(self._ended, end[members], side="right") - 1
            item = self._by_end[last]
            makes_room = (self._ended[last] > start[members]) & (
                self._launch[item] < start[members]
            )
            room_makers[members[makes_room]] = item[makes_room]
        return room_makers
