"""What a recording of a training step needs: its devices, and a profiler in its two states."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, supported_activities

from backspot.live.sessions import Watch
from backspot.live.torch_internals.devices import privateuse1_name
from backspot.live.torch_internals.profiler import PROFILER_PREPARES
from backspot.live.torch_internals.profiler import recording as is_recording

__all__ = [
    "STEPS_IN_DETAIL",
    "activities",
    "devices_of",
    "giving_way",
    "prepared",
    "recording",
    "synchronize",
]

STEPS_IN_DETAIL = 3
"""How many steps are recorded with memory: what grows from step to step shows in three."""


def _kind(activity: ProfilerActivity) -> str:
    """Return the ``torch.device.type`` of the devices that an activity records."""
    if activity.name == "PrivateUse1":
        return privateuse1_name()
    return str(activity.name).lower()


def devices_of(models: Collection[torch.nn.Module]) -> set[torch.device]:
    """Return the devices in use except the host: the models' and all that are initialized."""
    found = {tensor.device for part in models for tensor in (*part.parameters(), *part.buffers())}
    for activity in supported_activities() - {ProfilerActivity.CPU}:
        backend = getattr(torch, _kind(activity), None)
        if backend is not None and getattr(backend, "is_initialized", bool)():
            found.add(torch.device(_kind(activity), backend.current_device()))
    return {device for device in found if device.type not in ("cpu", "meta")}


def activities(models: Collection[torch.nn.Module]) -> list[ProfilerActivity]:
    """Return what the profiler can record: the host, and the devices in use."""
    kinds = {"cpu", *(device.type for device in devices_of(models))}
    return [activity for activity in supported_activities() if _kind(activity) in kinds]


def synchronize(models: Collection[torch.nn.Module]) -> None:
    """Wait for the work on all devices in use."""
    for device in devices_of(models):
        wait = getattr(getattr(torch, device.type, None), "synchronize", None)
        if device.type == "mps":
            torch.mps.synchronize()
        elif wait is not None:
            wait(device)


_LEVEL = "KINETO_LOG_LEVEL"
_ABOVE_ALL = "6"
"""Above each of Kineto's levels, of which the highest is for notes of starts and stops."""


@contextmanager
def _quiet(profiler: torch.profiler.profile) -> Iterator[None]:
    """Have Kineto not speak of a GPU that is not there, in the process's first profile.

    Kineto asks for its level only then. With a GPU, its errors are of use. ``os.environ`` and what
    child processes see stay as they are.
    """
    if _LEVEL in os.environ or set(profiler.activities) != {ProfilerActivity.CPU}:
        yield
        return
    os.putenv(_LEVEL, _ABOVE_ALL)
    try:
        yield
    finally:
        os.unsetenv(_LEVEL)


@contextmanager
def prepared(profiler: torch.profiler.profile) -> Iterator[None]:
    """Prepare the profiler; an error inside the block ends it."""
    with warnings.catch_warnings(), _quiet(profiler):
        # torch 2.8 to 2.11 warn at every profile that events of earlier cycles are gone.
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        profiler.prepare_trace()
    try:
        yield
    except BaseException:
        # A prepared profiler can only be ended by starting and stopping it.
        profiler.start_trace()
        profiler.stop_trace()
        raise


@contextmanager
def recording(profiler: torch.profiler.profile) -> Iterator[None]:
    """Record what runs inside the block with a prepared profiler."""
    try:
        profiler.start_trace()
        yield
    finally:
        if is_recording():  # unless an interrupt came before the start
            profiler.stop_trace()


@contextmanager
def giving_way(give_way: Callable[[], None]) -> Iterator[None]:
    """Call a function before another profiler prepares to record, inside the block.

    Args:
        give_way: ends the own profiler. It must not raise.
    """

    def prepare(original: Callable[[], Any]) -> Any:
        give_way()
        return original()

    watch = Watch(PROFILER_PREPARES, prepare)
    watch.begin()
    try:
        yield
    finally:
        watch.end()
