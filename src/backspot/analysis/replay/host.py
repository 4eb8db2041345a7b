"""The host's time as one line of intervals, with what the profiler added to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import (
    NOTHING,
    Timeline,
    distinct,
    first_started,
    grouped,
    is_in,
    merged,
)
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints
from backspot.trace.labels import Kind


class ProfilerCost(msgspec.Struct, frozen=True):
    """What the profiler and the labels add to a step.

    Attributes:
        operator_ns: nanoseconds for each operator and annotation.
        runtime_ns: nanoseconds for each call of the device's runtime that starts device work.
        label_ns: nanoseconds for each label around a module's call.
        marker_ns: nanoseconds for each marker of a node.
        node_ns: nanoseconds for each node whose own line is noted.
        peer_wait: the share of the waits for other ranks that is due to the profiler, 0 to 1. A
            rank that is recorded is slower at some moments, and the others wait for it.
        slowdown: how many times slower the host ran while it was recorded, beside these costs.
        uncertainty: by which share of themselves the costs may be wrong.
    """

    operator_ns: float
    runtime_ns: float
    label_ns: float
    marker_ns: float
    node_ns: float
    peer_wait: float = 1.0
    slowdown: float = 1.0
    uncertainty: float = 0.0

    def scaled(self, factor: float) -> ProfilerCost:
        """Return the cost of each event and of waits for ranks times a factor."""
        return replace(
            self,
            operator_ns=self.operator_ns * factor,
            runtime_ns=self.runtime_ns * factor,
            label_ns=self.label_ns * factor,
            marker_ns=self.marker_ns * factor,
            node_ns=self.node_ns * factor,
            peer_wait=min(1.0, self.peer_wait * factor),
        )

    def range(self) -> tuple[ProfilerCost, ...]:
        """Return the costs, and where they are uncertain the least and the greatest likely ones."""
        if not self.uncertainty:
            return (self,)
        low, high = max(0.0, 1 - self.uncertainty), 1 + self.uncertainty
        return self, self.scaled(low), self.scaled(high)


ZERO = ProfilerCost(0.0, 0.0, 0.0, 0.0, 0.0, peer_wait=0.0)
"""No cost: the recorded step."""

MEASURED = ProfilerCost(1_200.0, 1_200.0, 8_000.0, 9_500.0, 3_000.0, uncertainty=1.5)
"""Measured on the host of an H200 with torch 2.11, on three models that wait for the host.

Microbenchmarks give less (0.7 to 1 µs for an operator), because their caches are warm. Another host
has other costs: fit them to a step measured without profiler. On three hosts of H100s, the real
steps of 60 models were as short as with 2.5 times these costs, on a CPU as with 0.6 to 0.9 times.
The cost of a node is of loops on a CPU.
"""


Floats: TypeAlias = NDArray[np.float64]

_LEFT = 0.1  # of each interval is the program's own, whatever the profiler costs
_ENGINE = 50_000  # nanoseconds: a longer gap between two nodes is not the engine's alone


class HostLine(msgspec.Struct, frozen=True):
    """The intervals between neighbouring points of the program's threads.

    One thread of a training program works at a time: the thread that calls ``backward`` waits for
    autograd's threads. So their points form one line, and what happens on one thread delays all
    that comes later.

    Attributes:
        edges: the times of the points, sorted and distinct; one more than intervals.
        span: the span that each interval belongs to, ``NOTHING`` for none. Time of the engine
            between two nodes belongs to the node before.
        recorded: how many operators and annotations, calls of the runtime that start device work,
            labels, markers, and nodes with a line (rows) were recorded in each interval (columns);
            half of each but the nodes counts before its start and half after its end.
    """

    edges: Ints
    span: Ints
    recorded: Floats

    def lengths(self, costs: Sequence[ProfilerCost], own: Floats) -> Floats:
        """Return how long each interval (rows) takes without the profiler, at each cost (columns).

        What an interval is too short to give up is taken from the intervals after it.

        Args:
            costs: what each event costs.
            own: for each interval that the host waits in the nanoseconds that it needs itself,
                -1 for all others.
        """
        waits = own >= 0
        length = np.where(waits, own, np.diff(self.edges))
        gives = np.where(waits, 0.0, length * (1 - _LEFT))
        recorded = [(kind, count) for kind, count in enumerate(self.recorded) if count.any()]
        shorter = np.empty((len(costs), len(length)))
        of_last: tuple[float, ...] = ()
        for left, cost in zip(shorter, costs, strict=True):
            of_each = cost.operator_ns, cost.runtime_ns, cost.label_ns, cost.marker_ns, cost.node_ns
            if of_each != of_last:  # many a cost differs from the one before by its slowdown alone
                events = [(count, of_each[kind]) for kind, count in recorded]
                remaining = length - _taken(events, gives) if any(of_each) else length
                of_last = of_each
            np.divide(remaining, cost.slowdown, out=left)
        lengths: Floats = shorter.T
        return lengths


def _taken(events: Sequence[tuple[Floats, float]], gives: Floats) -> Floats:
    """Return what each interval gives up.

    Args:
        events: how many of a kind were recorded in each interval, and what each of them costs.
        gives: the most that each interval can give.
    """
    given_up = np.zeros(len(gives))
    for count, cost in events:
        given_up += count * cost
    owed = np.cumsum(given_up - gives)
    least = np.minimum.accumulate(owed)
    owed -= np.minimum(least, 0.0, out=least)
    given_up[1:] += owed[:-1]
    given_up -= owed
    return given_up


def program_threads(events: Events) -> list[int]:
    """Return the threads that run the training program: those with operators or annotations."""
    index = events.of(Category.OPERATOR, Category.ANNOTATION)
    exchanges = events.prefix_mask(*names.HOST_COLLECTIVES)[events.name[index]]
    return distinct(events.thread[index[~exchanges]])


def find_host_line(
    events: Events, ownership: Ownership, host: Timeline, threads: list[int]
) -> HostLine:
    """Put the points of all threads of the program into one line.

    Args:
        host: what the host executes at each moment, as ``Clock`` has it.
    """
    index = events.of(
        Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME, Category.MODULE_CALL
    )
    index = index[is_in(events.thread[index], threads)]
    start, end = events.start[index], events.end[index]
    edges = merged(start, end)
    counts = _recorded(events, index)
    before = np.maximum(np.searchsorted(edges, start) - 1, 0)
    after = np.searchsorted(edges, end)
    row = counts * len(edges)
    number = np.bincount(np.concatenate([row + before, row + after]), minlength=5 * len(edges))
    recorded = number.reshape(5, -1)[:, :-1] / 2
    noted = np.searchsorted(edges, events.end[ownership.noted]) - 1
    recorded[4] = np.bincount(noted[noted >= 0], minlength=len(edges))[: len(edges) - 1]
    return HostLine(edges, _spans_of(ownership, host, edges[:-1]), recorded)


def _recorded(events: Events, index: Ints) -> Ints:
    """Return which cost each event has: 0 operator, 1 call, 2 label, 3 marker, 4 none.

    Calls that start no device work follow one another within half a microsecond while they are
    recorded, too: they have none.
    """
    kind_of = np.zeros(len(Category), np.int64)
    kind_of[Category.RUNTIME] = 1
    kind_of[Category.MODULE_CALL] = 4
    kind = kind_of[events.category[index]]
    of_device = events.correlation[events.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET)]
    kind[(kind == 1) & ~is_in(events.correlation[index], of_device)] = 4
    of_name = np.array(
        [0 if label is None else 2 if label.kind is Kind.FORWARD else 3 for label in events.labels],
        np.int64,
    )
    label = of_name[events.name[index]]
    return np.where((kind == 0) & (label > 0), label, kind)


def _spans_of(ownership: Ownership, host: Timeline, times: Ints) -> Ints:
    """Return the span that the host's time after each of these sorted times belongs to."""
    running = host.over(times)
    count = len(ownership.spans.start)
    running = np.where(running < count, running, NOTHING)
    passes = ownership.passes
    free = np.flatnonzero(running < 0)
    inside = first_started(passes.start, passes.end, np.arange(len(passes.start)))
    free = free[inside.over(times[free]) >= 0]
    last = np.maximum.accumulate(np.where(running >= 0, np.arange(len(running)), NOTHING))[free]
    free, before = free[last >= 0], running[last[last >= 0]]
    engine = times[free] - ownership.spans.end[before] <= _ENGINE
    engine &= passes.of_span[before] >= 0
    running[free[engine]] = before[engine]
    return running


def time_in_parallel(events: Events, threads: list[int]) -> int:
    """Return for how many nanoseconds more than one of these threads runs operators."""
    index = events.of(Category.OPERATOR, Category.RUNTIME)
    index = index[~events.is_label[events.name[index]]]
    edges, changes = [index[:0]], [index[:0]]
    for thread, members in grouped(events.thread, index):
        if thread in threads:
            members = members[np.argsort(events.start[members], kind="stable")]
            start, end = events.start[members], np.maximum.accumulate(events.end[members])
            apart = start[1:] > end[:-1]
            edges += [start[np.append(True, apart)], end[np.append(apart, True)]]
            changes += [np.ones(len(edges[-1]), np.int64), np.full(len(edges[-1]), -1)]
    times, change = np.concatenate(edges), np.concatenate(changes)
    order = np.argsort(times, kind="stable")
    running = np.cumsum(change[order])[:-1]
    return int(np.diff(times[order])[running > 1].sum())
