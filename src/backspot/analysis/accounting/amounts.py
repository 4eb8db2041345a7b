"""Amounts of the backward's time and work, and their sums by owner, node and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import NOTHING, first_started, grouped, numbered, take
from backspot.analysis.typical import TypicalStep
from backspot.results.costs import LineCost, NodeCost
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask
from backspot.trace.names import ATEN
from backspot.trace.source_lines import SourceLine

__all__ = [
    "Amounts",
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


class Amounts(NamedTuple):
    """Amounts of the backward's time or work; arrays with one entry each.

    Attributes:
        step: the step.
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
        return Amounts(*(column[chosen] for column in self))

    def in_typical_step(self, typical: TypicalStep) -> Amounts:
        """Return what a typical step has of each amount."""
        keys = (self.owner, self.node, self.line)
        return self._replace(amount=typical.apportioned(self.amount, self.step, *keys))


def joined(parts: Iterable[Amounts]) -> Amounts:
    """Return all parts as one."""
    return Amounts(*map(np.concatenate, zip(*parts, strict=True)))


def node_costs(
    executed: Amounts, usual: Sequence[Amounts], names: Sequence[str], typical: TypicalStep
) -> dict[int, list[NodeCost]]:
    """Return what each owner's nodes cost in a typical step, by name.

    Args:
        executed: what was executed in all steps, each counted as one.
        usual: wall, gpu and cpu time of a typical step.
        names: as ``Holders`` has them.
        typical: the steps that count.
    """
    width = len(names)

    def key(of: Amounts) -> Ints:
        return np.where(of.node >= 0, of.owner * width + of.node, NOTHING)

    nodes: dict[int, list[NodeCost]] = defaultdict(list)
    for at, costs in _by_key(key, executed, usual, typical):
        nodes[at // width].append(NodeCost(names[at % width], *costs))
    return nodes


def line_costs(
    executed: Amounts,
    usual: Sequence[Amounts],
    names: Sequence[str],
    typical: TypicalStep,
    lines: Sequence[SourceLine],
    *,
    exact: bool,
) -> dict[int, list[LineCost]]:
    """Return what each owner's source lines cost in a typical step, by the nodes that they made.

    Args:
        executed: as for ``node_costs``.
        usual: as for ``node_costs``.
        names: as for ``node_costs``.
        typical: the steps that count.
        lines: the source lines.
        exact: whether these lines made the nodes, or called the modules that did.
    """
    found: dict[int, list[LineCost]] = defaultdict(list)
    if not lines:
        return found

    def key(of: Amounts) -> Ints:
        named = of.owner * len(names) + of.node
        return np.where((of.node >= 0) & (of.line >= 0), named * len(lines) + of.line, NOTHING)

    for one, costs in _by_key(key, executed, usual, typical):
        owned, line = divmod(one, len(lines))
        owner, node = divmod(owned, len(names))
        at = lines[line]
        where = (at.file, at.line, at.function, at.text)
        found[owner].append(LineCost(*where, names[node], exact, *costs))
    return found


def _by_key(
    key: Callable[[Amounts], Ints],
    executed: Amounts,
    usual: Sequence[Amounts],
    typical: TypicalStep,
) -> Iterable[tuple[int, list[int]]]:
    """Yield the keys, with the count, wall, gpu and cpu time of each in a typical step.

    Args:
        key: returns the key of each amount; those below 0 are left out.
        executed: as for ``node_costs``.
        usual: as for ``node_costs``.
        typical: the steps that count.
    """
    columns = [amounts.where(key(amounts) >= 0) for amounts in (executed, *usual)]
    known, which = numbered(np.concatenate([key(amounts) for amounts in columns]))
    ends = np.cumsum([len(amounts.amount) for amounts in columns])[:-1]
    count, *costs = np.split(which, ends)
    steps = (columns[0].step, columns[0].amount, len(known), len(typical.weight))
    found = [typical.count(summed_by_step(count, *steps))]
    for one, amounts in zip(costs, columns[1:], strict=True):
        found.append(summed(one, amounts.amount, len(known)))
    table = np.stack(found, axis=1)
    costly = table.any(axis=1)
    yield from zip(known[costly].tolist(), table[costly].tolist(), strict=True)


def summed(key: Ints, amount: Ints, count: int) -> Ints:
    """Return exact integer sums by key; ``np.bincount`` adds doubles."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, key, amount)
    return sums


def summed_by_step(key: Ints, step: Ints, amount: Ints, count: int, steps: int) -> Ints:
    """Return exact integer sums with one row a key, below ``count``, and one column a step."""
    return summed(key * steps + step, amount, count * steps).reshape(count, steps)
