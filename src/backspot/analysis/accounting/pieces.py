"""Pieces of the backward's time and work, and what a step has of them, by owner, node and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from backspot.analysis.attribution.passes import Steps
from backspot.analysis.timeline import NOTHING, numbered
from backspot.analysis.typical import typical, typical_count
from backspot.results.costs import LineCost, NodeCost
from backspot.trace.events import Ints, Mask
from backspot.trace.source_lines import SourceLine

__all__ = ["Pieces", "joined", "line_costs", "node_costs", "summed", "summed_by_step"]


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
    pieces: Sequence[Pieces], names: Sequence[str], steps: Steps
) -> dict[int, list[NodeCost]]:
    """Return what each owner's nodes cost in a typical step, by name.

    Args:
        pieces: what was executed (each counted as one), then wall, gpu and cpu time.
        names: the nodes' names.
        steps: the step of each pass.
    """
    width = len(names)
    typically = _by_key(
        (np.where(p.node >= 0, p.owner * width + p.node, NOTHING) for p in pieces), pieces, steps
    )
    nodes: dict[int, list[NodeCost]] = defaultdict(list)
    for key, (count, *costs) in typically.items():
        nodes[key // width].append(NodeCost(names[key % width], count, *costs))
    return nodes


def line_costs(
    pieces: Sequence[Pieces],
    names: Sequence[str],
    known: Sequence[SourceLine],
    steps: Steps,
    *,
    exact: bool,
) -> dict[int, list[LineCost]]:
    """Return what each owner's source lines cost in a typical step, by the nodes that they made.

    Args:
        pieces: as for ``node_costs``.
        names: the nodes' names.
        known: the source lines.
        steps: the step of each pass.
        exact: whether these lines made the nodes, or called the modules that did.
    """
    lines: dict[int, list[LineCost]] = defaultdict(list)
    if not known:
        return lines
    keys = (
        np.where(
            (p.node >= 0) & (p.line >= 0),
            (p.owner * len(names) + p.node) * len(known) + p.line,
            NOTHING,
        )
        for p in pieces
    )
    for key, cost in _by_key(keys, pieces, steps).items():
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


def summed_by_step(key: Ints, step: Ints, amount: Ints, count: int, steps: int) -> Ints:
    """Return exact integer sums with one row a key, below ``count``, and one column a step."""
    return summed(key * steps + step, amount, count * steps).reshape(count, steps)


def _by_key(keys: Iterable[Ints], pieces: Sequence[Pieces], steps: Steps) -> dict[int, list[int]]:
    """Return the typical count, wall, gpu and cpu time of each key.

    Args:
        keys: the key of each piece, an array for each of ``pieces``; keys below 0 are left out.
        pieces: counts, then wall, gpu and cpu time.
        steps: the step of each pass.
    """
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for column, (key, piece) in enumerate(zip(keys, pieces, strict=True)):
        held = key >= 0
        known, inverse = numbered(key[held])
        step = steps.of_pass[piece.run[held]]
        by_step = summed_by_step(inverse, step, piece.amount[held], len(known), steps.count)
        of_step = typical_count(by_step) if column == 0 else typical(by_step)
        for one, cost in zip(known.tolist(), of_step.tolist(), strict=True):
            found[one][column] = cost
    return {key: cost for key, cost in found.items() if any(cost)}


def joined(parts: Sequence[Pieces]) -> Pieces:
    """Return all parts as one."""
    return Pieces(
        *(np.concatenate([getattr(part, field) for part in parts]) for field in Pieces.__slots__)
    )
