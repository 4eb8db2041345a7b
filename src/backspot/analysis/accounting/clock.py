"""Who holds each moment: the work of the host and of the devices as timelines.

The values of these timelines are *holders*: the index of a span, or the number of spans plus the
index of a piece of device work.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property

import numpy as np

from backspot.analysis.attribution.launches import Precedence
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import (
    EMPTY,
    NOTHING,
    Timeline,
    distinct,
    first_started,
    layered,
    take,
)
from backspot.trace.events import Ints


class WallKind(IntEnum):
    """What a moment can be spent on, in the order of the fields of ``WallKinds``."""

    GPU = 0
    COMMUNICATION = 1
    QUEUED = 2
    SYNC = 3
    HOST = 4


class Clock:
    """The clock of a trace. Each timeline is computed once, when it is first needed.

    Attributes:
        host: what the host executes: on the threads of the passes first, then forward calls, then
            exchanges with other ranks, which cost nothing while the host computes.
        devices: the clock of each device that did anything, by the device's index.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self.host = _host(ownership)
        self.devices = {
            device: DeviceClock(ownership, device, self.host)
            for device in distinct(ownership.work.device[ownership.work.device >= 0])
        }
        self._of_passes = {NOTHING: self.host}

    @cached_property
    def whole(self) -> Timeline:
        """Who holds each moment of the trace.

        What runs on any device comes first. Where all devices idle, the clock of the busiest
        device decides.
        """
        if not self.devices:
            return self.host
        clocks = list(self.devices.values())
        if len(clocks) == 1:
            return clocks[0].timeline
        work = self._ownership.work
        spent = [
            int((work.end - work.start)[work.device == device].sum()) for device in self.devices
        ]
        return layered(*(clock.busy for clock in clocks), clocks[spent.index(max(spent))].timeline)

    def of_passes(self, device: int) -> Timeline:
        """Who holds each moment of the passes that wait for a device.

        Args:
            device: its index; ``NOTHING`` where the passes wait for the host alone.
        """
        if device not in self._of_passes:
            own = self.devices[device]
            others = [other.busy for other in self.devices.values() if other is not own]
            # While the device of the pass idles, others may work for the pass.
            timeline = layered(own.busy, *others, own.timeline) if others else own.timeline
            self._of_passes[device] = timeline
        return self._of_passes[device]

    def kinds(self, clock: Timeline, device: int) -> Timeline:
        """What each moment is spent on, as a ``WallKind``.

        Args:
            clock: who holds each moment; the result has the same edges.
            device: the device that the clock is about; ``NOTHING`` for the host alone.
        """
        work, count = self._ownership.work, len(self._ownership.spans.start)
        kind = np.full(len(clock.edges), WallKind.HOST, np.int64)
        if device in self.devices:
            kind[self.devices[device].drained.over(clock.edges) >= 0] = WallKind.SYNC
        of_work = np.flatnonzero(clock.values >= count)
        item = clock.values[of_work] - count
        # Work holds the clock before it starts, too, while the device idles and waits for it.
        runs = clock.edges[of_work] >= work.start[item]
        running = np.where(
            work.precedence[item] == Precedence.COMMUNICATION, WallKind.COMMUNICATION, WallKind.GPU
        )
        kind[of_work] = np.where(runs, running, WallKind.QUEUED)
        return Timeline(clock.edges, kind)

    def replays(self, device: int) -> Timeline:
        """When a device idles before it replays a captured graph: the spans that launch the replay.

        Args:
            device: its index; ``NOTHING`` for the host alone.
        """
        if device in self.devices:
            return self.devices[device].replays
        return EMPTY


class DeviceClock:
    """The clock as one device sees it.

    Args:
        ownership: the trace with its owners.
        device: the index of the device.
        host: what the host executes.
    """

    def __init__(self, ownership: Ownership, device: int, host: Timeline) -> None:
        self._ownership, self._device, self._host = ownership, device, host
        self._spans = len(ownership.spans.start)

    @cached_property
    def busy(self) -> Timeline:
        """What runs on the device: compute over copies over communication, first started first."""
        work = self._ownership.work
        own_work = np.flatnonzero(work.device == self._device)
        return layered(
            *(
                first_started(work.start[items], work.end[items], items + self._spans)
                for items in (own_work[work.precedence[own_work] == level] for level in Precedence)
            )
        )

    @cached_property
    def timeline(self) -> Timeline:
        """Who holds each moment.

        What runs on the device comes first. Where the device idles and its next work is already
        launched, that work holds: it waits for a dependency, or for the launch itself. Where
        nothing is queued, a call that waited for the device until it ran empty holds, because it
        delayed what comes after; else what the host executes.
        """
        _, queued, end, following = self._idle
        waiting = first_started(queued, end, following)
        return layered(self.busy, waiting, self.drained, self._host)

    @cached_property
    def drained(self) -> Timeline:
        """When the device idles because the host waited until it ran empty: the waiting spans."""
        waits = self._ownership.waits
        if not len(waits.start):
            return EMPTY
        begin, queued, _, _ = self._idle
        last_wait = np.searchsorted(waits.start, begin, side="right") - 1
        wait = np.maximum(last_wait, 0)
        caused = (last_wait >= 0) & (waits.end[wait] >= begin)
        return first_started(begin[caused], queued[caused], waits.span[wait[caused]])

    @cached_property
    def replays(self) -> Timeline:
        """When the device idles before a replayed graph: the spans that launch the replay."""
        begin, _, end, following = self._idle
        work, item = self._ownership.work, following - self._spans
        replays = work.replays[item]
        return first_started(begin[replays], end[replays], work.span[item[replays]])

    @cached_property
    def _idle(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Idle time before each piece of work: begin, launch of the work, end, and its holder."""
        busy = self.busy
        if not len(busy.edges):
            empty = np.empty(0, np.int64)
            return empty, empty, empty, empty
        idle = np.flatnonzero(busy.values[:-1] == NOTHING)
        begin = np.append(np.iinfo(np.int64).min // 4, busy.edges[idle])
        end = np.append(busy.edges[0], busy.edges[idle + 1])
        following = np.append(busy.values[0], busy.values[idle + 1])
        queued = self._ownership.work.queued[following - self._spans]
        return begin, np.clip(np.where(queued >= 0, queued, end), begin, end), end, following


def _host(ownership: Ownership) -> Timeline:
    spans, passes = ownership.spans, ownership.passes
    in_pass = passes.of_span >= 0
    layers = []
    for keep, threads in ((in_pass, passes.threads), (~in_pass, tuple(spans.nesting))):
        for thread in threads:
            indices, nesting = spans.nesting[thread]
            local = nesting.timeline.where(keep[indices])
            layers.append(Timeline(local.edges, take(indices, local.values)))
    work = ownership.work
    exchanges = np.flatnonzero(work.device < 0)
    if len(exchanges):
        start, end = work.start[exchanges], work.end[exchanges]
        layers.append(first_started(start, end, exchanges + len(spans.start)))
    return layered(*layers)
