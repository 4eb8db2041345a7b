"""Which rank of a job this process is."""

from __future__ import annotations

import os
import sys
from typing import Any


def rank_and_ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
