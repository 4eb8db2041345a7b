"""The work of the devices, the launch of each piece, and the host's waits for the devices.

The driver loads code when a kernel is first launched, and records nothing of it but a launch that
takes milliseconds. This is warm-up; a steady step has none of it.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

from backspot.analysis.attribution.passes import Passes
from backspot.analysis.attribution.spans import Spans
from backspot.analysis.attribution.updates import optimizer_steps
from backspot.analysis.timeline import FAR, NOTHING, distinct, enclosing, grouped, is_in, take
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

_LONG = 1_000_000  # nanoseconds: a launch takes a few thousand
_FULL = 512  # pieces of work: a launch blocks when about a thousand are queued
_STAGED = 1 << 16  # bytes of a copy from pageable memory for which the host does not wait


def find_loading(events: Events, work: Ints, call: Ints) -> Mask:
    """For each piece of device work, whether the call that launched it also loaded its code.

    Such a call is the first launch of a kernel of that name, and takes long although the queue is
    not full.

    Args:
        work: the event indices of the device work.
        call: for each the event index of the call that launched it, ``NOTHING`` for none.
    """
    launches = events.prefix_mask(*names.KERNEL_LAUNCHES)
    is_slow: Mask = (call >= 0) & (events.category[work] == Category.KERNEL)
    is_slow &= launches[events.name[call]] & (events.duration[call] >= _LONG)
    slow = np.flatnonzero(is_slow)
    if not len(slow):
        return is_slow
    is_launched = np.flatnonzero(call >= 0)
    launched = events.start[call[is_launched]]
    first = np.full(len(events.names), FAR)
    np.minimum.at(first, events.name[work[is_launched]], launched)
    since = events.start[call[slow]]
    queued = np.zeros(len(slow), np.int64)
    device = events.device[work]
    for number in distinct(device[slow]):
        on_device, slow_on_device = device[is_launched] == number, device[slow] == number
        before = np.searchsorted(np.sort(launched[on_device]), since[slow_on_device], side="left")
        ended = np.sort(events.end[work[is_launched[on_device]]])
        queued[slow_on_device] = before - np.searchsorted(
            ended, since[slow_on_device], side="right"
        )
    is_slow[slow] = (first[events.name[work[slow]]] == since) & (queued < _FULL)
    return is_slow


class Precedence(IntEnum):
    """What device work is for; where work overlaps on a device, the lowest one owns the clock."""

    COMPUTE = 0
    COPY = 1
    COMMUNICATION = 2


class DeviceWork(msgspec.Struct, frozen=True):
    """Kernels, copies, memsets and the host's exchanges; arrays with one entry each.

    An exchange of the host is a collective that threads of gloo or MPI execute. As a kernel does,
    it runs beside the host, and the pass that starts it lasts until it ends.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        device: the device's index, ``NOTHING`` for exchanges of the host.
        precedence: a ``Precedence``; memsets count as copies.
        launch: when the host launched it, -1 where the trace has no launch record.
        queued: when it entered its queue: at its launch; or at the end of the launching call, if
            that call had to load the kernel's code.
        replays: whether the replay of a captured graph begins with it.
        thread: index into ``Events.threads``: the host thread that launched it, ``NOTHING`` where
            that is not known.
        span: the host's innermost span at the launch, ``NOTHING`` for none.
        run: the pass that launched it, ``NOTHING`` for none.
        optimizer: whether an optimizer launched it, and not the closure given to the optimizer.
        name: index into ``Events.names``.
        queue: index into ``Events.threads``: the queue that executed it.
        event: index into ``Events``.
    """

    start: Ints
    end: Ints
    device: Ints
    precedence: Ints
    launch: Ints
    queued: Ints
    replays: Mask
    thread: Ints
    span: Ints
    run: Ints
    optimizer: Mask
    name: Ints
    queue: Ints
    event: Ints


class Waits(msgspec.Struct, frozen=True):
    """Calls in which the host waits for a device, by start; calls outside of all spans left out.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        span: the host's innermost span at the call.
        event: index into ``Events``.
    """

    start: Ints
    end: Ints
    span: Ints
    event: Ints


class Windows(msgspec.Struct, frozen=True):
    """The clock time of each pass; arrays with one entry a pass.

    Attributes:
        start: nanoseconds; if device work of an earlier pass still runs, the end of that work.
        end: nanoseconds, the end of the host's part or of the last work launched, if later.
        device: the device that the pass waits for, because its work ends last; ``NOTHING`` for
            none.
    """

    start: Ints
    end: Ints
    device: Ints


def find_device_work(
    events: Events, spans: Spans, passes: Passes, *, all_exchanges: bool = False
) -> DeviceWork:
    """Find the work of the devices, with the launch of each piece and the pass that launched it.

    Args:
        all_exchanges: whether to take in exchanges of the host that no pass starts.
    """
    exchanges, operators = _host_exchanges(events)
    if not all_exchanges:
        of_pass = pass_at(passes, events.start[operators]) >= 0
        of_pass &= is_in(events.thread[operators], passes.threads)
        exchanges, operators = exchanges[of_pass], operators[of_pass]
    index = np.concatenate(
        [events.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET), exchanges]
    )
    operator = np.concatenate([np.full(len(index) - len(exchanges), NOTHING), operators])
    call = _calls(events, index)
    launched_by = np.where(operator >= 0, operator, call)
    order = np.lexsort(
        (
            _rank(events)[events.thread[index]],
            take(events.start, launched_by, FAR),  # unknown launches come last
            events.end[index],
            events.start[index],
        )
    )
    index, call, launched_by = index[order], call[order], launched_by[order]
    is_communication = events.names_where(names.is_communication)
    is_communication = is_communication | events.prefix_mask(*names.HOST_COLLECTIVES)
    precedence = np.where(
        is_communication[events.name[index]],
        Precedence.COMMUNICATION,
        np.where(events.category[index] == Category.KERNEL, Precedence.COMPUTE, Precedence.COPY),
    ).astype(np.int64)
    launch, thread = (take(column, launched_by) for column in (events.start, events.thread))
    launch, thread = launch.astype(np.int64), thread.astype(np.int64)
    span = np.full(len(index), NOTHING, np.int64)
    run = np.full(len(index), NOTHING, np.int64)
    for number, members in grouped(thread):
        if number < 0:
            continue
        span[members] = spans.at(number, launch[members])
        if number in passes.threads:
            run[members] = pass_at(passes, launch[members])
    _infer_launches(events, index, spans, passes, (launch, thread, span))
    queued = np.where(find_loading(events, index, call), events.end[call], launch)
    within = span >= 0
    run[within] = passes.of_span[span[within]]
    return DeviceWork(
        start=events.start[index],
        end=events.end[index],
        device=events.device[index],
        precedence=precedence,
        launch=launch,
        queued=queued,
        replays=_replays(events, call),
        thread=thread,
        span=span,
        run=run,
        optimizer=in_optimizer(events, passes, launch, thread),
        name=events.name[index],
        queue=events.thread[index],
        event=index,
    )


def _rank(events: Events) -> Ints:
    """Rank threads and queues by their names.

    Work that starts at the same moment must not be ordered by its place in the file.
    """
    threads = events.threads
    rank = np.empty(len(threads), np.int64)
    rank[sorted(range(len(threads)), key=lambda index: tuple(map(str, threads[index])))] = (
        np.arange(len(threads))
    )
    return rank


def _host_exchanges(events: Events) -> tuple[Ints, Ints]:
    """Find the exchanges of the host, and the operator that starts each.

    This is the last operator of a collective that began before the exchange: a thread of gloo may
    take the exchange up later.

    Returns:
        The event indices of the exchanges and of the operators.
    """
    index = events.chosen(
        events.prefix_mask(*names.HOST_COLLECTIVES), Category.OPERATOR, Category.ANNOTATION
    )
    launching = events.prefix_mask(*names.LAUNCHES_OF_COLLECTIVES)
    launching &= ~events.prefix_mask(*names.WAITS_FOR_COLLECTIVES)
    operators = events.chosen(launching, Category.OPERATOR)
    operators = operators[np.argsort(events.start[operators], kind="stable")]
    before = np.searchsorted(events.start[operators], events.start[index], side="right") - 1
    started = before >= 0
    return index[started], operators[before[started]]


def find_waits(events: Events, spans: Spans) -> Waits:
    """Find the calls in spans in which the host waits for a device."""
    calls = waiting_calls(events)
    span = spans.of(events, calls)
    calls, span = calls[span >= 0], span[span >= 0]
    return Waits(events.start[calls], events.end[calls], span, calls)


def waiting_calls(events: Events) -> Ints:
    """Return the calls in which the host waits for a device, by start: indices into the events.

    A small copy from pageable memory is staged, and the call returns at once.
    """
    calls = events.of(Category.RUNTIME)
    waiting = events.names_where(names.is_synchronization)
    pageable = events.names_where(lambda name: names.PAGEABLE in name)
    copies = events.of(Category.MEMCPY)
    to_device = events.prefix_mask(names.CUDA_TO_DEVICE)[events.name[copies]]
    copies = copies[~(to_device & (events.size[copies] >= 0) & (events.size[copies] <= _STAGED))]
    blocking = events.correlation[copies[pageable[events.name[copies]]]]
    is_waiting = waiting[events.name[calls]] | is_in(
        events.correlation[calls], blocking[blocking > 0]
    )
    waiting_events: Ints = calls[is_waiting]
    return waiting_events[np.argsort(events.start[waiting_events], kind="stable")]


def _calls(events: Events, work: Ints) -> Ints:
    """Find the call (event index) that launched each piece of device work, ``NOTHING`` for none."""
    calls = events.of(Category.RUNTIME)
    calls = calls[events.correlation[calls] > 0]
    calls = calls[np.lexsort((events.start[calls], events.correlation[calls]))]
    if not len(calls):
        return np.full(len(work), NOTHING, np.int64)
    numbers = events.correlation[calls]
    place = np.searchsorted(numbers, events.correlation[work], side="left")
    call = calls[np.minimum(place, len(calls) - 1)]
    is_matched = (events.correlation[work] > 0) & (
        events.correlation[call] == events.correlation[work]
    )
    return np.where(is_matched, call, NOTHING)


def _replays(events: Events, call: Ints) -> Mask:
    """Whether each piece of device work, in order of the starts, is a replayed graph's first."""
    replays = np.zeros(len(call), bool)
    graph = events.prefix_mask(*names.GRAPH_LAUNCHES)[events.name[call]] & (call >= 0)
    replays[np.flatnonzero(graph)[np.unique(call[graph], return_index=True)[1]]] = True
    return replays


def in_optimizer(events: Events, passes: Passes, launch: Ints, thread: Ints) -> Mask:
    """Whether each launch lies in an optimizer's step on its thread, after any closure."""
    zeroing = events.prefixed(Category.ANNOTATION, names.ZERO_GRAD)
    marks = np.concatenate([optimizer_steps(events), zeroing])
    start = passes.after(events.start[marks], events.end[marks])
    inside: Mask = enclosing(events, marks, thread, launch, start=start) >= 0
    return inside


def _infer_launches(
    events: Events,
    work: Ints,
    spans: Spans,
    passes: Passes,
    columns: tuple[Ints, Ints, Ints],
) -> None:
    """Fill in launches that the profiler missed, if only one answer is possible.

    A queue runs its work in the order of the launches. So work without a launch record was launched
    between its neighbours in the queue, or before the profiler started. If the host was in the same
    span all that time, that span launched it. If no pass ran in that time, no pass launched it.
    """
    launch, thread, span = columns
    queue = events.thread[work]
    latest = np.append(np.maximum.accumulate(passes.end), -1)  # of the passes up to each
    for _, members in grouped(queue):
        recorded = launch[members] >= 0
        recorded_work, lost = members[recorded], members[~recorded]
        if not len(lost):
            continue
        after = np.searchsorted(recorded_work, lost)
        lost, after = lost[after < len(recorded_work)], after[after < len(recorded_work)]
        behind = recorded_work[after]
        before = np.where(after > 0, recorded_work[after - 1], NOTHING)
        low = np.where(after > 0, launch[before], -1)
        high = launch[behind]
        running = latest[np.searchsorted(passes.start, high, side="left") - 1] > low
        # No pass ran in between: outside of all is known, but not which span launched it.
        launch[lost[~running]] = high[~running]
        sure = running & (before >= 0) & (span[before] == span[behind]) & (span[behind] >= 0)
        lost, before, low, high = lost[sure], before[sure], low[sure], high[sure]
        still = ~spans.any_starts(thread[before], low, high)
        lost, before = lost[still], before[still]
        launch[lost], thread[lost], span[lost] = low[still], thread[before], span[before]


def find_windows(passes: Passes, work: DeviceWork) -> Windows:
    """Find the clock time of each pass: from its first node to the end of its last work."""
    begin, end = passes.start.copy(), passes.end.copy()
    device = np.full(len(begin), NOTHING, np.int64)
    of_passes = np.flatnonzero(work.run >= 0)
    run, ended = work.run[of_passes], work.end[of_passes]
    # A thread of gloo may say late that an exchange ended: the next pass does not wait for it.
    after = np.append(begin[1:], FAR)[run]
    np.maximum.at(end, run, np.where(work.device[of_passes] < 0, np.minimum(ended, after), ended))
    of_passes = of_passes[work.device[of_passes] >= 0]
    of_passes = of_passes[np.argsort(work.end[of_passes], kind="stable")]
    device[work.run[of_passes]] = work.device[
        of_passes
    ]  # the last assignment stays: the latest end
    # Each moment counts once: the earlier pass has it.
    if len(begin) > 1:
        begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end)[:-1])
    devices = work.device[work.device >= 0]
    if len(devices):
        device[device < 0] = devices.min()
    return Windows(begin, np.maximum(begin, end), device)


def pass_at(passes: Passes | Windows, times: Ints) -> Ints:
    """Return the pass with each time in its host part, or in its window."""
    if not len(passes.start):
        return np.full(len(times), NOTHING, np.int64)
    run = np.searchsorted(passes.start, times, side="right") - 1
    inside = (run >= 0) & (times < passes.end[np.maximum(run, 0)])
    return np.where(inside, run, NOTHING)
