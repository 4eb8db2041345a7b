"""Who holds each moment: the host's and the devices' work as timelines.

The values of these timelines are *holders*: indices of spans, and after these of device work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import NOTHING, Timeline, distinct, first_started, layered
from backspot.trace.events import Ints

__all__ = [
    "KINDS",
    "device_busy",
    "device_clock",
    "device_drained",
    "device_replays",
    "host_clock",
    "kinds",
    "pass_clock",
    "whole_clock",
]

KINDS = 5
"""What a moment can be spent on, in the order of ``WallKinds``' fields."""
_GPU, _COMMUNICATION, _QUEUED, _SYNC, _HOST = range(KINDS)

_TIERS = 3


_Clock = TypeVar("_Clock", bound=Callable[..., Timeline])


def _once(clock: _Clock) -> _Clock:
    """Work a clock out once for each ownership: accounts, phases and rules ask for the same."""

    @wraps(clock)
    def kept(ownership: Ownership, *which: int) -> Timeline:
        key = (clock.__name__, *which)
        if key not in ownership.clocks:
            ownership.clocks[key] = clock(ownership, *which)
        return ownership.clocks[key]

    return cast("_Clock", kept)


@_once
def host_clock(ownership: Ownership) -> Timeline:
    """What the host executes: on the passes' threads first, then forward calls anywhere."""
    spans, passes = ownership.spans, ownership.passes
    in_pass = passes.of_span >= 0
    layers = []
    for keep, threads in ((in_pass, passes.threads), (~in_pass, tuple(spans.nesting))):
        for thread in threads:
            indices, nesting = spans.nesting[thread]
            local = nesting.timeline.where(keep[indices])
            values = np.where(local.values >= 0, np.append(indices, NOTHING)[local.values], NOTHING)
            layers.append(Timeline(local.edges, values))
    empty = np.empty(0, np.int64)
    return layered(*layers) if layers else Timeline(empty, empty)


@_once
def whole_clock(ownership: Ownership) -> Timeline:
    """Who holds each moment of the trace: what runs on any device, else as the busiest sees it."""
    work = ownership.work
    devices = distinct(work.device)
    if not devices:
        return host_clock(ownership)
    if len(devices) == 1:
        return device_clock(ownership, devices[0])
    spent = [int((work.end - work.start)[work.device == device].sum()) for device in devices]
    busy = [device_busy(ownership, device) for device in devices]
    return layered(*busy, device_clock(ownership, devices[spent.index(max(spent))]))


@_once
def device_busy(ownership: Ownership, device: int) -> Timeline:
    """What runs on a device: compute, then copies, then communication; what started first."""
    work, count = ownership.work, len(ownership.spans.start)
    mine = np.flatnonzero(work.device == device)
    return layered(
        *(
            first_started(work.start[tier], work.end[tier], tier + count)
            for tier in (mine[work.tier[mine] == number] for number in range(_TIERS))
        )
    )


@_once
def device_clock(ownership: Ownership, device: int) -> Timeline:
    """Who holds each moment, as one device sees it.

    First what runs on it: compute before copies before communication, then what started first.
    Where it idles, its next work if that is already launched: it waits for a dependency, or for the
    launch itself. Where nothing is queued: a call that waited for the device until it ran empty,
    for what comes after is its doing; else what the host executes.

    Args:
        ownership: a trace with owners.
        device: its index.
    """
    busy = device_busy(ownership, device)
    begin, queued, end, following = _idle(ownership, busy)
    waiting = first_started(queued, end, following)
    return layered(busy, waiting, _drained(ownership, begin, queued), host_clock(ownership))


@_once
def pass_clock(ownership: Ownership, device: int) -> Timeline:
    """The clock of the passes that wait for ``device``: while it idles, others may work.

    Args:
        ownership: a trace with owners.
        device: its index; ``NOTHING`` where the host alone decides.
    """
    if device == NOTHING:
        return host_clock(ownership)
    devices = distinct(ownership.work.device)
    others = [device_busy(ownership, other) for other in devices if other != device]
    if not others:
        return device_clock(ownership, device)
    return layered(device_busy(ownership, device), *others, device_clock(ownership, device))


@_once
def device_drained(ownership: Ownership, device: int) -> Timeline:
    """When a device idles because the host waited for it until it ran empty; the waiting spans."""
    begin, queued, _, _ = _idle(ownership, device_busy(ownership, device))
    return _drained(ownership, begin, queued)


@_once
def device_replays(ownership: Ownership, device: int) -> Timeline:
    """When a device idles before it replays a captured graph; the spans that launch the replay."""
    begin, _, end, following = _idle(ownership, device_busy(ownership, device))
    item = following - len(ownership.spans.start)
    replays = ownership.work.replays[item]
    return first_started(begin[replays], end[replays], ownership.work.span[item[replays]])


def kinds(ownership: Ownership, clock: Timeline, drained: Timeline) -> Timeline:
    """What each moment of a clock is spent on, as ``WallKinds`` has it; edges as the clock's.

    Args:
        ownership: a trace with owners.
        clock: who holds each moment.
        drained: when the device that the clock is about idles because the host waited.
    """
    work, count = ownership.work, len(ownership.spans.start)
    kind = np.full(len(clock.edges), _HOST, np.int64)
    kind[drained.over(clock.edges) >= 0] = _SYNC
    of_work = np.flatnonzero(clock.values >= count)
    item = clock.values[of_work] - count
    # Work holds the clock before it starts too, as long as the device idles and waits for it.
    runs = clock.edges[of_work] >= work.start[item]
    running = np.where(work.tier[item] == _TIERS - 1, _COMMUNICATION, _GPU)
    kind[of_work] = np.where(runs, running, _QUEUED)
    return Timeline(clock.edges, kind)


def _idle(ownership: Ownership, busy: Timeline) -> tuple[Ints, Ints, Ints, Ints]:
    """Idle time: its begin, when the next work is launched, its end, and what comes next."""
    begin, end, following = _gaps(busy)
    queued = ownership.work.queued[following - len(ownership.spans.start)]
    return begin, np.clip(np.where(queued >= 0, queued, end), begin, end), end, following


def _gaps(busy: Timeline) -> tuple[Ints, Ints, Ints]:
    """Idle time between work, and before the first: begin, end, and what comes next."""
    if not len(busy.edges):
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    idle = np.flatnonzero(busy.values[:-1] == NOTHING)
    begin = np.append(np.iinfo(np.int64).min // 4, busy.edges[idle])
    end = np.append(busy.edges[0], busy.edges[idle + 1])
    return begin, end, np.append(busy.values[0], busy.values[idle + 1])


def _drained(ownership: Ownership, begin: Ints, end: Ints) -> Timeline:
    """Idle time that a waiting call caused: the device ran empty while the host waited for it."""
    waits = ownership.waits
    at = np.searchsorted(waits.start, begin, side="right") - 1
    wait = np.maximum(at, 0)
    if not len(waits.start):
        empty = np.empty(0, np.int64)
        return Timeline(empty, empty)
    caused = (at >= 0) & (waits.end[wait] >= begin)
    return first_started(begin[caused], end[caused], waits.span[wait[caused]])
