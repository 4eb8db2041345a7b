"""The names of devices."""

from __future__ import annotations

from collections.abc import Callable

from backspot.live.torch_internals.lookup import find

__all__ = ["privateuse1_name"]

# The name that a backend from outside of PyTorch has given to its device. Without it: PyTorch's
# name for a device without one.
privateuse1_name: Callable[[], str] = find("_C", "_get_privateuse1_backend_name") or (
    lambda: "privateuseone"
)
