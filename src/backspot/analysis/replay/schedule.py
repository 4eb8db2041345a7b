"""The order in which a graph is run through: in batches whose times follow all at once.

In a batch the host waits for no work of the same batch. So its times are running sums and running
maxima. Launches into full queues wait for work of long before, and thus fit into one batch; a call
that waits for the work launched last begins a new one. The work of a batch is done in runs: works
of one queue that wait for no other queue, unless for an earlier run.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np

from backspot.analysis.replay.devices import DeviceGraph
from backspot.analysis.replay.waits import HostWait
from backspot.analysis.timeline import grouped, take
from backspot.trace.events import Ints

__all__ = ["Batch", "Schedule", "find_schedule"]


_MOST = 256  # rows, about: the tables of a batch with many variants fit into a processor's cache


class Batch(msgspec.Struct, frozen=True):
    """Rows that are computed at once.

    Attributes:
        first: its first row.
        last: the row after its last one.
        full: the rows that wait for room in a queue, counted from the first.
        room: for each of these the place of the work that has to end before.
        runs: the works that are launched: for each run its first place, the place after its last
            one, and that of the work before in its queue, ``NOTHING`` for none.
        waits: the rows at which the host waits: each with the place of the work, the lag after its
            end in nanoseconds, and the call, as an index into ``Events``.
        follows: the rows that come at least so many nanoseconds after an earlier row, for a call
            that waits, as an index into ``Events``.
    """

    first: int
    last: int
    full: Ints
    room: Ints
    runs: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    waits: list[tuple[int, int, float, int]] = msgspec.field(default_factory=list)
    follows: list[tuple[int, int, float, int]] = msgspec.field(default_factory=list)

    @property
    def waits_within(self) -> bool:
        """Whether a row after the first one waits for something else than the row before."""
        rows = (row for row, *_ in (*self.waits, *self.follows))
        return len(self.full) > 0 or any(row > self.first for row in rows)


class Schedule(msgspec.Struct, frozen=True):
    """The rows of a graph, in batches.

    A row is a station, or one of several launches at a station. The places are those of the works
    in the order of the runs.

    Attributes:
        first: the first row of each station.
        last: the last row of each station.
        work: the work at each place.
        place: the place of each piece of work.
        row: the row at which the work at each place is launched.
        batches: all rows.
        other: for a run's first place, its works that wait for other queues: the place of each, and
            of the work that it waits for, with the lag after its end in nanoseconds.
    """

    first: Ints
    last: Ints
    work: Ints
    place: Ints
    row: Ints
    batches: list[Batch]
    other: dict[int, list[tuple[int, int, float]]]


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

    # Work can wait for what the host launches later: it is done when all of that is launched.
    lowest = _raised(graph, queue, row, 0)
    full = np.flatnonzero(graph.after_end_of >= 0)
    needs[row[full]] = lowest[graph.after_end_of[full]]
    returns = first[np.searchsorted(stations, [wait.end for wait in waits])].tolist()
    waited = [
        (row_of, cause, lag, wait.event)
        for row_of, wait in zip(returns, waits, strict=True)
        for cause, lag in wait.causes
        if lowest[cause] < row_of
    ]
    followed = [
        (
            row_of,
            int(last[np.searchsorted(stations, wait.follows)]),
            float(wait.end - wait.follows),
            wait.event,
        )
        for row_of, wait in zip(returns, waits, strict=True)
        if wait.follows >= 0
    ]
    waiting = [(row_of, lowest[cause]) for row_of, cause, *_ in waited]
    for row_of, earlier in waiting + [(row_of, earlier) for row_of, earlier, *_ in followed]:
        needs[row_of] = max(needs[row_of], earlier)

    begins, position = [0], 0
    needs[_MOST::_MOST] = np.maximum(needs[_MOST::_MOST], 0)  # each is a place to divide
    with_needs = np.flatnonzero(needs >= 0)
    while position < len(
        with_needs
    ):  # each time to the first row that waits for this batch, or is far away
        until = int(np.searchsorted(with_needs, begins[-1] + _MOST))
        within = np.flatnonzero(needs[with_needs[position:until]] >= begins[-1])
        position = position + int(within[0]) if len(within) else until
        begins.extend(with_needs[position : position + 1].tolist())
        position += 1
    of_row = np.repeat(np.arange(len(begins)), np.diff([*begins, count]))

    batch = of_row[lowest]
    turn = _raised(graph, queue, batch * (len(row) + 1), 1)
    work = np.lexsort((row, queue, turn))
    place = np.empty_like(work)
    place[work] = np.arange(len(work))
    same = (np.diff(turn[work]) == 0) & (np.diff(queue[work]) == 0)
    bounds = np.append(np.flatnonzero(np.append(True, ~same))[: len(work)], len(work))
    before = take(place, graph.before[work[bounds[:-1]]])
    runs = zip(bounds[:-1].tolist(), bounds[1:].tolist(), before.tolist(), strict=True)
    places, begin_of = place.tolist(), np.repeat(bounds[:-1], np.diff(bounds)).tolist()
    other: dict[int, list[tuple[int, int, float]]] = {}
    for item, causes in graph.other.items():
        waits_for = [(places[item], places[cause], lag) for cause, lag in causes.items()]
        other.setdefault(begin_of[places[item]], []).extend(waits_for)
    full = full[np.argsort(row[full])]
    divided = np.searchsorted(row[full], begins[1:])
    batches = [
        Batch(*rows_of, row[items] - rows_of[0], place[graph.after_end_of[items]])
        for rows_of, items in zip(pairwise([*begins, count]), np.split(full, divided), strict=True)
    ]
    for run, number in zip(runs, batch[work[bounds[:-1]]].tolist(), strict=True):
        batches[number].runs.append(run)
    for row_of, cause, lag, event in waited:
        batches[of_row[row_of]].waits.append((row_of, int(place[cause]), lag, event))
    for follow in followed:
        batches[of_row[follow[0]]].follows.append(follow)
    return Schedule(first, last, work, place, row[work], batches, other)


def _raised(graph: DeviceGraph, queue: Ints, numbers: Ints, more: int) -> Ints:
    """Return numbers of work that are never lower than these, nor than those before in the queue.

    What waits for other queues has at least the numbers of what it waits for, and ``more``.
    """
    if not graph.other:
        return numbers
    raised_numbers: Ints = numbers.copy()
    queues, least = queue.tolist(), numbers.tolist()
    latest, raised = dict.fromkeys(queues, 0), {}
    for item in sorted(graph.other):  # work is sorted by its start
        number = max(least[item], latest[queues[item]])
        for cause in graph.other[item]:
            number = max(number, least[cause] + more, latest[queues[cause]] + more)
        latest[queues[item]] = raised[item] = number
    raised_numbers[[*raised]] = [*raised.values()]
    for _, members in grouped(queue):
        raised_numbers[members] = np.maximum.accumulate(raised_numbers[members])
    return raised_numbers
