"""What makes a process slow beside its training is said in a line each; what is usual, in none."""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402


def warnings() -> tuple[str, ...]:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    report = backspot.profile(step, model, steps=2, warmup=1, unprofiled=1, trials="none")
    text = " ".join(str(report).split())
    assert all(warning[:40] in text for warning in report.warnings)
    return report.warnings


def own_trace(*_: Any) -> None:
    return None


@contextmanager
def traced() -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(own_trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def profiled() -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(own_trace)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def monitored() -> Iterator[None]:
    if not hasattr(sys, "monitoring"):
        pytest.skip("before Python 3.12")
    watching = sys.monitoring
    watching.use_tool_id(4, "watcher")
    watching.set_events(4, watching.events.PY_START)
    try:
        yield
    finally:
        watching.set_events(4, 0)
        watching.free_tool_id(4)


@contextmanager
def noting_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@contextmanager
def in_a_mode() -> Iterator[None]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Watching():
        yield


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def more_threads_than_cpus() -> Iterator[None]:
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    cpus, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(cpus)})
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cpus)


@pytest.mark.parametrize(
    ("surroundings", "said"),
    [
        (traced, f"A trace function ({own_trace.__module__}.own_trace; sys.settrace)"),
        (profiled, f"A profile function ({own_trace.__module__}.own_trace; sys.setprofile)"),
        (monitored, "A tool (watcher; sys.monitoring)"),
        (noting_memory, "tracemalloc"),
        (in_a_mode, "A mode (Watching)"),
        (lambda: torch.autograd.detect_anomaly(check_nan=False), "Anomaly mode is on"),
        (deterministic, "Deterministic algorithms are on"),
        (more_threads_than_cpus, "PyTorch works with 2 threads, and this process has 1 of"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_makes_the_process_slow_has_a_line(surroundings: Any, said: str) -> None:
    before = warnings()
    with surroundings():
        found = warnings()
    assert [warning for warning in found if warning.startswith(said)]
    assert len(found) == len(before) + 1
    assert warnings() == before


def test_what_is_usual_has_none() -> None:
    with suppress(AttributeError):
        torch.backends.cuda.matmul.allow_tf32 = True
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.device("cpu"):
        found = warnings()
    torch.set_num_threads(before)
    # A debugger or coverage of the tests themselves may be at work.
    assert [one for one in found if not one.startswith(("A trace function", "A tool"))] == []
