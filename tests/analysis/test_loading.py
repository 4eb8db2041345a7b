"""A first launch that loads its kernel's code is warm-up: no step that goes on and on has it."""

from __future__ import annotations

from pathlib import Path

import pytest

import backspot
from support.synthetic import Trace

MS = 1_000_000
ENGINE = 2


def launched(
    trace: Trace, at: float, took: float, name: str = "add", lasting: float = 0.02
) -> None:
    """A kernel that starts where the call that launched it returns; times are milliseconds."""
    trace.kernel(
        int((at + took) * MS),
        int((at + took + lasting) * MS),
        launch=int(at * MS),
        launch_thread=ENGINE,
        name=name,
    )
    call = next(e for e in reversed(trace.events) if e["cat"] == "cuda_runtime")
    call["dur"] = took * 1000


def training(took: float) -> Trace:
    """A gradient is added at its parameter by a kernel of which the first launch takes long."""
    trace = Trace()
    trace.annotation("ProfilerStep#1", 0, 100 * MS)
    trace.forward("a", "A", MS, 9 * MS)
    trace.operator("aten::mul", 2 * MS, 3 * MS, seq=0)
    trace.node("MulBackward0", 20 * MS, 40 * MS, seq=0)
    launched(trace, 21, 0.005, "mul", lasting=15)
    trace.node("torch::autograd::AccumulateGrad", 41 * MS, 50 * MS)
    launched(trace, 42, took)
    return trace


def report_of(trace: Trace, folder: Path) -> backspot.Report:
    return backspot.locate(trace.save(folder / "trace.json"))


def test_it_gives_the_warning_of_a_warm_up(tmp_path: Path) -> None:
    (warning,) = report_of(training(6.5), tmp_path).warnings
    assert "1 first launch of a kernel took 6.5 ms" in warning
    assert "run a few steps before profiling" in warning


def test_its_time_is_the_hosts_and_no_copying_of_gradients(tmp_path: Path) -> None:
    report = report_of(training(6.5), tmp_path)
    assert "gradient-accumulation" not in {finding.rule for finding in report.findings}
    assert report["a"].row.wall_on.host_ns > 6 * MS
    assert report["a"].row.wall_on.queued_ns < 0.1 * MS


def again(trace: Trace) -> None:
    launched(trace, 19, 0.005, "add")


def full(trace: Trace) -> None:
    """A launch has to wait while the device is a thousand launches behind."""
    for number in range(1000):
        trace.kernel(
            (60 + number) * MS,
            (61 + number) * MS,
            launch=22 * MS + number,
            launch_thread=ENGINE,
            name="mul",
        )


@pytest.mark.parametrize(
    ("took", "otherwise"), [(0.2, None), (6.5, again), (6.5, full)], ids=["quick", "again", "full"]
)
def test_other_launches_are_none(tmp_path: Path, took, otherwise) -> None:
    trace = training(took)
    if otherwise is not None:
        otherwise(trace)
    assert report_of(trace, tmp_path).warnings == ()
