"""Recordings compiled for replays, of files and of traces made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from backspot.analysis.recording import Recording
from backspot.analysis.replay.host import Floats, ProfilerCost
from backspot.analysis.replay.predict import Prediction
from backspot.analysis.replay.replay import host_times
from backspot.analysis.replay.replayable import Refusal, Replayable, prepare
from backspot.analysis.replay.saving import Change, replays
from backspot.analysis.replay.simulation import Simulated, simulate
from backspot.analysis.typical import every_step
from backspot.trace import Events
from backspot.trace.events import Ints
from support.recordings import DATA, recording_of
from support.synthetic import Trace

US, MS = 1_000, 1_000_000
STEPS, STEP = 3, 40 * MS
FORWARD, BACKWARD = 0, 10 * MS  # of a step
NOT_REPLAYED = (
    *("cuda_graph_step", "tracelens_qwen_forward_only"),  # no backward
    *("no_search", "search_10x30"),  # ranks exchange gradients by gloo
    *("replicated_layers", "sharded_experts", "sharded_large"),  # so do these
)
PATHS = {
    name: path
    for path in sorted(DATA.glob("*/*.json.gz"))
    if (name := path.name.partition(".json")[0].removesuffix(".trace")) not in NOT_REPLAYED
}


def prepared(path: Path) -> Replayable | Refusal:
    # Only what stays as it is has been read before.
    return prepare(recording_of(path) if DATA in path.parents else Recording.read(path))


def recording(path: Path) -> Replayable:
    found = prepared(path)
    assert isinstance(found, Replayable), found
    return found


@cache
def recorded(name: str) -> Replayable:
    """The recording of this name in ``tests/data``."""
    return recording(PATHS[name])


def unfitted(recording: Replayable, cost: ProfilerCost) -> Prediction:
    """A prediction at this cost of the profiler, over all steps of a recording."""
    return Prediction(recording, every_step(len(recording.steps.start)), cost, fitted=False)


def saved_by_step(recording: Replayable, cost: ProfilerCost, changes: Sequence[Change]) -> Floats:
    """Nanoseconds that each step (rows) saves with each change (columns)."""
    return replays(recording, cost, changes)[0].saved


class Program:
    """Steps of modules, such as ``a`` and ``b``: forward, then the nodes of ``b`` and ``a``."""

    def __init__(self, count: int = STEPS, paths: Sequence[str] = ("a", "b")) -> None:
        self.trace, self.count, self.paths = Trace(), count, paths

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield each step's number and when its backward starts, with its forward recorded."""
        for step in range(self.count):
            at = step * STEP
            self.trace.annotation(f"ProfilerStep#{step}", at, at + STEP - 10)
            for number, path in enumerate(self.paths):
                begin = at + FORWARD + (1 + number) * 100 * US
                self.trace.forward(path, "M", begin, begin + 50 * US)
                self.trace.operator(
                    "aten::mul", begin + 10 * US, begin + 20 * US, seq=10 * step + number
                )
            yield step, at + BACKWARD

    def node(self, step: int, path: str, start: int, end: int, name: str = "MulBackward0") -> None:
        self.trace.node(name, start, end, seq=10 * step + self.paths.index(path))

    def call(self, name: str, start: int, end: int, thread: int = 2) -> None:
        self.trace.event("cuda_runtime", name, start, end, thread, correlation=0)

    def save(self, folder: Path) -> Path:
        return self.trace.save(folder / "trace.json")

    def recording(self, folder: Path) -> Replayable:
        return recording(self.save(folder))


@dataclass(frozen=True, slots=True)
class Replayed:
    """A recording as it would have been at another cost of the profiler.

    Attributes:
        events: the trace with moved times, on which attribution and accounting run as on any.
        step_ns: how long each step takes, in nanoseconds.
        cost: what was taken out.
    """

    events: Events
    step_ns: tuple[int, ...]
    cost: ProfilerCost


def replay(recording: Replayable, cost: ProfilerCost) -> Replayed:
    """Replay a recording without what the profiler cost.

    Args:
        cost: what the profiler cost; with ``ZERO``, the recorded times come out.
    """
    lengths, work = recording.host(cost), recording.work(cost)
    simulated = simulate(recording, host_times(recording, lengths), work)
    steps = np.round(simulated.step_lengths(recording, work)[:, 0]).astype(np.int64)
    moved = _moved(recording, lengths[:, 0], work[:, 0], simulated)
    return Replayed(moved, tuple(steps.tolist()), cost)


def _moved(recording: Replayable, lengths: Floats, takes: Floats, simulated: Simulated) -> Events:
    events, work = recording.events, recording.ownership.work
    edges, moved = _moments(recording, lengths, simulated)
    origin = int(recording.line.edges[0])

    def host(times: Ints) -> Ints:
        outside = np.minimum(times - edges[0], 0) + np.maximum(times - edges[-1], 0)
        found: Ints = np.round(np.interp(times, edges, moved) + outside).astype(np.int64) + origin
        return found

    start, end = host(events.start), host(events.end)
    done = simulated.end[recording.schedule.place, 0]
    start[work.event] = np.round(done - takes).astype(np.int64) + origin
    end[work.event] = np.round(done).astype(np.int64) + origin
    flows = replace(events.flows, backward_time=host(events.flows.backward_time))
    return replace(events, start=start, duration=np.maximum(end - start, 0), flows=flows)


def _moments(recording: Replayable, lengths: Floats, simulated: Simulated) -> tuple[Ints, Floats]:
    """Return the edges of the host's line, and when each comes in the replay.

    Without those within waits: what another thread does meanwhile is spread over the wait.
    """
    edges = recording.line.edges
    station = np.searchsorted(recording.stations, edges, side="right") - 1
    total = np.append(0.0, np.cumsum(lengths))
    at_station = total[np.searchsorted(edges, recording.stations)]
    times = simulated.at(recording, recording.stations)[:, 0]
    moved = times[station] + total - at_station[station]
    within = np.zeros(len(edges), bool)
    for wait in recording.waits:
        first, last = np.searchsorted(edges, [wait.start, wait.end])
        within[first + 1 : last] = True
    return edges[~within], moved[~within]
