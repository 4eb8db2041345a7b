"""The owners of the nodes that PyTorch puts around a module for full backward hooks.

``Module.__call__`` passes the inputs, and after all forward hooks the outputs, through a function
of its own, ``BackwardHookFunction``; users' hooks run with its nodes. The inputs' comes within the
call's label. A label that forward hooks write has ended when the outputs' comes: its operator
runs directly after the call, in the code of the caller.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.spans import Spans
from backspot.analysis.timeline import NOTHING, distinct
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = ["find_wrapped"]

_WRAPS = "BackwardHookFunction"


def find_wrapped(events: Events, spans: Spans, operators: Ints) -> Ints:
    """For each of these operators the module call of which it takes the outputs, else ``NOTHING``.

    A module without a label, called next, has two: of its inputs, which may come directly after the
    call too, and of its outputs. So an odd number of them before the next call begins with the
    call's.

    Args:
        events: the trace.
        spans: its spans.
        operators: event indices.
    """
    found = np.full(len(operators), NOTHING, np.int64)
    wraps = np.array([name == _WRAPS for name in events.names], bool)
    mine = np.flatnonzero(wraps[events.name[operators]])
    if not len(mine):
        return found
    every = events.chosen(wraps, Category.OPERATOR)
    every = every[events.forward_thread[every] == 0]
    for thread in distinct(events.thread[every]):
        here = mine[events.thread[operators[mine]] == thread]
        if thread in spans.nesting:
            among = every[events.thread[every] == thread]
            found[here] = _on_thread(events, spans, thread, operators[here], among)
    return found


def _on_thread(events: Events, spans: Spans, thread: int, operators: Ints, every: Ints) -> Ints:
    indices, nesting = spans.nesting[thread]
    edges, held = nesting.timeline.edges, np.append(indices, NOTHING)[nesting.timeline.values]
    start = np.sort(events.start[every])
    stretch = np.searchsorted(edges, events.start[operators], side="right") - 1
    low = np.searchsorted(start, edges[stretch], side="left")
    ends = np.append(edges, np.iinfo(np.int64).max)[stretch + 1]
    odd = (np.searchsorted(start, ends, side="left") - low) % 2 == 1
    beside = events.of(Category.OPERATOR)
    beside = np.sort(events.start[beside[events.thread[beside] == thread]])
    begins = np.searchsorted(beside, edges[stretch], side="left")
    alone = np.searchsorted(beside, events.start[operators], side="left") == begins
    # What held just before the stretch, and of the spans around it the one beside the stretch.
    found = np.full(len(operators), NOTHING, np.int64)
    up = np.flatnonzero(odd & alone & (stretch > 0))
    found[up] = held[stretch[up] - 1]
    while len(up := up[found[up] >= 0]) and len(
        up := up[spans.parent[found[up]] != held[stretch[up]]]
    ):
        found[up] = spans.parent[found[up]]
    is_call = (found >= 0) & (np.append(spans.module, NOTHING)[found] >= 0)
    return np.where(is_call, found, NOTHING)
