"""Which line of the forward made each autograd node, where the trace tells."""

from __future__ import annotations

import numpy as np

from backspot.joining import Join
from backspot.spans import Spans
from backspot.timeline import NOTHING, grouped
from backspot.trace import Events
from backspot.trace.events import Ints

__all__ = ["find_lines_of_nodes"]


def find_lines_of_nodes(events: Events, spans: Spans, join: Join) -> Ints:
    """For each span the index of its line in ``events.lines``, ``NOTHING`` for none.

    Only a node whose thread and number both stand in the table has a line: the nearest number below
    is often another line's. Where the table also names the kind of node, that has to agree.
    """
    table = events.lines
    line = np.full(len(spans.start), NOTHING, np.int64)
    if not table.lines:
        return line
    numbered = np.flatnonzero((join.builder >= 0) & (join.sequence >= 0) & spans.is_node)
    for index, mine in grouped(join.builder[numbered]):
        _, thread = events.threads[index]
        if isinstance(thread, int):
            mine = numbered[mine]
            line[mine] = table.at(thread, join.sequence[mine])
    told = np.flatnonzero(line >= 0)
    names = [name.rpartition("::")[2] for name in spans.node_names]
    for span, node, place in zip(
        told.tolist(), spans.node[told].tolist(), line[told].tolist(), strict=True
    ):
        if table.lines[place].node not in ("", names[node]):
            line[span] = NOTHING
    return line
