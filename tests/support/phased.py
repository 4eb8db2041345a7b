"""Steps made by hand, in ticks, and their phases in ticks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import backspot
from backspot import Report
from support.synthetic import Trace

TICK = 1_000_000  # nanoseconds: well above what a clock rounds, and what a loop does in Python
HOST, ENGINE = 1, 2


def report_of(trace: Trace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return backspot.locate(trace.save(Path(folder) / "trace.json"))


def ticks(report: Report) -> dict[str, float]:
    """Over all steps."""
    spent = {phase.name: sum(phase.wall_ns_by_step) for phase in report.phases}
    return {name: time / TICK for name, time in spent.items() if time}


def busy(report: Report) -> dict[str, float]:
    """In a typical step."""
    return {phase.name: phase.busy_ns / TICK for phase in report.phases if phase.busy_ns}


def operator(trace: Trace, name: str, start: float, end: float, seq: int | None = None) -> None:
    trace.operator(name, int(start * TICK), int(end * TICK), seq=seq)


def step(trace: Trace, at: int = 0, *, marked: bool = True, loader: bool = True) -> None:
    """A hundred ticks: data 2 to 10, forward 20 to 40, loss to 44, backward 50 to 60, …"""
    if marked:
        trace.annotation(f"ProfilerStep#{at}", at * TICK, (at + 100) * TICK)
    if loader:
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        trace.annotation(name, (at + 2) * TICK, (at + 10) * TICK)
        operator(trace, "aten::stack", at + 4, at + 5)
    trace.annotation("Optimizer.zero_grad#SGD.zero_grad", (at + 10) * TICK, (at + 11) * TICK)
    trace.forward("", "Model", (at + 20) * TICK, (at + 40) * TICK)
    operator(trace, "aten::mul", at + 22, at + 24, seq=2 * at)
    operator(trace, "aten::sum", at + 42, at + 43, seq=2 * at + 1)
    operator(trace, "aten::ones_like", at + 43.5, at + 44)
    trace.node("SumBackward0", (at + 50) * TICK, (at + 51) * TICK, seq=2 * at + 1, thread=HOST)
    trace.node("MulBackward0", (at + 51) * TICK, (at + 60) * TICK, seq=2 * at, thread=HOST)
    operator(trace, "aten::_foreach_norm", at + 62, at + 63)
    operator(trace, "aten::mul", at + 64, at + 65)
    trace.annotation("Optimizer.step#SGD.step", (at + 70) * TICK, (at + 80) * TICK)
    operator(trace, "aten::item", at + 90, at + 92)


STEP = {
    "data": 8,
    "host": 9,
    "forward": 20,
    "loss": 2,
    "metrics": 2,
    "backward": 10,
    "clipping": 3,
    "optimizer": 10,
    "zero_grad": 1,
    "idle": 35,
}
