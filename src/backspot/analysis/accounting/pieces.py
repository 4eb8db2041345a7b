"""Pieces of the backward's time and work, and what a step has of them, by owner, node and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.passes import Steps
from backspot.analysis.timeline import NOTHING, first_started, grouped, numbered, take
from backspot.analysis.typical import TypicalStep
from backspot.results.costs import LineCost, NodeCost
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask
from backspot.trace.names import ATEN
from backspot.trace.source_lines import SourceLine

__all__ = [
    "Pieces",
    "joined",
    "line_costs",
    "node_costs",
    "operators_inside",
    "summed",
    "summed_by_step",
]


def operators_inside(events: Events, ownership: Ownership) -> tuple[Ints, Ints]:
    """Return PyTorch's outermost operators in the backward passes.

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


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of time or work of the backward; arrays of equal length.

    Attributes:
        run: the pass.
        owner: the owner.
        node: the name of the node, an index into the names of nodes; the next index after the last
            name is recomputation, the next idle time before a graph's replay, ``NOTHING`` is none.
        line: the source line, ``NOTHING`` for none.
        amount: nanoseconds, or a count.
        is_split: whether this is a part of what serves several owners.
        kind: what wall time is spent on, as ``WallKind``; empty for other time.
    """

    run: Ints
    owner: Ints
    node: Ints
    line: Ints
    amount: Ints
    is_split: Mask
    kind: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def where(self, chosen: Mask) -> Pieces:
        """Return some of the pieces."""
        return Pieces(
            run=self.run[chosen],
            owner=self.owner[chosen],
            node=self.node[chosen],
            line=self.line[chosen],
            amount=self.amount[chosen],
            is_split=self.is_split[chosen],
            kind=self.kind[chosen] if len(self.kind) else self.kind,
        )


def node_costs(
    executed: Pieces,
    usual: Sequence[Pieces],
    names: Sequence[str],
    steps: Steps,
    typical: TypicalStep,
) -> dict[int, list[NodeCost]]:
    """Return what each owner's nodes cost in a typical step, by name.

    Args:
        executed: what was executed in all steps, each counted as one.
        usual: wall, gpu and cpu time of a typical step.
        steps: the step of each pass.
        typical: the steps that count.
    """
    width = len(names)

    def key(piece: Pieces) -> Ints:
        return np.where(piece.node >= 0, piece.owner * width + piece.node, NOTHING)

    nodes: dict[int, list[NodeCost]] = defaultdict(list)
    for at, (count, *costs) in _by_key(key, executed, usual, steps, typical).items():
        nodes[at // width].append(NodeCost(names[at % width], count, *costs))
    return nodes


def line_costs(
    executed: Pieces,
    usual: Sequence[Pieces],
    names: Sequence[str],
    known: Sequence[SourceLine],
    steps: Steps,
    typical: TypicalStep,
    *,
    exact: bool,
) -> dict[int, list[LineCost]]:
    """Return what each owner's source lines cost in a typical step, by the nodes that they made.

    Args:
        executed: as for ``node_costs``.
        usual: as for ``node_costs``.
        steps: the step of each pass.
        typical: the steps that count.
        exact: whether these lines made the nodes, or called the modules that did.
    """
    lines: dict[int, list[LineCost]] = defaultdict(list)
    if not known:
        return lines

    def key(piece: Pieces) -> Ints:
        named = piece.owner * len(names) + piece.node
        is_known = (piece.node >= 0) & (piece.line >= 0)
        return np.where(is_known, named * len(known) + piece.line, NOTHING)

    for one, cost in _by_key(key, executed, usual, steps, typical).items():
        owned, line = divmod(one, len(known))
        owner, node = divmod(owned, len(names))
        at = known[line]
        where = (at.file, at.line, at.function, at.text)
        lines[owner].append(LineCost(*where, names[node], exact, *cost))
    return lines


def summed(key: Ints, amount: Ints, count: int) -> Ints:
    """Return exact integer sums by key; ``np.bincount`` adds doubles."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, key, amount)
    return sums


def summed_by_step(key: Ints, step: Ints, amount: Ints, count: int, steps: int) -> Ints:
    """Return exact integer sums with one row a key, below ``count``, and one column a step."""
    return summed(key * steps + step, amount, count * steps).reshape(count, steps)


def _by_key(
    key: Callable[[Pieces], Ints],
    executed: Pieces,
    usual: Sequence[Pieces],
    steps: Steps,
    typical: TypicalStep,
) -> dict[int, list[int]]:
    """Return the count, wall, gpu and cpu time of a typical step by key.

    Args:
        key: returns the key of each piece; those below 0 are left out.
        executed: as for ``node_costs``.
        usual: as for ``node_costs``.
        steps: the step of each pass.
        typical: the steps that count.
    """
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for column, piece in enumerate((executed, *usual)):
        keys = key(piece)
        held = keys >= 0
        known, inverse = numbered(keys[held])
        amount, count = piece.amount[held], len(known)
        if column == 0:
            step = steps.of_pass[piece.run[held]]
            sums = typical.count(summed_by_step(inverse, step, amount, count, steps.count))
        else:
            sums = summed(inverse, amount, count)
        for one, cost in zip(known.tolist(), sums.tolist(), strict=True):
            found[one][column] = cost
    return {one: cost for one, cost in found.items() if any(cost)}


def joined(parts: Sequence[Pieces]) -> Pieces:
    """Return all parts as one."""
    return Pieces(
        *(np.concatenate([getattr(part, field) for part in parts]) for field in Pieces.__slots__)
    )
