"""A training loop made by hand, with calls of models with and without gradients."""

from __future__ import annotations

from backspot import Report
from support.phased import HOST, TICK, report_of
from support.synthetic import Trace

CALL = 10  # ticks
LAYERS = 4


class Loop:
    """A training loop made by hand; each call takes ten ticks, each operator around it one."""

    def __init__(self) -> None:
        self.trace, self.at, self.updates = Trace(), 0, 0

    def _until(self, ticks: int) -> tuple[int, int]:
        begin, self.at = self.at, self.at + ticks
        return begin * TICK, self.at * TICK

    def wait(self, ticks: int) -> None:
        """Time in which nothing is recorded."""
        self.at += ticks

    def operators(self, *names: str) -> None:
        for name in names:
            self.trace.operator(name, *self._until(1))

    def fetch(self, late: int = 0) -> None:
        """A batch from a loader, which is so many ticks late."""
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self.trace.annotation(name, *self._until(1 + late))

    def bare(self, path: str = "", times: int = 1, then: tuple[str, ...] = ()) -> None:
        """Calls of a model without gradients, each with operators behind it."""
        for _ in range(times):
            self._call(path)
            self.operators(*then)

    def _call(self, path: str, *, trained: bool = False) -> None:
        begin, end = self._until(CALL)
        self.trace.forward(path, "Net", begin, end)
        for layer in range(LAYERS):
            start = begin + (1 + 2 * layer) * TICK
            inside = ".".join(filter(None, (path, "layers", str(layer))))
            self.trace.forward(inside, "Linear", start, start + 2 * TICK)
            seq = LAYERS * self.updates + layer if trained else None
            self.trace.operator("aten::addmm", start + TICK // 2, start + TICK, seq=seq)

    def update(self, path: str = "") -> None:
        """A call with gradients, its backward, and a step of the optimizer; 26 ticks."""
        self.updates += 1
        self._call(path, trained=True)
        self.operators("aten::mean")
        for layer in reversed(range(LAYERS)):
            at = self._until(2)
            seq = LAYERS * self.updates + layer
            self.trace.node("AddmmBackward0", *at, seq=seq, thread=HOST)
        self._until(2)
        self.trace.annotation("Optimizer.step#SGD.step", *self._until(5))

    def times(self) -> dict[str, float]:
        """The ticks of the phases without gradients, over all steps."""
        names = ("rollout", "scoring", "reference", "teacher", "evaluation")
        phases = {one.name: sum(one.wall_ns_by_step) / TICK for one in self.report().phases}
        return {name: phases[name] for name in names if name in phases}

    def report(self) -> Report:
        return report_of(self.trace)
