"""Operations in which several ranks take part: how long these wait, and that none runs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from backspot.live.torch_internals.lookup import find

# The process groups of this process. Without it nobody knows how long ranks wait for each other.
_world: Any = find("distributed", "distributed_c10d", "_world")


def shortest_timeout() -> float | None:
    """Return for how many seconds other ranks wait for this one; ``None`` if that is not known."""
    timeouts = []
    for group in list(getattr(_world, "pg_map", ())):
        for device in getattr(group, "_device_types", ()):
            with suppress(AttributeError, RuntimeError):  # backends have options of their own
                timeouts.append(group._get_backend(device).options._timeout.total_seconds())
    return min(timeouts, default=None)


class NoCollectives(TorchDispatchMode):  # type: ignore[misc] # untyped
    """Raises an error in place of what other ranks would have to take part in, while entered."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, unless ranks take part in it."""
        namespace = getattr(func, "namespace", "")
        if "c10d" in namespace or namespace == "symm_mem":
            raise self._error
        return func(*args, **(kwargs or {}))
