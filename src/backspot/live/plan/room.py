"""What of a step is kept: copies within the memory that is free, and samples of tensors."""

from __future__ import annotations

import enum

import torch

from backspot.live.free_memory import spaces
from backspot.live.trials.twins import Refused, free_bytes, size_of

_SAMPLE = 4096
"""How many numbers of each output are kept, to compare a copy with the model."""
FIXED = (
    *(int, float, complex, str, bytes, bool, type(None), type(...), type, range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum),
)
"""What no forward can write to."""


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return some of the numbers of a tensor, evenly chosen."""
    flat = tensor.detach().reshape(-1) if tensor.numel() <= _SAMPLE else tensor.detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE].clone().float()


def fits(tensors: list[torch.Tensor], times: float) -> bool:
    """Whether so many times these tensors take at most half of the memory that is free."""
    return not tensors or times * sum(map(size_of, tensors)) <= room_on(tensors[0].device)


def room_on(device: torch.device) -> float:
    """Return what copies may take of the memory of a device: half of what is free."""
    free = (
        [int(torch.cuda.mem_get_info(device)[0])]
        if device.type == "cuda"
        else [space.free for space in spaces()]
    )
    # Only Linux tells; elsewhere as much as a trial takes is safe.
    return min(free) / 2 if free else free_bytes(device)


def check_room(tensors: list[torch.Tensor], times: float) -> None:
    """Refuse to copy tensors so many times where that takes more than copies may."""
    if not fits(tensors, times):
        size = sum(map(size_of, tensors)) / 2**20
        raise Refused(f"copies of {size:,.0f} MiB do not fit into the memory that is free")
