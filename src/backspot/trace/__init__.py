"""Reading: a Kineto trace, from a file or from a live profiler, becomes columns of numbers.

Nothing here knows what a module or a backward pass is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backspot.trace.events import Category, Events, Flows
    from backspot.trace.read import Progress, read_events

__all__ = ["Category", "Events", "Flows", "Progress", "read_events"]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: renderers only want PyTorch's names, without NumPy."""
    if name not in __all__:
        raise AttributeError(f"module 'backspot.trace' has no attribute {name!r}")
    home = "read" if name in ("Progress", "read_events") else "events"
    return getattr(import_module(f"backspot.trace.{home}"), name)
