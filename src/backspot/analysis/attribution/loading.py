"""First launches that take long because the driver loads the kernel's code.

The driver loads code when a kernel is first launched, and records nothing of it but a launch that
takes milliseconds. This is warm-up; a steady step has none of it.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.timeline import FAR, distinct
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

__all__ = ["find_loading"]

_LONG = 1_000_000  # nanoseconds: a launch takes a few thousand
_FULL = 512  # pieces of work: a launch blocks when about a thousand are queued


def find_loading(events: Events, work: Ints, call: Ints) -> Mask:
    """For each piece of device work, whether the call that launched it also loaded its code.

    Such a call is the first launch of a kernel of that name, and takes long although the queue is
    not full.

    Args:
        events: the trace.
        work: the event indices of the device work.
        call: for each the event index of the call that launched it, ``NOTHING`` for none.
    """
    launches = events.name_mask(*names.KERNEL_LAUNCHES)
    found: Mask = (call >= 0) & (events.category[work] == Category.KERNEL)
    found &= launches[events.name[call]] & (events.duration[call] >= _LONG)
    slow = np.flatnonzero(found)
    if not len(slow):
        return found
    known = np.flatnonzero(call >= 0)
    launched = events.start[call[known]]
    first = np.full(len(events.names), FAR)
    np.minimum.at(first, events.name[work[known]], launched)
    since = events.start[call[slow]]
    queued = np.zeros(len(slow), np.int64)
    device = events.device[work]
    for number in distinct(device[slow]):
        mine, here = device[known] == number, device[slow] == number
        before = np.searchsorted(np.sort(launched[mine]), since[here], side="left")
        ended = np.sort(events.end[work[known[mine]]])
        queued[here] = before - np.searchsorted(ended, since[here], side="right")
    found[slow] = (first[events.name[work[slow]]] == since) & (queued < _FULL)
    return found
