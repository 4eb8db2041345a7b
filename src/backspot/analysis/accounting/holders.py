"""What the clock runs for, and whom that belongs to: the shares of owners in each holder.

A *holder* is a span, a piece of device work, or a launch within compiled code, whose owners differ
from that of the span around; the last one is *nothing*.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from backspot.analysis.accounting.amounts import Amounts, summed_by_step
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.timeline import NOTHING, merged, take
from backspot.analysis.typical import TypicalStep
from backspot.results.costs import FusedKernel, FusedPart
from backspot.trace import Events
from backspot.trace.events import Ints, Mask

# Listed among the nodes, although they are none.
_RECOMPUTE = "(recompute)"
_REPLAY = "(before a graph's replay)"


class Holders:
    """All holders of a recording; arrays with one entry each.

    Attributes:
        span: the span, or the one around the launch; ``NOTHING`` for none.
        work: the device work, ``NOTHING`` where the host holds the clock.
        edges: when the host begins and ends to work for launches of compiled code, sorted and
            distinct. Between two of these, what a span does belongs to one holder.
        nothing: the holder of moments that nothing holds.
        names: the names of nodes; then recomputation, idle time before a graph's replay, and the
            collectives.
        recompute: the index of recomputation in ``names``.
        replay: that of idle time before a graph's replay.
    """

    def __init__(self, ownership: Ownership) -> None:
        spans, work, compiled = ownership.spans, ownership.work, ownership.compiled
        self._ownership = ownership
        self._spans, self._first_launch = len(spans.start), len(spans.start) + len(work.start)
        self.nothing = self._first_launch + len(compiled.event)
        self.span: Ints = np.concatenate(
            [np.arange(self._spans), work.span, compiled.span, [NOTHING]]
        )
        self.work: Ints = np.full(self.nothing + 1, NOTHING)
        self.work[self._spans : self._first_launch] = np.arange(len(work.start))
        self.edges = merged(compiled.start, compiled.end)
        names, collectives = spans.node_names, ownership.communication.names
        self.recompute, self.replay = len(names), len(names) + 1
        self.names = (*names, _RECOMPUTE, _REPLAY, *(f"({name})" for name in collectives))

    def of_work(self, work: Ints) -> Ints:
        """Return the holders that these pieces of device work are."""
        return work + self._spans

    def of_launches(self, launches: Ints) -> Ints:
        """Return the holders that these launches of compiled code are."""
        return launches + self._first_launch

    def at(self, running: Ints, time: Ints) -> Ints:
        """Return what holds the clock from a time on, until the next edge.

        Args:
            running: a span, or device work, as ``Clock`` has it; ``NOTHING`` is allowed.
            time: nanoseconds, one entry for each of ``running``.
        """
        holder = np.where(running >= 0, running, self.nothing)
        compiled, spans = self._ownership.compiled, self._ownership.spans
        if len(compiled.event):
            span = np.where(running < self._spans, running, NOTHING)
            launch = compiled.at(spans, span, time)
            holder = np.where(launch >= 0, self.of_launches(launch), holder)
        return holder

    @cached_property
    def in_pass(self) -> Mask:
        """Whether each holder's span runs in a pass."""
        return take(self._ownership.passes.of_span, self.span) >= 0

    @cached_property
    def run(self) -> Ints:
        """The pass that each holder runs in, or that launched it; ``NOTHING`` for none."""
        work = take(self._ownership.work.run, self.work)
        return np.where(self.work >= 0, work, take(self._ownership.passes.of_span, self.span))

    @cached_property
    def node(self) -> Ints:
        """What each holder counts as among ``names`` in the backward; ``NOTHING`` for none."""
        spans, collective = self._ownership.spans, self._ownership.communication.collective
        node = np.where(self.in_pass, take(spans.node, self.span), NOTHING)
        node[self.in_pass & ~take(spans.is_node, self.span, True)] = self.recompute
        work = self.work >= 0
        node[work] = np.where(collective >= 0, collective + self.replay + 1, node[work])
        return node

    @cached_property
    def shares(self) -> Shares:
        """The owners of each holder."""
        return self.shares_with(self._ownership.work_shares, Special.ENGINE)

    @cached_property
    def is_split(self) -> Mask:
        """Whether each holder has several owners."""
        return self.shares.is_split

    def shares_with(self, work: Shares, nothing: int) -> Shares:
        """Return the owners of each holder, with these owners of device work and of nothing."""
        spans = Shares.one_each(self._ownership.owner, self._ownership.line)
        last = Shares.one_each(np.array([nothing]), np.array([NOTHING]))
        return Shares.joined([spans, work, self._ownership.launch_shares, last])

    def of_rows(self, holder: Ints) -> Ints:
        """Return these holders as the rows of a pass have them.

        Outside of a pass, the host executes nothing for it: a forward call on another thread.
        """
        return np.where(((self.work < 0) & ~self.in_pass)[holder], self.nothing, holder)

    def deal(
        self,
        holder: Ints,
        amount: Ints,
        *,
        run: Ints | None = None,
        node: Ints | None = None,
        kind: Ints | None = None,
    ) -> Amounts:
        """Split amounts of holders among their owners.

        Args:
            run: the pass of each amount, where that is not the holder's.
            node: as ``Amounts`` has it, where that is not the holder's.
            kind: as ``Amounts`` has it.
        """
        run = self.run[holder] if run is None else run
        place, share, divided = self.shares.split(holder, amount)
        node = (self.node[holder] if node is None else node)[place]
        replay = node == self.replay
        return Amounts(
            step=self._ownership.steps.of_pass[run][place],
            owner=self.shares.owner[share],
            node=np.where(self.shares.again[share] & ~replay, self.recompute, node),
            line=np.where(replay, NOTHING, self.shares.line[share]),
            kind=np.zeros_like(divided) if kind is None else kind[place],
            holder=holder[place],
            amount=divided,
        )


def find_fused(
    events: Events, ownership: Ownership, typical: TypicalStep
) -> tuple[FusedKernel, ...]:
    """Return the kernels of the backward whose time is split, most time first.

    Where the trace has no device work, these are the launches on the host.

    Args:
        typical: the steps that count.
    """
    work, compiled, passes = ownership.work, ownership.compiled, ownership.passes
    if len(work.start):
        shares, name, run = ownership.work_shares, work.name, work.run
        amount = work.end - work.start
    else:
        shares, name = ownership.launch_shares, events.name[compiled.event]
        amount = events.end[compiled.event] - events.start[compiled.event]
        run = take(passes.of_span, compiled.span)
    fused = np.flatnonzero(shares.is_split & (run >= 0))
    kinds: dict[tuple[object, ...], int] = {}
    first: list[int] = []
    kind = np.zeros(len(fused), np.int64)
    for index, kernel_holder in enumerate(fused.tolist()):
        kind[index] = kinds.setdefault(
            (int(name[kernel_holder]), *_parts(shares, kernel_holder)), len(kinds)
        )
        if kind[index] == len(first):
            first.append(kernel_holder)
    step, steps = ownership.steps.of_pass[run[fused]], ownership.steps.count
    spent = typical.mean(summed_by_step(kind, step, amount[fused], len(kinds), steps))
    count = typical.count(summed_by_step(kind, step, np.ones_like(kind), len(kinds), steps))
    kernels = [
        FusedKernel(
            name=events.names[int(name[kernel_holder])],
            count=int(count[number]),
            spent_ns=int(spent[number]),
            parts=tuple(_named(ownership, _parts(shares, kernel_holder))),
        )
        for number, kernel_holder in enumerate(first)
    ]
    return tuple(sorted(kernels, key=lambda kernel: (-kernel.spent_ns, kernel.name, kernel.parts)))


_Part = tuple[int, int, bool, int]
"""The owner, the weight, whether it is forward work again, and the line."""


def _parts(shares: Shares, holder: int) -> Iterable[_Part]:
    columns = (shares.owner, shares.weight, shares.again, shares.line)
    own_shares = slice(int(shares.first[holder]), int(shares.first[holder + 1]))
    return zip(*(column[own_shares].tolist() for column in columns), strict=True)


def _named(ownership: Ownership, shares: Iterable[_Part]) -> Iterable[FusedPart]:
    for owner, weight, again, line in shares:
        source_line = ownership.lines[line] if line >= 0 else None
        place = f"{source_line.file}:{source_line.line}" if source_line else ""
        yield FusedPart(ownership.owners.path(owner), Shares.part(weight), again, place)
