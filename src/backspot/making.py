"""Which line of the forward made each autograd node, where the trace tells."""

from __future__ import annotations

import numpy as np

from backspot.joining import Join
from backspot.spans import Spans
from backspot.timeline import NOTHING, distinct
from backspot.trace import Events
from backspot.trace.events import Ints

__all__ = ["find_lines_of_nodes"]

_OF_CPP = "CppFunction"


def find_lines_of_nodes(events: Events, spans: Spans, join: Join) -> Ints:
    """For each span the index of its line in ``events.lines``, ``NOTHING`` for none.

    Only a node whose thread and number both stand in the table has a line: the nearest number below
    is often another line's. Where the table also names the kind of node, that has to agree.
    """
    table = events.lines
    line = np.full(len(spans.start), NOTHING, np.int64)
    if not table.lines:
        return line
    for index in distinct(join.builder[join.builder >= 0]):
        _, thread = events.threads[index]
        if isinstance(thread, int):
            mine = np.flatnonzero((join.builder == index) & (join.sequence >= 0) & spans.is_node)
            line[mine] = table.at(thread, join.sequence[mine])
    told = np.flatnonzero(line >= 0)
    # Python knows scripted graphs and C++ functions by one class.
    names = [
        (name.rpartition("::")[2], _OF_CPP if "::" in name else "") for name in spans.node_names
    ]
    for span, node, place in zip(
        told.tolist(), spans.node[told].tolist(), line[told].tolist(), strict=True
    ):
        if table.lines[place].node not in ("", *names[node]):
            line[span] = NOTHING
    return line
