"""Amounts of the backward's time and work, and their sums by owner, node and line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import first_started, grouped, numbered, take
from backspot.analysis.typical import TypicalStep
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask
from backspot.trace.names import ATEN


def operators_inside(events: Events, ownership: Ownership) -> tuple[Ints, Ints]:
    """Return PyTorch's outermost operators in the backward passes.

    Returns:
        Indices into the events, and the span that each operator runs in.
    """
    index = events.prefixed(Category.OPERATOR, ATEN)
    span = ownership.spans.of(events, index)
    inside = take(ownership.passes.of_span, span) >= 0
    index, span = index[inside], span[inside]
    outermost = np.zeros(len(index), bool)
    for _, members in grouped(events.thread[index]):
        line = first_started(events.start[index[members]], events.end[index[members]], members)
        outermost[line.values[line.values >= 0]] = True
    return index[outermost], span[outermost]


class Amounts(NamedTuple):
    """Amounts of the backward's time or work; arrays with one entry each.

    Attributes:
        step: the step of the pass, also where it goes on after that step.
        owner: the owner.
        node: the node, or what counts as one, an index into ``Holders.names``; ``NOTHING`` for
            none.
        line: the source line, ``NOTHING`` for none.
        kind: what it is spent on: a ``WallKind``, or a name of the trace.
        holder: whose amount this is, or a part of.
        amount: nanoseconds, or a count.
    """

    step: Ints
    owner: Ints
    node: Ints
    line: Ints
    kind: Ints
    holder: Ints
    amount: Ints

    def where(self, chosen: Mask) -> Amounts:
        """Return some of the amounts."""
        rows = np.flatnonzero(chosen)
        return Amounts(*(column[rows] for column in self))

    def in_typical_step(self, typical: TypicalStep) -> Amounts:
        """Return what a typical step has of each amount."""
        keys = (self.owner, self.node, self.line)
        return self._replace(amount=typical.apportioned(self.amount, self.step, *keys))


def joined(pieces: Iterable[Amounts]) -> Amounts:
    """Return all parts as one."""
    return Amounts(*map(np.concatenate, zip(*pieces, strict=True)))


def costs_by(
    columns: Sequence[str], executed: Amounts, spent: Sequence[Amounts], typical: TypicalStep
) -> list[list[int]]:
    """Sum amounts by what some of their columns have, such as an owner and a node.

    Args:
        columns: names of columns; amounts that have ``NOTHING`` in one of these are left out.
        executed: what was executed in all steps, each counted as one.
        spent: times of a typical step, such as wall, gpu and cpu.
        typical: the steps that count.

    Returns:
        For each combination that costs anything: the values of the columns, how often it is
        executed in a typical step, and the sum of each of ``spent``.
    """
    pieces = (executed, *spent)
    values = [np.concatenate([getattr(piece, column) for piece in pieces]) for column in columns]
    known = np.flatnonzero(np.minimum.reduce(values) >= 0)
    values = [column[known] for column in values]
    sizes = [int(column.max(initial=0)) + 1 for column in values]
    keys, place = numbered(np.ravel_multi_index(tuple(values), tuple(sizes)))
    piece_of = np.repeat(np.arange(len(pieces)), [len(piece.amount) for piece in pieces])[known]
    amount = np.concatenate([piece.amount for piece in pieces])[known]
    sums = summed_by_step(place, piece_of, amount, len(keys), len(pieces))
    once = known[known < len(executed.amount)]
    counted = (place[: len(once)], executed.step[once], executed.amount[once])
    sums[:, 0] = typical.count(summed_by_step(*counted, len(keys), len(typical.weight)))
    costly = sums.any(axis=1)
    table = np.column_stack([*np.unravel_index(keys[costly], tuple(sizes)), sums[costly]])
    rows: list[list[int]] = table.tolist()
    return rows


def summed(key: Ints, amount: Ints, count: int) -> Ints:
    """Return exact integer sums by key; ``np.bincount`` adds doubles."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, key, amount)
    return sums


def summed_by_step(key: Ints, step: Ints, amount: Ints, count: int, steps: int) -> Ints:
    """Return exact integer sums with one row a key, below ``count``, and one column a step."""
    return summed(key * steps + step, amount, count * steps).reshape(count, steps)
