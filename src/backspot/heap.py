"""Memory that arrays take, and give back, again and again."""

from __future__ import annotations

import numpy as np

__all__ = ["keep_freed"]

# Just below the largest block of which glibc draws that conclusion.
_LARGE = (32 << 20) - (1 << 16)


def keep_freed() -> None:
    """Have the C library keep for the next array what the last one had.

    glibc takes each large block from the system, and gives it back when it is freed, until it sees
    one of that size freed: then it keeps them. Fresh pages cost more time than most of what is done
    with them here. This one is never touched, so it takes no memory; elsewhere it does nothing.
    """
    np.empty(_LARGE, np.uint8)
