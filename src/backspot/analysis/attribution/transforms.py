"""Whether a trace's nodes were made under ``torch.func``, where no labels are written.

Each transform handles an operator and calls it again for what lies below it. So under ``grad``,
``vmap`` and their like an operator contains itself, twice and more.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.join import Join
from backspot.analysis.timeline import NOTHING, distinct, innermost
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = ["are_transformed"]

_LEAST = 0.25
"""Of the nodes: a transform also makes some in operators that it puts in another's place."""


def are_transformed(events: Events, join: Join, nodes: Ints) -> bool:
    """Whether these nodes were made under a transform, as far as their operators tell.

    Args:
        events: the trace.
        join: which operators made the nodes.
        nodes: spans.
    """
    operator = join.operator[nodes]
    operator = operator[operator >= 0]
    if not len(operator):
        return False
    within = np.zeros(len(events.start), bool)
    index = events.of(Category.OPERATOR)
    for thread in distinct(events.thread[operator]):
        mine = index[events.thread[index] == thread]
        parent = innermost(events.start[mine], events.end[mine]).parent
        name = np.append(events.name[mine], NOTHING)
        outer = np.append(parent, NOTHING)[parent]
        third = np.flatnonzero((name[:-1] == name[parent]) & (name[:-1] == name[outer]))
        for chain in (third, parent[third], outer[third]):
            within[mine[chain]] = True
    return bool(within[operator].sum() >= _LEAST * len(nodes))
