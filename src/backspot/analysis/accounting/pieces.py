"""Pieces of the backward's time and work, and their sums by owner, node and source line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from backspot.analysis.timeline import NOTHING, numbered
from backspot.results.costs import LineCost, NodeCost
from backspot.trace.events import Ints, Mask
from backspot.trace.source_lines import SourceLine

__all__ = ["Piece", "joined", "line_costs", "node_costs", "summed"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Pieces of time or work of the backward; arrays of equal length.

    Attributes:
        run: the pass.
        owner: the owner.
        node: the name of the node, an index into the names of nodes; the next index after the last
            name is recomputation, the next idle time before a graph's replay, ``NOTHING`` is none.
        line: the source line, ``NOTHING`` for none.
        amount: nanoseconds, or a count.
        kind: what wall time is spent on, as ``WallKind``; empty for other time.
    """

    run: Ints
    owner: Ints
    node: Ints
    line: Ints
    amount: Ints
    kind: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def where(self, chosen: Mask) -> Piece:
        """Return some of the pieces."""
        return Piece(
            run=self.run[chosen],
            owner=self.owner[chosen],
            node=self.node[chosen],
            line=self.line[chosen],
            amount=self.amount[chosen],
            kind=self.kind[chosen] if len(self.kind) else self.kind,
        )


def node_costs(pieces: Sequence[Piece], names: Sequence[str]) -> dict[int, list[NodeCost]]:
    """Sum up each owner's nodes by name.

    Args:
        pieces: what was executed (each counted as one), then wall, gpu and cpu time.
        names: the nodes' names.
    """
    width = len(names)
    sums = _by_key(
        (np.where(p.node >= 0, p.owner * width + p.node, NOTHING), p.amount) for p in pieces
    )
    nodes: dict[int, list[NodeCost]] = defaultdict(list)
    for key, (count, *costs) in sums.items():
        nodes[key // width].append(NodeCost(names[key % width], count, *costs))
    return nodes


def line_costs(
    pieces: Sequence[Piece], names: Sequence[str], known: Sequence[SourceLine], *, exact: bool
) -> dict[int, list[LineCost]]:
    """Sum up each owner's source lines, by the nodes that they made.

    Args:
        pieces: as for ``node_costs``.
        names: the nodes' names.
        known: the source lines.
        exact: whether these lines made the nodes, or called the modules that did.
    """
    lines: dict[int, list[LineCost]] = defaultdict(list)
    if not known:
        return lines
    sums = _by_key(
        (
            np.where(
                (p.node >= 0) & (p.line >= 0),
                (p.owner * len(names) + p.node) * len(known) + p.line,
                NOTHING,
            ),
            p.amount,
        )
        for p in pieces
    )
    for key, cost in sums.items():
        owned, line = divmod(key, len(known))
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


def _by_key(columns: Iterable[tuple[Ints, Ints]]) -> dict[int, list[int]]:
    """Return the four sums of each key, from (keys, amounts); keys below 0 are left out."""
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for column, (key, amount) in enumerate(columns):
        held = key >= 0
        keys, inverse = numbered(key[held])
        totals = summed(inverse, amount[held], len(keys))
        for one, total in zip(keys.tolist(), totals.tolist(), strict=True):
            sums[one][column] += total
    return sums


def joined(parts: Sequence[Piece]) -> Piece:
    """Return all parts as one."""
    return Piece(
        *(np.concatenate([getattr(part, field) for part in parts]) for field in Piece.__slots__)
    )
