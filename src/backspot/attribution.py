"""Who owns what: each autograd node, and each piece of device work, gets its module.

A node belongs to the innermost module call around the forward operator that made it. Device work
belongs to what the host was in when it launched it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backspot.joining import Join, join_nodes
from backspot.passes import Passes, Steps, find_passes, find_steps
from backspot.spans import Spans, find_spans
from backspot.timeline import NOTHING
from backspot.trace import Category, Events
from backspot.trace.events import Ints

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
    "find_passes",
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
        span: the host's innermost span at the launch, ``NOTHING`` for none.
        run: the pass that launched it, ``NOTHING`` for none.
        name: index into ``Events.names``.
    """

    start: Ints
    end: Ints
    device: Ints
    tier: Ints
    launch: Ints
    span: Ints
    run: Ints
    name: Ints


@dataclass(frozen=True, slots=True)
class Ownership:
    """A trace with an owner for everything in its backward.

    Attributes:
        spans: module calls and nodes.
        join: what is known of each node's making.
        owner: for each span: an index into ``SPECIAL``, or that of its module plus
            ``len(SPECIAL)``.
        passes: the backward passes.
        steps: their steps.
        work: what the devices did.
    """

    spans: Spans
    join: Join
    owner: Ints
    passes: Passes
    steps: Steps
    work: DeviceWork


def attribute(events: Events) -> Ownership:
    """Give everything that a trace's backward did its owner."""
    spans = find_spans(events)
    join, passes = join_nodes(events, spans)
    return Ownership(
        spans=spans,
        join=join,
        owner=_owners(events, spans, join),
        passes=passes,
        steps=find_steps(events, passes),
        work=_device_work(events, spans, passes),
    )


def _owners(events: Events, spans: Spans, join: Join) -> Ints:
    count = len(spans.start)
    owner = np.full(count, UNRECORDED, np.int64)
    owner[join.ambiguous] = AMBIGUOUS
    called = spans.module >= 0
    owner[called] = spans.module[called] + len(SPECIAL)
    # What a node's owner hangs on: the span around its forward operator, or the node that fed it.
    hangs_on = join.feeder.copy()
    joined = np.flatnonzero(join.operator >= 0)
    operator = join.operator[joined]
    around = np.full(len(joined), NOTHING, np.int64)
    for thread in np.unique(events.thread[operator]).tolist():
        mine = events.thread[operator] == thread
        around[mine] = spans.at(thread, events.start[operator[mine]])
    owner[joined[around < 0]] = OUTSIDE
    hangs_on[joined] = around
    # A node can hang on a node (double backward, AccumulateGrad), which started before it did.
    rest = np.flatnonzero((hangs_on >= 0) & ~called)
    for span in rest[np.argsort(spans.start[rest], kind="stable")].tolist():
        owner[span] = owner[hangs_on[span]]
    return owner


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
    launch, thread = _launches(events, index)
    span = np.full(len(index), NOTHING, np.int64)
    run = np.full(len(index), NOTHING, np.int64)
    for number in np.unique(thread[thread >= 0]).tolist():
        mine = np.flatnonzero(thread == number)
        span[mine] = spans.at(number, launch[mine])
        if number in passes.threads:
            run[mine] = _run_at(passes, launch[mine])
    within = span >= 0
    run[within] = passes.of_span[span[within]]
    lost = launch < 0
    run[lost] = _run_at(passes, events.start[index[lost]])
    return DeviceWork(
        start=events.start[index],
        end=events.end[index],
        device=events.device[index],
        tier=tier,
        launch=launch,
        span=span,
        run=run,
        name=events.name[index],
    )


def _launches(events: Events, work: Ints) -> tuple[Ints, Ints]:
    """When and on which thread each piece of device work was launched; -1 where nobody knows."""
    launch = np.full(len(work), NOTHING, np.int64)
    thread = np.full(len(work), NOTHING, np.int64)
    calls = events.of(Category.RUNTIME)
    calls = calls[events.correlation[calls] > 0]
    calls = calls[np.lexsort((events.start[calls], events.correlation[calls]))]
    if not len(calls):
        return launch, thread
    numbers = events.correlation[calls]
    at = np.searchsorted(numbers, events.correlation[work], side="left")
    call = calls[np.minimum(at, len(calls) - 1)]
    known = (events.correlation[work] > 0) & (events.correlation[call] == events.correlation[work])
    launch[known] = events.start[call[known]]
    thread[known] = events.thread[call[known]]
    return launch, thread


def _run_at(passes: Passes, times: Ints) -> Ints:
    """The pass whose host part contains each time."""
    if not len(passes.start):
        return np.full(len(times), NOTHING, np.int64)
    at = np.searchsorted(passes.start, times, side="right") - 1
    inside = (at >= 0) & (times < passes.end[np.maximum(at, 0)])
    return np.where(inside, at, NOTHING)
