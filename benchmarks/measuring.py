"""What the benchmarks measure with: the machine, the clock, the profiler."""

from __future__ import annotations

import functools
import inspect
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "timm", "torchvision", "transformers", "numpy", "msgspec", "orjson")


# The machine -------------------------------------------------------------------------------------


@functools.cache
def machine(device: str = "cpu") -> dict[str, Any]:
    """Return hardware and versions, as every result states them.

    Torch is imported only where ``device`` is a GPU, and no CUDA context is made.
    """
    described: dict[str, Any] = {"python": platform.python_version(), "processor": _processor()}
    described |= {"cpus": os.cpu_count(), "cpus_used": usable_cores()}
    described["memory_gb"] = round(memory_bytes() / 1e9)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            described[name] = version(name)
    described |= {"date": time.strftime("%Y-%m-%d"), "device": "cpu"}
    if device.startswith("cuda"):
        import torch

        name, driver = _gpu()
        described |= {"device": name, "driver": driver, "gpus": torch.cuda.device_count()}
        described |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return described


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> tuple[str, str]:
    """Name and driver of the first GPU."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    said = ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        said = done.stdout.strip()
    name, _, driver = said.partition(",")
    return name.strip() or "cuda", driver.strip()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory that there is, within the control group's limit too."""
    return min(_of_system("MemTotal"), _of_group("memory.max"))


def available_bytes() -> int:
    """Return the memory that is free, within the control group's limit too."""
    left = _of_group("memory.max") - _of_group("memory.current", otherwise=0)
    return min(_of_system("MemAvailable"), left)


_NO_LIMIT = 1 << 62


def _of_system(name: str) -> int:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _of_group(name: str, otherwise: int = _NO_LIMIT) -> int:
    with suppress(OSError, ValueError):  # "max" is no limit
        return int(Path("/sys/fs/cgroup", name).read_text(encoding="utf-8"))
    return otherwise


# Timing ------------------------------------------------------------------------------------------


class Budget:
    """A time limit that the code asks for; nothing enforces it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())


def synchronize(device: str) -> None:
    """Wait until the GPU has finished, where there is one."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles (``low``, ``high``) and count."""
    ordered = sorted(values)
    if len(ordered) < 2:
        value = ordered[0] if ordered else float("nan")
        return {"median": value, "low": value, "high": value, "n": len(ordered)}
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return {"median": statistics.median(ordered), "low": low, "high": high, "n": len(ordered)}


def milliseconds(
    step: Callable[[], object],
    device: str,
    count: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return what a step takes, from several in a row between two synchronisations."""
    synchronize(device)
    begin = clock()
    for _ in range(count):
        step()
    synchronize(device)
    return (clock() - begin) * 1e3 / count


def interleaved(
    steps: Sequence[Callable[[], None]],
    device: str,
    *,
    rounds: int,
    inner: int = 3,
    warmup: int = 3,
    seconds: float = 60.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Return milliseconds a step of each of ``steps``, measured in turn (A B B A A B).

    Each measurement is the mean of ``inner`` steps in a row. On a GPU that is the time between two
    events, of which the first comes after other steps: so the host is ahead from the beginning, as
    it is in training, where what it does before the first kernel can cost nothing.
    """
    for step in steps:
        for _ in range(warmup):
            step()
    times: list[list[float]] = [[] for _ in steps]
    budget = Budget(seconds)
    for number in range(rounds):
        order = range(len(steps)) if number % 2 == 0 else range(len(steps) - 1, -1, -1)
        for index in order:
            steps[index]()  # the first after a change pays for what the other left in caches
            if device == "cpu":
                times[index].append(milliseconds(steps[index], device, inner, clock))
            else:
                steps[index]()  # the host is not ahead of the first one
                times[index].append(_between_events(steps[index], inner))
        if budget.left <= 0 and number >= 2:
            break
    return times


def _between_events(step: Callable[[], object], count: int) -> float:
    """Return what a step takes on the GPU, from several in a row after those that still run."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


# A process whose parent is gone ends itself, so that a run that is killed leaves none behind.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy(count: int | None) -> Iterator[None]:
    """Keep ``count`` cores busy with a process each."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count or 0)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


# Profiling ---------------------------------------------------------------------------------------


def profile_default(argument: str) -> int:
    """Return the default of an argument of ``backspot.profile``: what a user gets."""
    import backspot

    default: int = inspect.signature(backspot.profile).parameters[argument].default
    return default


@contextmanager
def profiling(device: str, **options: Any) -> Iterator[Any]:
    """Profile host and device; the profiler ends when the device has finished."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, **options) as prof:
        yield prof
        synchronize(device)


def record_trace(
    step: Callable[[], object],
    device: str,
    path: Path,
    *,
    steps: int,
    warmup: int,
    settled: int = 0,
    **options: Any,
) -> None:
    """Profile ``steps`` steps after ``warmup`` steps and export the trace to ``path``.

    The host waits for the device after each of the first ``settled`` steps: a step that it does
    not wait for leaves work on the device whose launch is not in the next step's trace.
    """
    from torch.profiler import schedule

    with profiling(
        device,
        schedule=schedule(wait=0, warmup=warmup, active=steps, repeat=1),
        on_trace_ready=lambda prof: prof.export_chrome_trace(str(path)),
        **options,
    ) as prof:
        for number in range(warmup + steps):
            step()
            if number < settled:
                synchronize(device)
            prof.step()
