"""The devices that models use: which they are, what records them, and how to wait for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.profiler import ProfilerActivity, supported_activities

from backspot.live import torch_internals

__all__ = ["activities_of", "devices_of", "synchronize"]


def devices_of(models: Iterable[torch.nn.Module]) -> set[torch.device]:
    """Return the devices in use except the host: the models' and all that are initialized."""
    found = {
        tensor.device for model in models for tensor in (*model.parameters(), *model.buffers())
    }
    for activity in supported_activities() - {ProfilerActivity.CPU}:
        backend = getattr(torch, _kind(activity), None)
        if backend is not None and getattr(backend, "is_initialized", bool)():
            found.add(torch.device(_kind(activity), backend.current_device()))
    return {device for device in found if device.type not in ("cpu", "meta")}


def activities_of(models: Iterable[torch.nn.Module]) -> list[ProfilerActivity]:
    """Return what a profiler has to record to see the host and all devices in use."""
    kinds = {"cpu", *(device.type for device in devices_of(models))}
    return [activity for activity in supported_activities() if _kind(activity) in kinds]


def synchronize(models: Iterable[torch.nn.Module]) -> None:
    """Wait until all devices in use have done their work."""
    for device in devices_of(models):
        wait = getattr(getattr(torch, device.type, None), "synchronize", None)
        if device.type == "mps":
            torch.mps.synchronize()
        elif wait is not None:
            wait(device)


def _kind(activity: ProfilerActivity) -> str:
    """Return the ``torch.device.type`` of the devices that an activity records."""
    if activity.name == "PrivateUse1":
        return torch_internals.privateuse1_name()
    return str(activity.name).lower()
