"""Whether the nodes of a trace were made under ``torch.func``, where no labels are written.

Each transform handles an operator and calls the operator again for the next level. So under
``grad``, ``vmap`` and other transforms an operator contains itself, twice or more.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.join import Join
from backspot.analysis.timeline import grouped, innermost, take
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = ["are_transformed"]

_LEAST = 0.25
"""Share of the nodes: a transform replaces some operators, and those do not contain themselves."""


def are_transformed(events: Events, join: Join, nodes: Ints) -> bool:
    """Whether these nodes were made under a transform, judged by their operators.

    Args:
        events: the trace.
        join: the operators that made the nodes.
        nodes: the spans of the nodes.
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
