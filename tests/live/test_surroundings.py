"""What makes a process slow beside its training is said in a line each; what is usual, in none."""

from __future__ import annotations

import os
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from backspot.live import cgroups  # noqa: E402
from backspot.live.surroundings import low_clock  # noqa: E402
from backspot.threads import thread_count  # noqa: E402

WITHOUT_HOOKS = True


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
def changed(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    """A setting has another value within the block."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def traced() -> AbstractContextManager[None]:
    return changed(sys.gettrace, sys.settrace, own_trace)


def profiled() -> AbstractContextManager[None]:
    return changed(sys.getprofile, sys.setprofile, own_trace)


def threads(count: int) -> AbstractContextManager[None]:
    return changed(torch.get_num_threads, torch.set_num_threads, count)


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


def deterministic() -> AbstractContextManager[None]:
    read = torch.are_deterministic_algorithms_enabled
    return changed(read, torch.use_deterministic_algorithms, True)


@contextmanager
def more_threads_than_cpus() -> Iterator[None]:
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    one = {min(os.sched_getaffinity(0))}
    read, write = partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)
    with changed(read, write, one), threads(2):
        yield


@pytest.mark.parametrize(
    ("surroundings", "said"),
    [
        (traced, f"A trace function ({own_trace.__module__}.own_trace; sys.settrace)"),
        (profiled, f"A profile function ({own_trace.__module__}.own_trace; sys.setprofile)"),
        (monitored, "A tool (watcher; sys.monitoring)"),
        (noting_memory, "tracemalloc"),
        (in_a_mode, "A mode (Watching)"),
        (
            lambda: torch.autograd.detect_anomaly(check_nan=False),
            "Anomaly mode is on: each node ke",
        ),
        (deterministic, "Deterministic algorithms are on"),
        (more_threads_than_cpus, "PyTorch works with 2 threads, and this process has 1 of"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_makes_the_process_slow_has_a_line(surroundings: Any, said: str) -> None:
    before = warnings()
    with surroundings():
        found = warnings()
    (new,) = [warning for warning in found if warning.startswith(said)]
    kind = new.split("(")[0]  # coverage may trace, and a container have few CPUs, all the time
    assert [one for one in found if one != new and not one.startswith(kind)] == [
        one for one in before if not one.startswith(kind)
    ]
    assert warnings() == before


@pytest.mark.parametrize(
    ("now", "reasons", "said"),
    [
        (1_200, 0x40, "its clock is 1,200 of at most 1,980 MHz, because of its temperature, and"),
        (1_200, 0x24, "because of its power limit and its temperature, and all on it takes longer"),
        (900, 0x2, "because of a clock that was set for it"),
        (1_740, 0x4, ""),  # a healthy one at dense products
        (345, 0x1 | 0x40, ""),  # with nothing to do
        (1_200, 0, ""),
    ],
)
def test_a_gpu_whose_clock_is_held_down_has_a_line(now: int, reasons: int, said: str) -> None:
    line = low_clock(now, 1_980, reasons)
    assert said in line if said else not line


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("looks", [True, False], ids=["is a finding", "is none"])
def test_anomaly_mode_is_said_by_its_finding_or_by_a_line_and_never_by_both(looks: bool) -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(8)))
    x = torch.randn(200_000, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=looks):
        report = backspot.profile(
            lambda: model(x).sum().backward(), model, steps=3, warmup=1, unprofiled=1, trials="none"
        )
    found = any(finding.rule == "anomaly-mode" for finding in report.findings)
    line = any(warning.startswith("Anomaly mode is on") for warning in report.warnings)
    assert (found, line) == (looks, not looks)


def few_threads() -> AbstractContextManager[None]:
    return threads(1)


@contextmanager
def binding() -> Iterator[None]:
    """OpenMP binds each thread to a CPU of its own."""
    with pytest.MonkeyPatch.context() as patch, more_threads_than_cpus():
        patch.setenv("OMP_PROC_BIND", "close")
        yield


@contextmanager
def on_a_device() -> Iterator[None]:
    with few_threads(), torch.device("cpu"):
        yield


@pytest.mark.parametrize("usual", [few_threads, binding, on_a_device])
def test_what_is_usual_has_none(usual: Any) -> None:
    with usual():
        found = warnings()
    # A debugger or coverage of the tests themselves may be at work.
    assert [one for one in found if not one.startswith(("A trace function", "A tool"))] == []


@pytest.mark.parametrize(
    ("groups", "quota", "said"),
    [
        ("0::/job\n", "50000 100000", 1),
        ("0::/job\n", "150000 100000", 0),
        ("0::/job\n", "max 100000", 0),
        ("0::/job/task\n", "50000 100000", 1),
        ("0::/another\n", "50000 100000", 0),
        ("4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n", "50000 100000", 1),
        ("4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n", "-1 100000", 0),
        ("4:memory:/job\n", "50000 100000", 0),
        ("", "50000 100000", 0),
    ],
)
def test_a_quota_below_the_threads_is_said(
    groups: str, quota: str, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders such as a container has them stand for those of the system."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job/cpu.max").write_text(quota)
    (tmp_path / "cpu/job").mkdir(parents=True)  # of the first version
    for kind, number in zip(("quota", "period"), quota.split(), strict=True):
        (tmp_path / f"cpu/job/cpu.cfs_{kind}_us").write_text(number)
    (tmp_path / "cgroup").write_text(groups)
    monkeypatch.setattr(cgroups, "PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "GROUPS", tmp_path)
    monkeypatch.setenv("OMP_PROC_BIND", "close")  # only the quota counts
    with threads(2):
        found = [one for one in warnings() if one.startswith("PyTorch works with 2 threads")]
    assert len(found) == said


def test_a_thread_that_pins_batches_does_not_count_as_the_trainings_threads():
    count = torch.get_num_threads()
    try:
        pinning = threading.Thread(target=torch.set_num_threads, args=(1,))
        pinning.start()
        pinning.join()
        counts = [thread_count()]
        training = threading.Thread(target=lambda: counts.append(thread_count()))
        training.start()
        training.join()
        assert counts == [count, count]
    finally:
        torch.set_num_threads(count)
