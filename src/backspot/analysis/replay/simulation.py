"""Run through a recording's graph, for many variants of the durations at a time.

The time of each row of the schedule and of each piece of work is a table with one column for each
variant, so that all of them share the cost of the loop over the batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from backspot.analysis.replay.host import Floats
from backspot.analysis.replay.replayable import Replayable
from backspot.trace.events import Ints, Mask

_WIDE = 64  # columns: from here on a loop over rows is faster than NumPy's own along an axis


class Simulated(msgspec.Struct, frozen=True):
    """Replayed times in nanoseconds from the first edge of the host's line.

    The last axes are those of the variants.

    Attributes:
        row: when the host comes to the end of each row of the schedule.
        end: when the work at each place of the schedule ends.
    """

    row: Floats
    end: Floats

    def at(self, recording: Replayable, times: Ints) -> Floats:
        """Return when stations come."""
        stations = np.searchsorted(recording.stations, times)
        found: Floats = self.row[recording.schedule.last[stations]]
        return found

    def step_ends(self, recording: Replayable) -> Floats:
        """Return when each step ends."""
        steps = recording.steps
        ends = self.at(recording, steps.host_end)
        of_place = steps.of_work[recording.schedule.work]
        for step in range(len(ends)):
            own_work = np.flatnonzero(of_place == step)
            if len(own_work):
                ends[step] = np.maximum(ends[step], self.end[own_work].max(axis=0))
        latest: Floats = np.maximum.accumulate(ends, axis=0)
        return latest

    def step_lengths(self, recording: Replayable, work: Floats) -> Floats:
        """Return how long each step takes, in nanoseconds.

        Args:
            work: how long each piece of work takes, as it was simulated.
        """
        steps = recording.steps
        ends = self.step_ends(recording)
        starts = self.at(recording, steps.start)
        for step in range(len(starts)):
            opens = int(steps.opens[step])
            if steps.follows[step]:
                starts[step] = ends[step - 1]
            elif opens >= 0:
                length = work[opens] * (not steps.opens_at_end[step])
                starts[step] = self.end[recording.schedule.place[opens]] - length
            if step:  # a host that runs further ahead begins a step before the last one has ended
                starts[step] = np.maximum(starts[step], ends[step - 1])
        lengths: Floats = np.maximum(ends - starts, 0.0)
        return lengths


def simulate(
    recording: Replayable,
    host: Floats,
    work: Floats,
    skipped: Mapping[int, Mask] | None = None,
) -> Simulated:
    """Replay a recording.

    Args:
        host: how long the host takes to each station (rows), without the waits for devices, in
            nanoseconds; the other axes are those of the variants. It is overwritten.
        work: how long each piece of work takes; as ``host``.
        skipped: for calls in which the host does not wait in some variants, by their events: in
            which.
    """
    graph, schedule, variants = recording.graph, recording.schedule, host.shape[1:]
    columns = int(np.prod(variants))
    work = work.reshape(len(work), columns)
    row = np.ascontiguousarray(host.reshape(len(host), columns))
    if schedule.last[-1] >= len(row):  # a station with several launches has as many rows
        row = np.zeros((int(schedule.last[-1]) + 1, columns))
        row[schedule.first] = host.reshape(len(host), columns)
    end = np.zeros((len(work), columns))
    gap, latency = graph.gap[schedule.work, None], graph.latency[schedule.work, None]
    now, skips = np.zeros(columns), skipped or {}
    for batch in schedule.batches:
        # The host comes to a row after the row before, and no sooner than what it waits for.
        batch_row = row[batch.first : batch.last]
        batch_row[0] += now
        bound = np.full(batch_row.shape if batch.waits_within else (1, columns), -np.inf)
        bound[batch.full] = end[batch.room]
        for row_number, cause, lag, event in batch.waits:
            after = end[cause] + lag
            if event in skips:
                after[skips[event]] = -np.inf
            np.maximum(bound[row_number - batch.first], after, out=bound[row_number - batch.first])
        for row_number, earlier, interval, event in batch.follows:
            after = row[earlier] + interval
            if event in skips:
                after[skips[event]] = -np.inf
            np.maximum(bound[row_number - batch.first], after, out=bound[row_number - batch.first])
        np.maximum(batch_row[0], bound[0], out=batch_row[0])
        _latest(batch_row, bound)
        now = batch_row[-1]
        if not batch.runs:
            continue
        # Work starts after its launch, after work of other queues, and after the work before.
        begin = batch.runs[0][0]
        places = slice(begin, batch.runs[-1][1])
        takes = work[schedule.work[places]]
        np.add(takes, gap[places], out=end[places])
        ready = row[schedule.row[places]]
        ready += latency[places]
        ready += takes
        for first, last, before in batch.runs:
            for row_number, cause, lag in schedule.other.get(first, ()):
                after = end[cause] + lag
                after += takes[row_number - begin]
                bound = ready[row_number - begin]
                np.maximum(bound, after, out=bound)
            first_end, bound = end[first], ready[first - begin]
            if before >= 0:
                first_end += end[before]
                np.maximum(first_end, bound, out=first_end)
            else:
                first_end[:] = bound
            if last - first > 1:
                _latest(end[first:last], ready[first - begin : last - begin])
    return Simulated(row.reshape(len(row), *variants), end.reshape(len(end), *variants))


def _latest(times: Floats, bounds: Floats) -> None:
    """Turn lengths into times, in place: each is the time before and the length, or a later bound.

    Args:
        times: the first time, and then lengths.
        bounds: what no time is earlier than; they are overwritten. The first time keeps the first
            one already, which can be the only one.
    """
    if len(times) == 1:
        return
    if times.shape[1] < _WIDE:
        np.add.accumulate(times, axis=0, out=times)
        if len(bounds) > 1:
            bounds -= times
            np.maximum.accumulate(bounds, axis=0, out=bounds)
            times += np.maximum(bounds, 0.0, out=bounds)
        return
    before, *lengths = times
    later = iter(bounds[1:])
    for length in lengths:
        np.add(before, length, out=length)
        if (bound := next(later, None)) is not None:
            np.maximum(length, bound, out=length)
        before = length
