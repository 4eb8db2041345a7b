"""Which rank of a job this process is."""

from __future__ import annotations

import os

import torch


def in_process_group() -> bool:
    """Return whether this process communicates with others by ``torch.distributed``."""
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def rank_and_ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    if in_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
