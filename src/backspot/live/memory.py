"""Records what is in memory, in the steps that are recorded in detail."""

from __future__ import annotations

from backspot.checks import check_flag
from backspot.live.acts import Act


class Remembering(Act):
    """Has the profiler record each block of memory that comes and goes."""

    records = ("profile_memory",)


def remembering_of(memory: object) -> Act | None:
    """Return what ``profile`` is asked to record of the memory.

    Raises:
        UsageError: If it is neither true nor false.
    """
    check_flag("memory", memory)
    return Remembering() if memory else None
