"""Pieces of the backward's time and work, and their sums by owner, node and source line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from backspot.analysis.timeline import NOTHING, numbered
from backspot.results.costs import LineCost, NodeCost
from backspot.trace.events import Ints
from backspot.trace.source_lines import SourceLine

__all__ = ["Piece", "joined", "line_costs", "node_costs", "summed"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Pieces of time or work of the backward; arrays of equal length.

    Attributes:
        run: the pass.
        owner: the row.
        node: the name of the node; the one after the last is recompute, ``NOTHING`` none.
        line: the source line, ``NOTHING`` none.
        amount: nanoseconds.
        kind: of wall time alone, what it is spent on.
    """

    run: Ints
    owner: Ints
    node: Ints
    line: Ints
    amount: Ints
    kind: Ints = field(default_factory=lambda: np.empty(0, np.int64))


def node_costs(pieces: Sequence[Piece], names: Sequence[str]) -> dict[int, list[NodeCost]]:
    """Each owner's nodes by name.

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
    """Each owner's source lines, by the nodes that they made.

    Args:
        pieces: as for ``node_costs``.
        names: the nodes' names.
        known: the lines.
        exact: whether these made the nodes, or called the modules that did.
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
    """Exact integer sums by key; ``np.bincount`` would add them as doubles."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, key, amount)
    return sums


def _by_key(columns: Iterable[tuple[Ints, Ints]]) -> dict[int, list[int]]:
    """The four sums of each key, from (keys, amounts); keys below 0 are left out."""
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for column, (key, amount) in enumerate(columns):
        held = key >= 0
        keys, inverse = numbered(key[held])
        totals = summed(inverse, amount[held], len(keys))
        for one, total in zip(keys.tolist(), totals.tolist(), strict=True):
            sums[one][column] += total
    return sums


def joined(parts: Sequence[Piece]) -> Piece:
    """All parts as one."""
    return Piece(
        *(np.concatenate([getattr(part, field) for part in parts]) for field in Piece.__slots__)
    )
