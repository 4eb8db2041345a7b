"""The store of ``torch.distributed``, by which the ranks of a job found each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backspot.live.torch_internals.lookup import find

# The store itself. Without it a running job has no report of
# all its ranks.
_default_store: Callable[[], Any] | None = find(
    "distributed", "distributed_c10d", "_get_default_store"
)


def default_store() -> Any:
    """Return the store of ``torch.distributed``; ``None`` if this process is not part of a job."""
    distributed = torch.distributed
    if _default_store is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return _default_store()
