"""The owners of the nodes that PyTorch puts around a module for full backward hooks.

``Module.__call__`` passes the inputs, and after all forward hooks the outputs, through a function
of its own, ``BackwardHookFunction``; users' hooks run with its nodes. The inputs' comes within the
call's label. A label that forward hooks write has ended when the outputs' comes: its operator
runs directly after the call, in the code of the caller.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.spans import Spans
from backspot.analysis.timeline import NOTHING, grouped, take
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
    wraps_of = dict(grouped(events.thread, every[events.forward_thread[every] == 0]))
    operators_of = dict(grouped(events.thread, events.of(Category.OPERATOR)))
    for thread, here in grouped(events.thread[operators], mine):
        if thread in wraps_of and thread in spans.nesting:
            found[here] = _on_thread(
                events, spans, operators[here], wraps_of[thread], operators_of[thread]
            )
    return found


def _on_thread(events: Events, spans: Spans, operators: Ints, every: Ints, beside: Ints) -> Ints:
    """As ``find_wrapped``, for operators of one thread.

    Args:
        events: the trace.
        spans: its spans.
        operators: the operators in question, at least one.
        every: all operators of that name on the thread.
        beside: all operators on the thread.
    """
    indices, nesting = spans.nesting[int(events.thread[operators[0]])]
    edges, held = nesting.timeline.edges, take(indices, nesting.timeline.values)
    start = np.sort(events.start[every])
    stretch = np.searchsorted(edges, events.start[operators], side="right") - 1
    low = np.searchsorted(start, edges[stretch], side="left")
    ends = np.append(edges, np.iinfo(np.int64).max)[stretch + 1]
    odd = (np.searchsorted(start, ends, side="left") - low) % 2 == 1
    starts = np.sort(events.start[beside])
    begins = np.searchsorted(starts, edges[stretch], side="left")
    alone = np.searchsorted(starts, events.start[operators], side="left") == begins
    # What held just before the stretch, and of the spans around it the one beside the stretch.
    found = np.full(len(operators), NOTHING, np.int64)
    up = np.flatnonzero(odd & alone & (stretch > 0))
    found[up] = held[stretch[up] - 1]
    while len(up := up[found[up] >= 0]) and len(
        up := up[spans.parent[found[up]] != held[stretch[up]]]
    ):
        found[up] = spans.parent[found[up]]
    is_call = take(spans.module, found) >= 0
    return np.where(is_call, found, NOTHING)
