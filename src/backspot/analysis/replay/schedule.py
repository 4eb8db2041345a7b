"""The order in which a graph is run through: in batches whose times follow all at once.

In a batch nothing waits for work of the same batch, except for the work before in its queue. So its
times are running sums and running maxima. Launches into full queues wait for work of long before,
and thus fit into one batch; a call that waits for the work launched last begins a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from backspot.analysis.replay.devices import DeviceGraph
from backspot.analysis.replay.waits import HostWait
from backspot.trace.events import Ints

__all__ = ["Batch", "Schedule", "find_schedule"]


_MOST = 256  # rows, about: the tables of a batch with many variants fit into a processor's cache


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are computed at once.

    Attributes:
        first: its first row.
        last: the row after its last one.
        work: the works that are launched.
        queues: the same works by their queue, in its order.
        full: the works among them that wait for room in their queue.
        other: the works among them that wait for other queues.
        waits: the rows at which the host waits: each with the work, the lag after its end in
            nanoseconds, and the call, as an index into ``Events``.
        follows: the rows that come at least so many nanoseconds after an earlier row.
    """

    first: int
    last: int
    work: Ints
    queues: list[Ints]
    full: Ints
    other: list[int] = field(default_factory=list)
    waits: list[tuple[int, int, float, int]] = field(default_factory=list)
    follows: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def waits_within(self) -> bool:
        """Whether a row after the first one waits for something else than the row before."""
        rows = (at for at, *_ in (*self.waits, *self.follows))
        return len(self.full) > 0 or any(at > self.first for at in rows)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rows of a graph, in batches.

    A row is a station, or one of several launches at a station.

    Attributes:
        first: the first row of each station.
        last: the last row of each station.
        row: the row of each piece of work.
        batches: all rows.
    """

    first: Ints
    last: Ints
    row: Ints
    batches: list[Batch]


def find_schedule(
    graph: DeviceGraph, queue: Ints, waits: list[HostWait], stations: Ints
) -> Schedule:
    """Divide the stations, and the work that is launched at them, into as few batches as possible.

    Args:
        queue: the queue of each piece of work.
        waits: the calls that wait.
        stations: the moments of the host at which something is launched or waited for.
    """
    station = np.searchsorted(stations, graph.launch)
    launched = np.bincount(station, minlength=len(stations))
    last = np.cumsum(np.maximum(launched, 1)) - 1
    first = last - np.maximum(launched, 1) + 1
    row = np.empty(len(station), np.int64)
    order = np.argsort(station, kind="stable")
    row[order] = np.repeat(first - (np.cumsum(launched) - launched), launched) + np.arange(len(row))
    count = int(last[-1]) + 1
    needs = np.full(count, -1)  # the last row that each row waits for

    full = np.flatnonzero(graph.after_end_of >= 0)
    needs[row[full]] = row[graph.after_end_of[full]]
    at = first[np.searchsorted(stations, [wait.end for wait in waits])].tolist()
    waited = [
        (here, cause, lag, wait.event)
        for here, wait in zip(at, waits, strict=True)
        for cause, lag in wait.causes
        if row[cause] < here
    ]
    followed = [
        (here, int(last[np.searchsorted(stations, wait.follows)]), float(wait.end - wait.follows))
        for here, wait in zip(at, waits, strict=True)
        if wait.follows >= 0
    ]
    for here, cause, *_ in waited:
        needs[here] = max(needs[here], row[cause])
    for here, earlier, _ in followed:
        needs[here] = max(needs[here], earlier)
    for item, causes in graph.other.items():
        needs[row[item]] = max(needs[row[item]], *(row[cause] for cause in causes))

    begins = [0]
    needs[_MOST::_MOST] = np.maximum(needs[_MOST::_MOST], 0)  # each is a place to divide
    some = np.flatnonzero(needs >= 0)
    for here, need in zip(some.tolist(), needs[some].tolist(), strict=True):
        if need >= begins[-1] or here - begins[-1] >= _MOST:
            begins.append(here)
    of_row = np.repeat(np.arange(len(begins)), np.diff([*begins, count]))
    by_queue = np.lexsort((row, queue, of_row[row]))
    works = _divided(by_queue, of_row[row[by_queue]], len(begins))
    fulls = _divided(full[np.argsort(row[full])], np.sort(of_row[row[full]]), len(begins))
    queues = [np.split(work, np.flatnonzero(np.diff(queue[work])) + 1) for work in works]
    ends = [*begins[1:], count]
    batches = list(map(Batch, begins, ends, works, queues, fulls))
    for item in graph.other:
        batches[of_row[row[item]]].other.append(item)
    for wait in waited:
        batches[of_row[wait[0]]].waits.append(wait)
    for follow in followed:
        batches[of_row[follow[0]]].follows.append(follow)
    return Schedule(first, last, row, batches)


def _divided(items: Ints, batch: Ints, count: int) -> list[Ints]:
    """Divide items that are sorted by their batch."""
    return np.split(items, np.searchsorted(batch, np.arange(1, count)))
