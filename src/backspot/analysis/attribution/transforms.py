"""Whether a trace's nodes were made under ``torch.func``, where no labels are written.

Each transform handles an operator and calls it again for what lies below it. So under ``grad``,
``vmap`` and their like an operator contains itself, twice and more.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.join import Join
from backspot.analysis.timeline import grouped, innermost, take
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
    asked = np.zeros(len(events.threads), bool)
    asked[events.thread[operator]] = True
    for _, mine in grouped(events.thread, index[asked[events.thread[index]]]):
        parent = innermost(events.start[mine], events.end[mine]).parent
        name, outer = events.name[mine], take(parent, parent)
        third = np.flatnonzero((name == take(name, parent)) & (name == take(name, outer)))
        for chain in (third, parent[third], outer[third]):
            within[mine[chain]] = True
    return bool(within[operator].sum() >= _LEAST * len(nodes))
