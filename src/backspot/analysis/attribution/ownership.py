"""Who owns what: each autograd node, and each piece of device work, gets its module.

A node belongs to the innermost module call around the forward operator that made it. Device work
belongs to what the host was in when it launched it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from backspot.analysis.attribution.join import Join, find_lines_of_nodes, join_nodes
from backspot.analysis.attribution.loading import find_loading
from backspot.analysis.attribution.passes import Passes, Steps, find_steps
from backspot.analysis.attribution.recompute import NO_CALLER, find_recomputation
from backspot.analysis.attribution.spans import Spans, find_spans
from backspot.analysis.attribution.wrapping import find_wrapped
from backspot.analysis.timeline import NOTHING, Timeline, first_started, grouped
from backspot.trace import Category, Events
from backspot.trace.events import Ints
from backspot.trace.source_lines import SourceLine

__all__ = [
    "AMBIGUOUS",
    "ENGINE",
    "NO_LAUNCH",
    "OUTSIDE",
    "SPECIAL",
    "UNRECORDED",
    "DeviceWork",
    "Ownership",
    "attribute",
]

SPECIAL = (
    "(outside model)",
    "(forward not recorded)",
    "(ambiguous thread)",
    "(autograd engine)",
    "(no launch record)",
)
"""What owns the time that no module owns, as rows name it; modules come after these."""
OUTSIDE, UNRECORDED, AMBIGUOUS, ENGINE, NO_LAUNCH = range(len(SPECIAL))

_WAITING = re.compile(
    r"(cuda|hip)(Stream|Device|Event)Synchronize|(cuda|hip)Memcpy(2D|3D)?$|cu(Stream|Ctx|Event)Sync"
)
_PAGEABLE = "Pageable"  # in a copy's name: its call returns when the copy is done
_GRAPH = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")
_COMMUNICATION = ("nccl", "rccl", "mscclpp", "nvshmem", "oneccl")


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Kernels, copies and memsets; arrays with one entry each.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        device: the device's index.
        tier: 0 compute, 1 copies and memsets, 2 communication: who owns the clock where they
            overlap.
        launch: when the host launched it, -1 where the trace has no launch record.
        queued: when it was in its queue: at its launch; or, where that had to load the kernel's
            code, at the end of the call.
        replays: whether a captured graph's replay begins with it.
        thread: index into ``Events.threads``: the host thread that launched it, ``NOTHING`` where
            nobody knows.
        span: the host's innermost span at the launch, ``NOTHING`` for none.
        run: the pass that launched it, ``NOTHING`` for none.
        optimizer: whether an optimizer launched it, and not the closure that its step was given.
        name: index into ``names``.
        queue: index into ``Events.threads``: the queue that executed it.
        event: index into ``Events``.
        names: the trace's names.
    """

    start: Ints
    end: Ints
    device: Ints
    tier: Ints
    launch: Ints
    queued: Ints
    replays: np.ndarray
    thread: Ints
    span: Ints
    run: Ints
    optimizer: np.ndarray
    name: Ints
    queue: Ints
    event: Ints
    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Waits:
    """Calls in which the host waits for a device, by start; those that no span contains left out.

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


@dataclass(frozen=True, slots=True)
class Windows:
    """The clock time of each pass; arrays with one entry a pass.

    Attributes:
        start: nanoseconds; where an earlier pass's device work still runs, its end.
        end: nanoseconds, the later of the host's end and that of the last work launched.
        device: the device whose work ends last, the one the pass waits for; ``NOTHING`` for none.
    """

    start: Ints
    end: Ints
    device: Ints


@dataclass(frozen=True, slots=True)
class Ownership:
    """A trace with an owner for everything in its backward.

    Attributes:
        spans: module calls and nodes.
        join: what is known of each node's making.
        owner: for each span: an index into ``SPECIAL``, or that of its module plus
            ``len(SPECIAL)``.
        passes: the backward passes.
        windows: their clock time.
        steps: their steps.
        work: what the devices did.
        waits: where the host waited for them.
        line: for each span the index in ``lines`` of what made the node, ``NOTHING`` where that is
            not known.
        lines: the lines of source that the trace names.
        exact_lines: whether these made the nodes themselves, or called the modules that did.
        clocks: what ``clock`` worked out of it.
    """

    spans: Spans
    join: Join
    owner: Ints
    passes: Passes
    windows: Windows
    steps: Steps
    work: DeviceWork
    waits: Waits
    line: Ints
    lines: Sequence[SourceLine] = ()
    exact_lines: bool = True
    clocks: dict[tuple[object, ...], Timeline] = field(
        default_factory=dict, repr=False, compare=False
    )


def attribute(events: Events) -> Ownership:
    """Give everything that a trace's backward did its owner."""
    spans = find_recomputation(events, find_spans(events))
    join, passes = join_nodes(events, spans)
    work = _device_work(events, spans, passes)
    windows = _windows(passes, work)
    lost = work.launch == NOTHING
    work.run[lost] = _run_at(windows, work.start[lost])
    return Ownership(
        spans=spans,
        join=join,
        owner=_owners(events, spans, join),
        passes=passes,
        windows=windows,
        steps=find_steps(events, passes),
        work=work,
        waits=_waits(events, spans),
        line=find_lines_of_nodes(events, spans, join),
        lines=events.lines.lines,
        exact_lines=events.lines.exact,
    )


def _owners(events: Events, spans: Spans, join: Join) -> Ints:
    count = len(spans.start)
    owner = np.full(count, UNRECORDED, np.int64)
    owner[join.captured] = ENGINE
    owner[join.ambiguous] = AMBIGUOUS
    called = spans.module >= 0
    owner[called] = spans.module[called] + len(SPECIAL)
    # What a node's owner hangs on: the span around its forward operator, or the node that fed it.
    hangs_on = join.feeder.copy()
    joined = np.flatnonzero(join.operator >= 0)
    operator = join.operator[joined]
    around = spans.of(events, operator)
    wrapped = find_wrapped(events, spans, operator)
    around = np.where(wrapped >= 0, wrapped, around)
    owner[joined[around < 0]] = OUTSIDE
    # Made by no recorded operator, but the live half saw whose it is.
    told = (spans.marked >= 0) & (join.operator < 0)
    owner[told] = spans.marked[told] + len(SPECIAL)
    hangs_on[joined] = around
    again = ~called & ~spans.is_node
    hangs_on[again] = np.where(spans.caller >= 0, spans.caller, spans.parent)[again]
    unowned = again & (spans.caller == NO_CALLER)
    owner[unowned], hangs_on[unowned] = OUTSIDE, NOTHING
    # A node can hang on a node (double backward, AccumulateGrad), which started before it did.
    up = np.where((hangs_on >= 0) & ~called, hangs_on, np.arange(count))
    for _ in range(count.bit_length()):  # each round doubles what it covers
        further = up[up]
        if (further == up).all():
            break
        up = further
    owned: Ints = owner[up]
    return owned


def _device_work(events: Events, spans: Spans, passes: Passes) -> DeviceWork:
    index = events.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
    index = index[np.argsort(events.start[index], kind="stable")]
    is_communication = np.array(
        [any(word in name.lower() for word in _COMMUNICATION) for name in events.names], bool
    )
    tier = np.where(
        is_communication[events.name[index]],
        2,
        np.where(events.category[index] == Category.KERNEL, 0, 1),
    ).astype(np.int64)
    call = _calls(events, index)
    launch, thread = (
        np.where(call >= 0, of[call], NOTHING) for of in (events.start, events.thread)
    )
    launch, thread = launch.astype(np.int64), thread.astype(np.int64)
    span = np.full(len(index), NOTHING, np.int64)
    run = np.full(len(index), NOTHING, np.int64)
    for number, mine in grouped(thread):
        if number < 0:
            continue
        span[mine] = spans.at(number, launch[mine])
        if number in passes.threads:
            run[mine] = _run_at(passes, launch[mine])
    _infer_launches(events, index, spans, passes, (launch, thread, span))
    queued = np.where(find_loading(events, index, call), events.end[call], launch)
    within = span >= 0
    run[within] = passes.of_span[span[within]]
    return DeviceWork(
        start=events.start[index],
        end=events.end[index],
        device=events.device[index],
        tier=tier,
        launch=launch,
        queued=queued,
        replays=_replays(events, call),
        thread=thread,
        span=span,
        run=run,
        optimizer=_in_optimizer(events, passes, launch, thread),
        name=events.name[index],
        queue=events.thread[index],
        event=index,
        names=events.names,
    )


def _waits(events: Events, spans: Spans) -> Waits:
    calls = events.of(Category.RUNTIME)
    waiting = np.array([_WAITING.match(name) is not None for name in events.names], bool)
    pageable = np.array([_PAGEABLE in name for name in events.names], bool)
    copies = events.of(Category.MEMCPY)
    blocking = events.correlation[copies[pageable[events.name[copies]]]]
    kept = waiting[events.name[calls]] | np.isin(events.correlation[calls], blocking[blocking > 0])
    calls = calls[kept]
    calls = calls[np.argsort(events.start[calls], kind="stable")]
    span = spans.of(events, calls)
    calls, span = calls[span >= 0], span[span >= 0]
    return Waits(events.start[calls], events.end[calls], span, calls)


def _calls(events: Events, work: Ints) -> Ints:
    """The event of the call that launched each piece of device work; -1 where nobody knows."""
    calls = events.of(Category.RUNTIME)
    calls = calls[events.correlation[calls] > 0]
    calls = calls[np.lexsort((events.start[calls], events.correlation[calls]))]
    if not len(calls):
        return np.full(len(work), NOTHING, np.int64)
    numbers = events.correlation[calls]
    at = np.searchsorted(numbers, events.correlation[work], side="left")
    call = calls[np.minimum(at, len(calls) - 1)]
    known = (events.correlation[work] > 0) & (events.correlation[call] == events.correlation[work])
    return np.where(known, call, NOTHING)


def _replays(events: Events, call: Ints) -> np.ndarray:
    """Whether each piece of device work, in order of their starts, is a replayed graph's first."""
    replays = np.zeros(len(call), bool)
    graph = events.name_mask(*_GRAPH)[events.name[call]] & (call >= 0)
    replays[np.flatnonzero(graph)[np.unique(call[graph], return_index=True)[1]]] = True
    return replays


def _in_optimizer(events: Events, passes: Passes, launch: Ints, thread: Ints) -> np.ndarray:
    """Whether each launch lies in an optimizer's annotation on its thread, behind any closure."""
    marks = events.named(Category.ANNOTATION, "Optimizer.")
    inside = np.zeros(len(launch), bool)
    launches = dict(grouped(thread))
    for number, those in grouped(events.thread[marks]):
        mine = marks[those]
        start, end = events.start[mine], events.end[mine]
        steps = first_started(passes.after(start, end), end, mine)
        here = launches.get(number, those[:0])
        inside[here] = steps.at(launch[here]) >= 0
    return inside


def _infer_launches(
    events: Events,
    work: Ints,
    spans: Spans,
    passes: Passes,
    columns: tuple[Ints, Ints, Ints],
) -> None:
    """Fill in launches that the profiler missed, where only one answer is possible.

    A queue runs its work in the order of the launches. So work without a launch record was launched
    between its neighbours in the queue, or before the profiler started. Where the host was in
    one and the same span all that time, that span launched it; where no pass ran, none did.
    """
    launch, thread, span = columns
    queue = events.thread[work]
    latest = np.append(np.maximum.accumulate(passes.end), -1)  # of the passes up to each
    for _, mine in grouped(queue):
        recorded = launch[mine] >= 0
        known, lost = mine[recorded], mine[~recorded]
        if not len(lost):
            continue
        after = np.searchsorted(known, lost)
        lost, after = lost[after < len(known)], after[after < len(known)]
        behind = known[after]
        before = np.where(after > 0, known[after - 1], NOTHING)
        low = np.where(after > 0, launch[before], -1)
        high = launch[behind]
        running = latest[np.searchsorted(passes.start, high, side="left") - 1] > low
        launch[lost[~running]] = high[~running]
        sure = running & (before >= 0) & (span[before] == span[behind]) & (span[behind] >= 0)
        lost, before, low, high = lost[sure], before[sure], low[sure], high[sure]
        still = ~spans.any_starts(thread[before], low, high)
        lost, before = lost[still], before[still]
        launch[lost], thread[lost], span[lost] = low[still], thread[before], span[before]


def _windows(passes: Passes, work: DeviceWork) -> Windows:
    begin, end = passes.start.copy(), passes.end.copy()
    device = np.full(len(begin), NOTHING, np.int64)
    mine = np.flatnonzero(work.run >= 0)
    mine = mine[np.argsort(work.end[mine], kind="stable")]
    device[work.run[mine]] = work.device[mine]  # the last assignment stays: the latest end
    np.maximum.at(end, work.run[mine], work.end[mine])
    # Each moment counts once: what an earlier pass still holds is the earlier one's.
    if len(begin) > 1:
        begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end)[:-1])
    if len(work.device):
        device[device < 0] = work.device.min()
    return Windows(begin, np.maximum(begin, end), device)


def _run_at(passes: Passes | Windows, times: Ints) -> Ints:
    """The pass whose host part, or window, contains each time."""
    if not len(passes.start):
        return np.full(len(times), NOTHING, np.int64)
    at = np.searchsorted(passes.start, times, side="right") - 1
    inside = (at >= 0) & (times < passes.end[np.maximum(at, 0)])
    return np.where(inside, at, NOTHING)
