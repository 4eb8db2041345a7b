"""What each piece of device work waited for before it started."""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.attribution.launches import Precedence
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.replay.host import Floats
from backspot.analysis.timeline import FAR, NOTHING, distinct, grouped, median, quantile, take
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

_IDLE = 20_000  # nanoseconds: after so long the work before does not delay a launch any more
_LATE = 5_000  # nanoseconds: work that starts so much later than it could waited for something
_LATENCY, _GAP = 5_000, 1_000  # nanoseconds, where the trace has no work to measure them on
_QUEUE = 1024  # launches that fit into a queue before the next launch waits
_FILLED = 1_000  # thousandths of a block for each multiprocessor: such a kernel fills the device
_NEVER = -1e18


class DeviceGraph(msgspec.Struct, frozen=True):
    """The constraints on the starts of device work; arrays with one entry each.

    Work starts at the latest of: its launch and the latency; the end of the work before in its
    queue and the gap; the ends of ``other`` work, each with its lag.

    Attributes:
        launch: when the host launches it; work without a launch record has that of its queue's
            work before.
        latency: nanoseconds from launch to start, ``-1e18`` where the launch is not known.
        before: the work before in its queue, ``NOTHING`` for none.
        gap: nanoseconds from the end of that work to the start.
        other: for work that waits for other queues, those works and their lags in nanoseconds.
        after_end_of: the work that has to end before this launch finds room in the queue,
            ``NOTHING`` for none.
        wait: nanoseconds that communication waits for other ranks: what it takes longer than the
            shortest of its kind.
    """

    launch: Ints
    latency: Floats
    before: Ints
    gap: Floats
    other: dict[int, dict[int, float]]
    after_end_of: Ints
    wait: Floats


def find_device_graph(events: Events, ownership: Ownership, step: Ints) -> DeviceGraph:
    """Find what each piece of device work waited for.

    The constraint that held a piece of work back keeps its recorded lag, and all others get the
    usual lag, or their own if that is shorter. So no constraint is broken in the recording.

    Args:
        step: the step of each piece of work.
    """
    work = ownership.work
    count = len(work.start)
    before = _before(work.queue, count)
    is_recorded = recorded_launches(ownership)
    launch = _monotone(np.where(is_recorded, work.launch, NOTHING), work.queue)
    since_launch = (work.start - launch).astype(np.float64)
    ended = np.where(before >= 0, work.end[before], 0)
    since_end = np.where(before >= 0, work.start - ended, FAR // 4)
    latency = _usual_latency(since_launch[is_recorded & (since_end > _IDLE)])
    queued = (before >= 0) & (~is_recorded | (launch + latency <= ended))
    usual = float(median(since_end[queued & is_recorded])) if (queued & is_recorded).any() else _GAP
    first = ~is_recorded & (before < 0)
    graph = DeviceGraph(
        launch=launch,
        latency=np.where(
            first,
            since_launch,
            np.where(
                ~is_recorded, _NEVER, np.minimum(since_launch, np.where(queued, latency, np.inf))
            ),
        ),
        before=before,
        gap=np.where(queued, since_end, np.minimum(usual, since_end)).astype(np.float64),
        other={},
        after_end_of=_room(ownership, launch, is_recorded),
        wait=_waits_for_ranks(ownership, step),
    )
    _add_events(events, ownership, graph)
    _add_shared_units(events, ownership, graph, latency, usual)
    _add_late_starts(ownership, graph, latency, usual)
    return graph


def recorded_launches(ownership: Ownership) -> Mask:
    """Whether the launch of each piece of device work was recorded, and not only inferred."""
    work = ownership.work
    is_recorded: Mask = (work.launch >= 0) & (work.thread >= 0)
    return is_recorded


def _before(queue: Ints, count: int) -> Ints:
    """Return the work before in the same queue; work is sorted by its start."""
    before = np.full(count, NOTHING, np.int64)
    for _, members in grouped(queue):
        before[members[1:]] = members[:-1]
    return before


def _monotone(launch: Ints, queue: Ints) -> Ints:
    """Return launches that never go back in a queue; unknown ones take that of the work before."""
    monotone: Ints = launch.copy()
    for _, members in grouped(queue):
        monotone[members] = np.maximum.accumulate(launch[members])
    return monotone


def _usual_latency(measured: Floats) -> float:
    """Return the latency of a launch into an idle queue: a low one of those that were measured."""
    if len(measured) < 5:
        return _LATENCY
    return float(np.clip(quantile(measured, 0.2), 2_000, 20_000))


def _room(ownership: Ownership, launch: Ints, is_recorded: Mask) -> Ints:
    """Find the work that has to end before each launch finds room in its queue."""
    work = ownership.work
    before_room = np.full(len(launch), NOTHING, np.int64)
    for _, members in grouped(work.queue):
        members = members[is_recorded[members]]
        members = members[np.argsort(launch[members], kind="stable")]
        finished = np.searchsorted(np.sort(work.end[members]), launch[members], side="right")
        size = max(_QUEUE, int((np.arange(len(members)) - finished).max(initial=0)) + 1)
        before_room[members[size:]] = members[:-size] if len(members) > size else members[:0]
    return before_room


def _waits_for_ranks(ownership: Ownership, step: Ints) -> Floats:
    """Return how much longer than the shortest of its kind each piece of communication takes.

    A kind is the exchange with the same name at the same place of a step.
    """
    work = ownership.work
    wait = np.zeros(len(work.start))
    exchanges = np.flatnonzero((work.precedence == Precedence.COMMUNICATION) & (step >= 0))
    exchanges = exchanges[np.lexsort((step[exchanges], work.name[exchanges]))]
    name = work.name[exchanges].astype(np.int64) * len(step)
    place = np.arange(len(exchanges)) - np.searchsorted(
        name + step[exchanges], name + step[exchanges]
    )
    _, kind = np.unique(name + place, return_inverse=True)
    duration = (work.end - work.start)[exchanges]
    shortest = np.full(len(exchanges), FAR)
    np.minimum.at(shortest, kind, duration)
    wait[exchanges] = duration - shortest[kind]
    return wait


# Work that waits for other queues ----------------------------------------------------------------


def _add_events(events: Events, ownership: Ownership, graph: DeviceGraph) -> None:
    """Add the constraints of the calls with which one queue waits for an event of another.

    The trace names neither queue. The next launch of the thread is into the queue that waits. It
    may wait for the last launch before into any other queue that ended before this work started.
    """
    work = ownership.work
    calls = events.prefixed(Category.RUNTIME, *names.STREAM_WAITS)
    queues = [members for _, members in grouped(work.queue)]
    if not len(calls) or len(queues) < 2:
        return
    of_thread = {
        thread: members[np.argsort(graph.launch[members], kind="stable")]
        for thread, members in grouped(work.thread)
    }
    for thread, members in grouped(events.thread, calls):
        launched = of_thread.get(thread, members[:0])
        times = np.sort(events.start[members])
        position = np.searchsorted(graph.launch[launched], times)
        times, item = times[position < len(launched)], launched[position[position < len(launched)]]
        for queue in queues:
            cause = take(queue, np.searchsorted(graph.launch[queue], times) - 1)
            lag = work.start[item] - work.end[cause]
            is_waiting = (cause >= 0) & (work.queue[item] != work.queue[queue[0]]) & (lag >= 0)
            _add_waits(graph, item[is_waiting], cause[is_waiting], lag[is_waiting])


def _add_waits(graph: DeviceGraph, items: Ints, causes: Ints, lags: Ints) -> None:
    """Let each item wait for what caused it, and then for as long as it did, or for ``_GAP``."""
    after = np.minimum(lags, _GAP).astype(np.float64)
    for item, cause, ns in zip(items.tolist(), causes.tolist(), after.tolist(), strict=True):
        graph.other.setdefault(item, {})[cause] = ns


def _add_shared_units(
    events: Events, ownership: Ownership, graph: DeviceGraph, latency: float, usual: float
) -> None:
    """Let kernels of several queues that fill a device run one after the other.

    A kernel with a block for each multiprocessor leaves no room for another: that one starts when
    the last blocks of the one before end, and no sooner if that one takes another time.
    """
    work = ownership.work
    fills = (work.precedence == Precedence.COMPUTE) & (take(events.size, work.event, 0) >= _FILLED)
    for _, members in grouped(work.device, np.flatnonzero(fills)):
        for queue in distinct(work.queue[members]):
            others, own = (
                members[work.queue[members] != queue],
                members[work.queue[members] == queue],
            )
            cause = take(others, np.searchsorted(work.start[others], work.start[own]) - 1)
            lag = work.start[own] - take(work.end, cause, 0)
            is_bound = (cause >= 0) & (lag <= _IDLE)
            _add_waits(graph, own[is_bound], cause[is_bound], lag[is_bound])
            late = own[is_bound & (lag < 0)]
            graph.latency[late] = np.minimum(graph.latency[late], latency)
            graph.gap[late] = np.minimum(graph.gap[late], usual)


def _add_late_starts(
    ownership: Ownership, graph: DeviceGraph, latency: float, usual: float
) -> None:
    """Explain work that starts late by the end of work in another queue.

    Work that starts much later than its launch and its queue allow waited for another queue: for
    the last one to end before, among the work that was launched earlier and ended since this work
    could have started. Its launch and its queue did not hold it back, and get their usual lags.
    """
    work = ownership.work
    if len(distinct(work.queue)) < 2:
        return
    ends = np.argsort(work.end, kind="stable")
    ended = work.end[ends]
    possible = np.maximum(
        graph.launch + np.minimum(graph.latency, latency),
        np.where(graph.before >= 0, work.end[graph.before] + np.minimum(graph.gap, usual), 0),
    )
    late = np.flatnonzero(work.start - possible > _LATE)
    first = np.searchsorted(ended, possible[late], side="right")
    last = np.searchsorted(ended, work.start[late], side="right")
    queue, launch, order = work.queue.tolist(), graph.launch.tolist(), ends.tolist()
    for item, begin, end in zip(late.tolist(), first.tolist(), last.tolist(), strict=True):
        for place in range(end - 1, begin - 1, -1):
            cause = order[place]
            if queue[cause] != queue[item] and launch[cause] < launch[item]:
                graph.other.setdefault(item, {})[cause] = float(work.start[item] - ended[place])
                graph.latency[item] = min(graph.latency[item], latency)
                graph.gap[item] = min(graph.gap[item], usual)
                break
