"""How long steps take without a profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from backspot.live.recording import devices_of, synchronize

__all__ = ["step_times"]


def step_times(
    take: Callable[[], Any], models: Sequence[torch.nn.Module], count: int
) -> tuple[int, ...]:
    """Run a step some times, and return how long each took, in nanoseconds.

    On one CUDA device, an event after each step marks when its work is done, so that the host may
    run ahead of the device as it does in training. Elsewhere the host waits for the devices after
    each step.

    Args:
        take: the step.
        models: the models that it trains, which tell the devices.
        count: how many steps to run.
    """
    if not count:
        return ()
    synchronize(models)
    devices = devices_of(models)
    if len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
        return _by_events(take, device, count)
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        take()
        synchronize(models)
        times.append(time.perf_counter_ns() - begin)
    return tuple(times)


def _by_events(take: Callable[[], Any], device: torch.device, count: int) -> tuple[int, ...]:
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            take()
            mark.record()
        marks[-1].synchronize()
        return tuple(round(1e6 * begin.elapsed_time(end)) for begin, end in pairwise(marks))
