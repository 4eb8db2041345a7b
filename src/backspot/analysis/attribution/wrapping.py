"""The owners of the nodes that PyTorch adds around a module with full backward hooks.

``Module.__call__`` passes the inputs, and after all forward hooks the outputs, through a function
of its own, ``BackwardHookFunction``, and users' hooks run with the nodes of that function. The
function is called for the inputs within the call's label. If forward hooks write the label, the
label has ended when the function is called for the outputs: that operator runs directly after the
call, in the code of the caller.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.spans import Spans
from backspot.analysis.timeline import FAR, NOTHING, grouped, take
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints


def find_wrapped(events: Events, spans: Spans, operators: Ints) -> Ints:
    """Find for each of these operators the module call that it takes the outputs of.

    A module without a label that is called next has two such operators: one of its inputs, which
    may come directly after the labelled call, too, and one of its outputs. So if their number
    before the next call is odd, the first is that of the labelled call.

    Args:
        operators: event indices.

    Returns:
        The spans of the calls, ``NOTHING`` for none.
    """
    calls = np.full(len(operators), NOTHING, np.int64)
    wraps = events.names_where(lambda name: name == names.BACKWARD_HOOK_FUNCTION)
    wrapping = np.flatnonzero(wraps[events.name[operators]])
    if not len(wrapping):
        return calls
    wrappers = events.chosen(wraps, Category.OPERATOR)
    wraps_of = dict(grouped(events.thread, wrappers[events.forward_thread[wrappers] == 0]))
    operators_of = dict(grouped(events.thread, events.of(Category.OPERATOR)))
    for thread, members in grouped(events.thread[operators], wrapping):
        if thread in wraps_of and thread in spans.nesting:
            calls[members] = _on_thread(
                events, spans, thread, operators[members], wraps_of[thread], operators_of[thread]
            )
    return calls


def _on_thread(
    events: Events, spans: Spans, thread: int, operators: Ints, wrappers: Ints, beside: Ints
) -> Ints:
    """As ``find_wrapped``, for operators of one thread.

    Args:
        wrappers: all operators of the same name on the thread.
    """
    indices, nesting = spans.nesting[thread]
    edges, span_in = nesting.timeline.edges, take(indices, nesting.timeline.values)
    start = np.sort(events.start[wrappers])
    # Between two edges of the timeline lies one interval; each operator lies in one.
    interval = np.searchsorted(edges, events.start[operators], side="right") - 1
    low = np.searchsorted(start, edges[interval], side="left")
    ends = np.append(edges, FAR)[interval + 1]
    odd = (np.searchsorted(start, ends, side="left") - low) % 2 == 1
    starts = np.sort(events.start[beside])
    begins = np.searchsorted(starts, edges[interval], side="left")
    is_first = np.searchsorted(starts, events.start[operators], side="left") == begins
    # Of the span that ended before the interval, and those around it, the one beside the interval.
    outer_spans = np.full(len(operators), NOTHING, np.int64)
    up = np.flatnonzero(odd & is_first & (interval > 0))
    outer_spans[up] = span_in[interval[up] - 1]
    while len(up := up[outer_spans[up] >= 0]) and len(
        up := up[spans.parent[outer_spans[up]] != span_in[interval[up]]]
    ):
        outer_spans[up] = spans.parent[outer_spans[up]]
    is_call = take(spans.module, outer_spans) >= 0
    return np.where(is_call, outer_spans, NOTHING)
