"""Run through a recording's graph, for many variants of the durations at a time.

The time of each station and of each piece of work is a table with one row for each set of
durations, such as one cost of the profiler, and one column for each variant of it, so that all of
them share the cost of the loop. Most durations are the same in all variants: only the stations and
the work that some variant makes shorter have a row of differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from backspot.analysis.replay.host import Floats
from backspot.analysis.replay.replayable import Replayable
from backspot.trace.events import Ints, Mask


@dataclass(frozen=True, slots=True)
class Variants:
    """How variants differ from the durations that they share.

    Attributes:
        count: how many variants there are.
        host: for each station that the host comes to earlier in some variant how much less it takes
            to that station: for each set of durations all variants, in one row of nanoseconds.
        work: for each piece of work that takes less, the same.
        skipped: for each call that some variants do not wait in, by its event: in which; a row as
            in ``host``.
    """

    count: int = 1
    host: Mapping[int, Floats] = field(default_factory=dict)
    work: Mapping[int, Floats] = field(default_factory=dict)
    skipped: Mapping[int, Mask] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Replayed times in nanoseconds from the first edge of the host's line.

    The last two axes of all times are the set of durations and the variant.

    Attributes:
        station: the time of each station that was asked for.
        end: when each piece of work ends.
        work: how long each piece of work takes, as far as all variants share that.
    """

    station: dict[int, Floats]
    end: Floats
    work: Floats

    def at(self, recording: Replayable, times: Ints) -> Floats:
        """Return when stations come."""
        return np.stack(
            [self.station[at] for at in np.searchsorted(recording.stations, times).tolist()]
        )

    def step_ends(self, recording: Replayable) -> Floats:
        """Return when each step ends."""
        steps = recording.steps
        ends = self.at(recording, steps.host_end)
        for step in range(len(ends)):
            mine = np.flatnonzero(steps.of_work == step)
            if len(mine):
                ends[step] = np.maximum(ends[step], self.end[mine].max(axis=0))
        latest: Floats = np.maximum.accumulate(ends, axis=0)
        return latest

    def step_lengths(self, recording: Replayable) -> Floats:
        """Return how long each step takes, in nanoseconds."""
        steps = recording.steps
        ends = self.step_ends(recording)
        starts = self.at(recording, steps.start)
        for step in range(len(starts)):
            opens = int(steps.opens[step])
            if steps.follows[step]:
                starts[step] = ends[step - 1]
            elif opens >= 0:
                length = self.work[opens] * (not steps.opens_at_end[step])
                starts[step] = self.end[opens] - length
            if step:  # a host that runs further ahead begins a step before the last one has ended
                starts[step] = np.maximum(starts[step], ends[step - 1])
        lengths: Floats = np.maximum(ends - starts, 0.0)
        return lengths


def simulate(
    recording: Replayable,
    host: Floats,
    work: Floats,
    variants: Variants | None = None,
    *,
    every_station: bool = False,
) -> Simulated:
    """Replay a recording.

    Args:
        host: how long the host takes to each station (rows), without the waits for devices, in
            nanoseconds, with one column for each set of durations.
        work: how long each piece of work takes; as ``host``.
        variants: how the variants of each set differ; by default there is one.
        every_station: return the times of all stations, and not only those of the steps.
    """
    variants = variants or Variants()
    graph, steps = recording.graph, recording.steps
    order, begins = _launches(recording)
    waits = _waits(recording, variants)
    wanted = recording.stations if every_station else np.append(steps.start, steps.host_end)
    follows = _follows(recording)
    kept = set(np.searchsorted(recording.stations, wanted).tolist())
    kept.update(earlier for earlier, _ in follows.values())
    before, room, other = graph.before.tolist(), graph.after_end_of.tolist(), graph.other
    # With arrays this small, a call of NumPy costs more than its sums. It is cheapest with one axis
    # and arrays of equal shape, or of none.
    latency, gap = (list(map(np.array, lags.tolist())) for lags in (graph.latency, graph.gap))
    lengths = list(np.repeat(host, variants.count, axis=1))
    takes = list(np.repeat(work, variants.count, axis=1))
    table = np.empty((len(work), work.shape[1] * variants.count))
    end = list(table)
    station: dict[int, Floats] = {}
    now, later = np.zeros((2, table.shape[1]))
    maximum, add, subtract = np.maximum, np.add, np.subtract
    less_host, less_work = variants.host, variants.work
    for at, length in enumerate(lengths):
        add(now, length, out=now)
        if at in less_host:
            subtract(now, less_host[at], out=now)
        if at in waits:
            for cause, after in waits[at]:
                maximum(now, end[cause] + after, out=now)
        if at in follows:
            earlier, interval = follows[at]
            maximum(now, station[earlier] + interval, out=now)
        for item in order[begins[at] : begins[at + 1]]:
            if room[item] >= 0:
                maximum(now, end[room[item]], out=now)
            mine = end[item]
            add(now, latency[item], out=mine)
            if before[item] >= 0:
                add(end[before[item]], gap[item], out=later)
                maximum(mine, later, out=mine)
            if item in other:
                for cause, lag in other[item].items():
                    maximum(mine, end[cause] + lag, out=mine)
            add(mine, takes[item], out=mine)
            if item in less_work:
                subtract(mine, less_work[item], out=mine)
        if at in kept:
            station[at] = now.copy()
    shape = (work.shape[1], variants.count)
    return Simulated(
        {at: times.reshape(shape) for at, times in station.items()},
        table.reshape(-1, *shape),
        work[:, :, None],
    )


def _waits(
    recording: Replayable, variants: Variants
) -> dict[int, list[tuple[int, float | Floats]]]:
    """Return the works that are waited for at each station, each with the lag after its end."""
    found: dict[int, list[tuple[int, float | Floats]]] = {}
    ends = np.searchsorted(recording.stations, [wait.end for wait in recording.waits])
    for at, wait in zip(ends.tolist(), recording.waits, strict=True):
        skips = variants.skipped.get(wait.event)
        for cause, lag in wait.causes:
            after = lag if skips is None else np.where(skips, -np.inf, lag)
            found.setdefault(at, []).append((cause, after))
    return found


def _follows(recording: Replayable) -> dict[int, tuple[int, float]]:
    """Return the stations that come at least some nanoseconds after an earlier station."""
    waits = [wait for wait in recording.waits if wait.follows >= 0]
    earlier = np.searchsorted(recording.stations, [wait.follows for wait in waits]).tolist()
    ends = np.searchsorted(recording.stations, [wait.end for wait in waits]).tolist()
    return {
        at: (before, float(wait.end - wait.follows))
        for at, before, wait in zip(ends, earlier, waits, strict=True)
    }


def _launches(recording: Replayable) -> tuple[list[int], list[int]]:
    """Return the works by the station at which they are launched, and where each station begins.

    Works of one station stay in the order of their starts.
    """
    at: Ints = np.searchsorted(recording.stations, recording.graph.launch)
    order = np.argsort(at, kind="stable")
    begins = np.searchsorted(at[order], np.arange(len(recording.stations) + 1))
    return order.tolist(), begins.tolist()
