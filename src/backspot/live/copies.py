"""A copy of a process that has recorded ends, where PyTorch's profiler would keep it forever.

Once the profiler has run, Kineto has a thread that sleeps on a condition variable until C++ takes
Kineto apart. A copy that ``os.fork`` makes has no such thread, and glibc waits for it there, after
Python has ended: the copy of a script that never used the profiler would not end any more. Copies
that end by ``os._exit``, as those of ``multiprocessing``, never get there.
"""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress


@functools.cache
def let_copies_end() -> None:
    """Have copies that are made from now on end without C++, once Python has ended."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_end_after_python)


def _end_after_python() -> None:
    with suppress(AttributeError, OSError):  # a C library without them
        libc = ctypes.CDLL(None)
        register, end, write = libc.on_exit, libc._exit, libc.fcloseall
        register(end, None)
        register(write, None)  # the last that is registered is called first
