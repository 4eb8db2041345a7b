"""Recomputation: forward code that activation checkpointing runs again inside a node.

Modules that run again have their labels. The checkpointed function's own code around the modules
has no label, and would count as the work of the node that first needed a tensor. This code is
recognised by its operators: they number autograd nodes, as operators of a forward do and operators
of a backward do not. So do those of a program's own Function that differentiates in its backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from backspot.analysis.attribution.passes import separators, top_nodes
from backspot.analysis.attribution.spans import Spans, nest
from backspot.analysis.timeline import NOTHING, grouped, is_in, merged, take
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

NO_CALLER = -2
"""The caller of code that was checkpointed outside of every module."""
_END = -3
"""In place of a call: no piece of code comes after it."""

_NEIGHBOURS = 8


def find_recomputation(events: Events, spans: Spans) -> Spans:
    """Add a span for each interval of code that runs again, around modules or without any."""
    operators, node = _operators(events, spans)
    has_number = _numbered(events, operators)
    if not has_number.any():
        return spans
    recomputing = _recomputing(events, spans, node, has_number)
    recomputing = recomputing[~_differentiates_itself(spans, recomputing)]
    recomputes = has_number & is_in(node, recomputing)
    if not recomputes.any():
        return spans
    start, end = events.start[operators[recomputes]], events.end[operators[recomputes]]
    pieces: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for at, (begin, finish) in zip(
        node[recomputes].tolist(), zip(start.tolist(), end.tolist(), strict=True), strict=True
    ):
        pieces[at].append((begin, finish, NOTHING))
    for span in np.flatnonzero(is_in(spans.parent, recomputing)).tolist():
        pieces[int(spans.parent[span])].append((int(spans.start[span]), int(spans.end[span]), span))
    calls_of = _CallsOf(spans)
    again = [
        (begin, finish, int(spans.thread[span]), _caller(spans, span, calls, calls_of))
        for span, intervals in pieces.items()
        for begin, finish, calls in _intervals(spans, sorted(intervals))
    ]
    added = np.array(again, np.int64).reshape(-1, 4)
    if not len(added):
        return spans
    nothing = np.full(len(added), NOTHING, np.int64)
    begin = np.concatenate([spans.start, added[:, 0]])
    finish = np.concatenate([spans.end, added[:, 1]])
    thread = np.concatenate([spans.thread, added[:, 2]])
    parent, nesting = nest(begin, finish, thread)
    return replace(
        spans,
        start=begin,
        end=finish,
        thread=thread,
        module=np.concatenate([spans.module, nothing]),
        node=np.concatenate([spans.node, nothing]),
        marked=np.concatenate([spans.marked, nothing]),
        caller=np.concatenate([spans.caller, added[:, 3]]),
        parent=parent,
        nesting=nesting,
    )


def _numbered(events: Events, operators: Ints) -> Mask:
    """Whether autograd numbers each of these operators as in a forward."""
    is_numbered: Mask = (events.sequence[operators] >= 0) & (events.forward_thread[operators] == 0)
    return is_numbered


def _operators(events: Events, spans: Spans) -> tuple[Ints, Ints]:
    """Find the operators directly in a node, not in another operator, and the node's span.

    If none of them is numbered, as in most traces, nothing is returned.
    """
    plain = ~events.is_label & ~events.prefix_mask(names.EVALUATE_FUNCTION)
    operators = events.chosen(plain, Category.OPERATOR)
    operators = operators[events.forward_thread[operators] <= 0]
    around = spans.of(events, operators)
    # The event of the node itself; AccumulateGrad's has no thread of its forward.
    named = {name: index for index, name in enumerate(spans.node_names)}
    node_of_name = np.array([named.get(name, NOTHING - 1) for name in events.names], np.int64)
    itself = take(spans.node, around) == node_of_name[events.name[operators]]
    operators = operators[take(spans.is_node, around, False) & ~itself]
    directly: list[Ints] = []
    nodes: list[Ints] = []
    if not _numbered(events, operators).any():
        operators = operators[:0]
    for _, members in grouped(events.thread, operators):
        members = members[np.lexsort((-events.end[members], events.start[members]))]
        before = np.concatenate([[-1], np.maximum.accumulate(events.end[members])[:-1]])
        members = members[events.start[members] >= before]
        directly.append(members)
        nodes.append(spans.of(events, members))
    empty = np.empty(0, np.int64)
    return np.concatenate([empty, *directly]), np.concatenate([empty, *nodes])


def _recomputing(events: Events, spans: Spans, node: Ints, has_number: Mask) -> Ints:
    """Find the nodes with numbered operators if their neighbours in the pass have none.

    With ``create_graph=True`` the operators of every node are numbered, and recomputation cannot be
    recognised. But the numbered operators of a reentrant checkpoint always run again, because the
    pass that it starts never creates a graph.
    """
    nodes = merged(node)
    does = is_in(nodes, node[has_number])
    is_checkpoint = np.array([names.CHECKPOINT_FUNCTION in name for name in spans.node_names], bool)
    within = take(is_checkpoint, spans.node, False)
    rare = does & (within[nodes] | take(within, spans.parent[nodes], False))
    between = separators(events, spans, top_nodes(spans) >= 0)
    # What starts or ends a pass runs on the threads of the forward.
    times = [between[thread] for thread in spans.nesting if thread in between]
    starts = np.sort(np.concatenate([np.empty(0, np.int64), *times]))
    # A pass within a node counts apart: it may create a graph when the outer pass does not.
    order = np.lexsort((spans.start[nodes], spans.parent[nodes], spans.thread[nodes]))
    place, ordered_nodes = np.arange(len(order)), nodes[order]
    run = np.searchsorted(starts, spans.start[ordered_nodes])
    begins = np.ones(len(ordered_nodes), bool)
    begins[1:] = False
    for column in (spans.thread[ordered_nodes], spans.parent[ordered_nodes], run):
        begins[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(ordered_nodes))
    group = np.cumsum(begins) - 1
    low = np.maximum(place - _NEIGHBOURS, first[group])
    high = np.minimum(place + _NEIGHBOURS + 1, last[group])
    summed = np.concatenate([[0], np.cumsum(does[order])])
    around = summed[high] - summed[low]
    rare[order] |= does[order] & (2 * around <= high - low)
    recomputing: Ints = nodes[rare]
    return recomputing


def _differentiates_itself(spans: Spans, node: Ints) -> Mask:
    """Whether each node is a program's own Function whose backward calls no module.

    It computes its gradient by a forward of its own and autograd, as those of GPyTorch do, so that
    nodes run within it. That is its backward, and nothing that a checkpoint runs again. A Function
    at the end of what is checkpointed runs that again, and no node; one within a checkpointed
    module has that module's calls inside.
    """
    own = np.array(list(map(names.is_custom_function, spans.node_names)), bool)
    calls = merged(spans.parent[spans.module >= 0])
    passes = merged(spans.parent[spans.is_node])
    differentiates: Mask = (
        take(own, spans.node[node], False) & ~is_in(node, calls) & is_in(node, passes)
    )
    return differentiates


def _intervals(
    spans: Spans, pieces: list[tuple[int, int, int]]
) -> list[tuple[int, int, list[int]]]:
    """Join operators and module calls between nodes into intervals: begin, end, and the calls."""
    result: list[tuple[int, int, list[int]]] = []
    run: list[tuple[int, int, int]] = []
    for piece in [*pieces, (0, 0, _END)]:
        if piece[2] == _END or (piece[2] >= 0 and spans.node[piece[2]] >= 0):
            if any(span == NOTHING for _, _, span in run):
                calls = [span for _, _, span in run if span >= 0]
                result.append((run[0][0], max(finish for _, finish, _ in run), calls))
            run = []
        else:
            run.append(piece)
    return result


class _CallsOf:
    """The calls of each module by their start."""

    def __init__(self, spans: Spans) -> None:
        index = np.arange(len(spans.start))
        self._order = np.lexsort((-index, spans.start, spans.module))
        self._module = spans.module[self._order]
        self._start = spans.start[self._order]

    def before(self, module: int, time: int) -> Iterator[int]:
        """Return the calls of a module that start before a time, the last one first."""
        low, high = np.searchsorted(self._module, (module, module + 1)).tolist()
        high = low + int(np.searchsorted(self._start[low:high], time))
        return map(int, reversed(self._order[low:high]))


def _caller(spans: Spans, node: int, calls: list[int], calls_of: _CallsOf) -> int:
    """Find the call that checkpointed the function, by the modules that the function calls.

    In the forward these modules ran directly in that call.

    Returns:
        The call; ``NO_CALLER`` if no call was around the function; ``NOTHING`` if the owner of the
        node decides. It does for a function without modules, which is its own code, and for a
        reentrant checkpoint, which has a node of its own that the caller made.
    """
    if names.CHECKPOINT_FUNCTION in spans.node_names[spans.node[node]]:
        return NOTHING
    for call in calls:
        for first in calls_of.before(int(spans.module[call]), int(spans.start[node])):
            around = int(spans.parent[first])
            if around < 0:
                return NO_CALLER
            if spans.module[around] >= 0:
                return around
    return NOTHING
