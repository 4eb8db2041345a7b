"""Recordings compiled for replays, of files and of traces made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from backspot.analysis.recording import Recording
from backspot.analysis.replay.host import Floats, ProfilerCost
from backspot.analysis.replay.predict import Prediction
from backspot.analysis.replay.replayable import Refusal, Replayable, prepare
from backspot.analysis.replay.saving import Change, replays
from backspot.analysis.typical import every_step
from support.synthetic import Trace

US, MS = 1_000, 1_000_000
STEPS, STEP = 3, 40 * MS
FORWARD, BACKWARD = 0, 10 * MS  # of a step
DATA = Path(__file__).parents[1] / "data"
WITHOUT_BACKWARD = ("cuda_graph_step", "tracelens_qwen_forward_only")
PATHS = {
    name: path
    for path in sorted(DATA.glob("*/*.json.gz"))
    if (name := path.name.partition(".json")[0].removesuffix(".trace")) not in WITHOUT_BACKWARD
}


def prepared(path: Path) -> Replayable | Refusal:
    return prepare(Recording.read(path))


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
