"""The operators inside backward nodes: on a CPU, they show what kernels show on a GPU."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import first_started, grouped, take
from backspot.trace import Category, Events
from backspot.trace.events import Ints
from backspot.trace.names import ATEN

__all__ = ["operators_inside"]


def operators_inside(events: Events, ownership: Ownership) -> tuple[Ints, Ints]:
    """Return PyTorch's outermost operators in the backward passes.

    Args:
        events: the trace.
        ownership: its owners.

    Returns:
        Indices into the events, and the span that each operator runs in.
    """
    index = events.named(Category.OPERATOR, ATEN)
    span = ownership.spans.of(events, index)
    inside = take(ownership.passes.of_span, span) >= 0
    index, span = index[inside], span[inside]
    outermost = np.zeros(len(index), bool)
    for _, mine in grouped(events.thread[index]):
        line = first_started(events.start[index[mine]], events.end[index[mine]], mine)
        outermost[line.values[line.values >= 0]] = True
    return index[outermost], span[outermost]
