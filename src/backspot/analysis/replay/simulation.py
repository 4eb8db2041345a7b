"""Run through a recording's graph, for many variants of the durations at a time.

The time of each station and of each piece of work is a vector with one entry for each variant, so
that the cost of the loop is shared by all variants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from backspot.analysis.replay.host import Floats
from backspot.analysis.replay.recording import Recording
from backspot.trace.events import Ints, Mask

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True, slots=True)
class Simulated:
    """Replayed times in nanoseconds from the first edge of the host's line.

    Attributes:
        station: the time of each station (rows) in each variant (columns).
        begin: when each piece of work starts.
        end: when each piece of work ends.
    """

    station: Floats
    begin: Floats
    end: Floats

    def step_ends(self, recording: Recording) -> Floats:
        """Return when each step (rows) ends in each variant (columns)."""
        steps = recording.steps
        ends = self.station[np.searchsorted(recording.stations, steps.host_end)]
        for step in range(len(ends)):
            mine = self.end[steps.of_work == step]
            if len(mine):
                ends[step] = np.maximum(ends[step], mine.max(axis=0))
        latest: Floats = np.maximum.accumulate(ends, axis=0)
        return latest

    def step_lengths(self, recording: Recording) -> Floats:
        """Return how long each step (rows) takes in each variant (columns), in nanoseconds."""
        steps = recording.steps
        ends = self.step_ends(recording)
        starts = self.station[np.searchsorted(recording.stations, steps.start)]
        for step in range(len(starts)):
            opens = int(steps.opens[step])
            if steps.follows[step]:
                starts[step] = ends[step - 1]
            elif opens >= 0:
                starts[step] = (self.end if steps.opens_at_end[step] else self.begin)[opens]
            if step:  # a host that runs further ahead begins a step before the last one has ended
                starts[step] = np.maximum(starts[step], ends[step - 1])
        lengths: Floats = np.maximum(ends - starts, 0.0)
        return lengths


def simulate(
    recording: Recording,
    host: Floats,
    work: Floats,
    skipped: Mapping[int, Mask] | None = None,
) -> Simulated:
    """Replay a recording.

    Args:
        recording: the recording.
        host: how long the host takes to each station (rows) in each variant (columns), without
            the waits for devices; nanoseconds.
        work: how long each piece of work takes.
        skipped: for waits that some variants skip, by the event of the call: in which variants.
    """
    graph, variants = recording.graph, host.shape[1]
    launches = _launches(recording)
    waits: dict[int, list[tuple[int, float | Floats]]] = {}
    ends = np.searchsorted(recording.stations, [wait.end for wait in recording.waits])
    for at, wait in zip(ends.tolist(), recording.waits, strict=True):
        skips = (skipped or {}).get(wait.event)
        for cause, lag in wait.causes:
            waits.setdefault(at, []).append(
                (cause, lag if skips is None else np.where(skips, -np.inf, lag))
            )
    before, room = graph.before.tolist(), graph.after_end_of.tolist()
    latency, gap, other = graph.latency.tolist(), graph.gap.tolist(), graph.other
    station, begin, end = np.empty(host.shape), np.empty(work.shape), np.empty(work.shape)
    now = np.zeros(variants)
    maximum = np.maximum
    for at in range(len(host)):
        now = now + host[at]
        for cause, after in waits.get(at, ()):
            maximum(now, end[cause] + after, out=now)
        for item in launches.get(at, ()):
            if room[item] >= 0:
                maximum(now, end[room[item]], out=now)
            first = begin[item]
            np.add(now, latency[item], out=first)
            if before[item] >= 0:
                maximum(first, end[before[item]] + gap[item], out=first)
            if item in other:
                for cause, lag in other[item].items():
                    maximum(first, end[cause] + lag, out=first)
            np.add(first, work[item], out=end[item])
        station[at] = now
    return Simulated(station, begin, end)


def _launches(recording: Recording) -> dict[int, list[int]]:
    """Return the works that are launched at each station; work is sorted by its start."""
    found: dict[int, list[int]] = {}
    at: Ints = np.searchsorted(recording.stations, recording.graph.launch)
    for item, station in enumerate(at.tolist()):
        found.setdefault(station, []).append(item)
    return found
