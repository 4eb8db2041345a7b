"""First launches that take long because the kernel's code is loaded, or the device set up, first.

The driver loads code when it is first wanted and records nothing of it but a launch of
milliseconds. That is warm-up, and no steady step has it.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.timeline import distinct
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = ["find_loading"]

_LONG = 1_000_000  # nanoseconds: a launch takes a few thousand
_LAUNCH = ("cudaLaunch", "cuLaunch", "hipLaunch", "hipModuleLaunch", "hipExtLaunch")
_FULL = 512  # pieces of work: a launch waits where about a thousand are queued


def find_loading(events: Events, work: Ints, call: Ints) -> np.ndarray:
    """Whether each piece of device work was launched by a call that loaded its code.

    It is the first launch of a kernel of that name, and takes long though the queue is not full.

    Args:
        events: the trace.
        work: the event indices of the device work.
        call: for each the event index of the call that launched it, ``NOTHING`` for none.
    """
    names = events.name_mask(*_LAUNCH)
    found: np.ndarray = (call >= 0) & (events.category[work] == Category.KERNEL)
    found &= names[events.name[call]] & (events.duration[call] >= _LONG)
    slow = np.flatnonzero(found)
    if not len(slow):
        return found
    known = np.flatnonzero(call >= 0)
    launched = events.start[call[known]]
    first = np.full(len(events.names), np.iinfo(np.int64).max)
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
