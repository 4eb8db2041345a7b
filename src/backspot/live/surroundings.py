"""What makes a process slow beside its training: debuggers, checks, settings, a share of a machine.

Each has a sentence. What is usual has none, nor what cannot be known from within the process.
"""

from __future__ import annotations

import math
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from backspot.formatting import counted, gigabytes
from backspot.interrupts import contained
from backspot.live.cgroups import groups_of
from backspot.live.ranks import in_process_group
from backspot.live.torch_internals.process import dispatch_mode_stack
from backspot.threads import thread_count

_CONTEXT = 4 << 30
"""Bytes of a GPU that CUDA and libraries may take in one process, beside PyTorch's allocator."""
_BINDING = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
"""With these, each thread has CPUs of its own."""
_CPU_FILES = "cpu.cfs_quota_us", "cpu.cfs_period_us"
"""The part of the CPUs' time that a group of the first version may take, and in which time."""
_LOW = 0.8
"""Share of a GPU's highest clock below which it is worth a remark: dense products in half precision
take the clock of a healthy one down by some percent, as they need all the power it may have."""
_IDLE, _POWER_LIMIT = 0x1, 0x4
_LOW_CLOCK = {
    "a clock that was set for it": 0x2,
    "its power limit": _POWER_LIMIT | 0x80,
    "its temperature": 0x20 | 0x40,
    "what its board reports": 0x8,
}
"""Bits of NVML's ``nvmlClocksEventReasons``."""
_REMEDY = "Times have it in them; run without it for true ones."


def slowed_by() -> Mapping[str, str]:
    """Return what slows down this thread, or is slow in this process, each in one sentence.

    Beside each stands the rule whose finding says it better, or ``""``. It reads settings alone,
    and takes some milliseconds at most.
    """
    sentences: dict[str, str] = {}
    for look, rule in _LOOKS:
        with contained():  # a remark is never worth a training
            sentences.update(dict.fromkeys(look(), rule))
    return sentences


def _traced() -> Iterator[str]:
    if (trace := sys.gettrace()) is not None:
        yield (
            f"A trace function ({_name_of(trace)}; sys.settrace) runs for each line of Python: a "
            f"debugger, or coverage. {_REMEDY}"
        )
    if (profile := sys.getprofile()) is not None:
        yield (
            f"A profile function ({_name_of(profile)}; sys.setprofile) runs for each call of "
            f"Python. {_REMEDY}"
        )
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    for number, tool in enumerate(tools):
        if tool and monitoring.get_events(number):
            yield f"A tool ({tool}; sys.monitoring) watches what Python runs. {_REMEDY}"
    if tracemalloc.is_tracing():
        yield f"tracemalloc notes each piece of memory that Python takes. {_REMEDY}"
    if names := [type(mode).__name__ for mode in dispatch_mode_stack()]:
        yield f"A mode ({', '.join(names)}) handles each operator in Python. {_REMEDY}"
    if "NSYS_PROFILING_SESSION_ID" in os.environ:
        yield f"Nsight Systems records this process, too. {_REMEDY}"


def _in_anomaly_mode() -> Iterator[str]:
    if torch.is_anomaly_enabled():
        looks = ""
        if torch.is_anomaly_check_nan_enabled():
            looks = " and looks for NaN, so the host waits for the device"
        yield f"Anomaly mode is on: each node keeps the stack of its forward{looks}. {_REMEDY}"


def _checked() -> Iterator[str]:
    if torch.are_deterministic_algorithms_enabled():
        yield (
            "Deterministic algorithms are on (torch.use_deterministic_algorithms): some operators "
            "use slower kernels, and new memory is filled."
        )
    if in_process_group():
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            yield (
                "TORCH_DISTRIBUTED_DEBUG=DETAIL compares each collective call of the ranks before "
                "it runs: times have it in them."
            )
        if (level := os.environ.get("NCCL_DEBUG", "").upper()) in ("INFO", "TRACE"):
            yield f"NCCL_DEBUG={level} writes a log while the ranks communicate."


def _on_gpus() -> Iterator[str]:
    if not torch.cuda.is_initialized():
        return
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield (
            "CUDA_LAUNCH_BLOCKING is set: each launch waits until its kernel has ended, so that "
            f"host and GPU never work at the same time. {_REMEDY}"
        )
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:  # whatever it is
        yield (
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: each tensor asks CUDA for memory, and frees it "
            "with a wait for the GPU."
        )
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    if getattr(device, "is_integrated", False) or in_process_group():
        return  # its memory is the host's; or communication has buffers in it
    with suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        if others > _CONTEXT:
            yield (
                f"Of the memory of GPU {torch.cuda.current_device()}, "
                f"{gigabytes(others, total)} are neither free nor PyTorch's: other processes may "
                "use it, and times vary with what they do."
            )


def _with_slow_clock() -> Iterator[str]:
    """Say why the current GPU's clock is low, by NVML; nothing where its package is missing."""
    if not torch.cuda.is_initialized() or torch.version.hip:
        return
    try:
        import pynvml as nvml
    except ImportError:
        return
    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # from PyTorch 2.5 on
    if uuid is None:
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
        now = nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)
        most = nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM)
        if not _has_lower_limit(nvml, device):
            reasons &= ~_POWER_LIMIT  # small cards work at theirs all the time
    except nvml.NVMLError:  # a part of a GPU, or a driver that does not say it
        return
    finally:
        nvml.nvmlShutdown()
    if said := low_clock(now, most, reasons):
        yield f"GPU {index}: {said}"


def _has_lower_limit(nvml: Any, device: Any) -> bool:
    """Whether somebody has set a lower power limit than the GPU's own."""
    with suppress(nvml.NVMLError):  # cards for notebooks have none
        enforced: int = nvml.nvmlDeviceGetEnforcedPowerLimit(device)
        usual: int = nvml.nvmlDeviceGetPowerManagementDefaultLimit(device)
        return enforced < usual
    return False


def low_clock(now: int, most: int, reasons: int) -> str:
    """Return a sentence about a GPU whose clock is held down; ``""`` of a healthy or an idle one.

    Args:
        now: its clock, in MHz.
        most: its highest one.
        reasons: NVML's ``nvmlClocksEventReasons``.
    """
    why = [reason for reason, bits in _LOW_CLOCK.items() if reasons & bits]
    if not why or reasons & _IDLE or now >= _LOW * most:
        return ""
    return (
        f"its clock is {now:,} of at most {most:,} MHz, because of {' and '.join(why)}, and all "
        "on it takes longer. nvidia-smi -q -d PERFORMANCE shows it."
    )


def _with_few_cpus() -> Iterator[str]:
    threads, cpus = thread_count(), cpus_of_process()
    usable = max(1, math.ceil(cpus))
    if cpus and threads > usable:
        yield (
            f"PyTorch works with {counted(threads, 'thread')}, and this process has "
            f"{cpus:.3g} of {counted(os.cpu_count() or 1, 'CPU')}: on a CPU, threads wait for each "
            f"other. OMP_NUM_THREADS={usable} is likely faster."
        )


_LOOKS: tuple[tuple[Callable[[], Iterator[str]], str], ...] = (
    (_traced, ""),
    (_in_anomaly_mode, "anomaly-mode"),
    (_checked, ""),
    (_on_gpus, ""),
    (_with_slow_clock, ""),
    (_with_few_cpus, ""),
)


def _name_of(function: Any) -> str:
    """Return where a function is from: its module and its name."""
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None) or ""
    return f"{module}.{named.__qualname__}".lstrip(".")


def cpus_of_process() -> float:
    """Return how many CPUs this process may use at a time; 0 where that is not known.

    A set of them, or a part of their time, as containers and job schedulers give it.
    """
    limits: list[float] = []
    if hasattr(os, "sched_getaffinity") and _BINDING.isdisjoint(os.environ):
        limits.append(len(os.sched_getaffinity(0)))
    for group in groups_of("cpu"):
        with suppress(OSError, ValueError):  # "max"; the outermost group has no such file
            if group.version == 1:
                quota, period = ((group.folder / file).read_text("utf-8") for file in _CPU_FILES)
            else:
                quota, period = (group.folder / "cpu.max").read_text("utf-8").split()
            if int(quota) > 0:  # -1 of the first version is no limit
                limits.append(int(quota) / int(period))
    return min(limits, default=0.0)
