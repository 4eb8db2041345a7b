"""Reading: a Kineto trace, from a file or from a live profiler, becomes columns of numbers.

Nothing here knows what a module or a backward pass is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backspot.trace.events import Category, Events, Flows

if TYPE_CHECKING:
    from backspot.trace.read import Progress, read_events

__all__ = ["Category", "Events", "Flows", "Progress", "read_events"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the names have no common type
    """The rest on demand: a process that only decodes starts without it."""
    if name not in __all__:
        raise AttributeError(f"module 'backspot.trace' has no attribute {name!r}")
    from backspot.trace import read

    return getattr(read, name)
