"""Who pays for what holds the clock: a holder's time in shares of owners.

A *payer* is a holder or a part of one: first come the spans, then the pieces of device work, then
the launches of compiled code, whose owners differ from that of the span around, and last *nothing*.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from backspot.analysis.accounting.pieces import summed_by_step
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.timeline import NOTHING, merged, take
from backspot.analysis.typical import TypicalStep
from backspot.results.costs import FusedKernel, FusedPart
from backspot.trace import Events
from backspot.trace.events import Ints, Mask

__all__ = ["Payers", "find_fused"]


class Payers:
    """All payers of a trace.

    Args:
        ownership: the trace with its owners.
        spans: the owners of the spans.
        work: the owners of the device work.
        nothing: the owner of moments that nothing holds.

    Attributes:
        shares: the owners of each payer, with their shares.
        edges: when the host begins and ends to work for launches of compiled code, sorted and
            distinct. Between two of these, a span has one payer.
    """

    def __init__(self, ownership: Ownership, spans: Shares, work: Shares, nothing: int) -> None:
        self._ownership = ownership
        self._first_launch = len(spans.first) + len(work.first) - 2
        none = np.full(1, NOTHING)
        self.shares = Shares.joined(
            [spans, work, ownership.launch_shares, Shares.one_each(none + nothing + 1, none)]
        )
        compiled = ownership.compiled
        self.edges = merged(compiled.start, compiled.end)
        self.is_split: Mask = self.shares.is_split

    @property
    def nothing(self) -> int:
        """The payer of moments that nothing holds."""
        return len(self.shares.first) - 2

    def of_work(self, work: Ints) -> Ints:
        """Return the payers of these pieces of device work."""
        return work + len(self._ownership.spans.start)

    def of_launches(self, launches: Ints) -> Ints:
        """Return the payers of these launches of compiled code."""
        return launches + self._first_launch

    def of_holders(self, holder: Ints, time: Ints) -> Ints:
        """Return who pays for what holders do from a time on, until the next edge.

        Args:
            holder: as the clock has it; ``NOTHING`` is allowed.
            time: nanoseconds, one entry for each of ``holder``.
        """
        payer = np.where(holder >= 0, holder, self.nothing)
        compiled, spans = self._ownership.compiled, self._ownership.spans
        if len(compiled.event):
            span = np.where(holder < len(spans.start), holder, NOTHING)
            launch = compiled.at(spans, span, time)
            payer = np.where(launch >= 0, self.of_launches(launch), payer)
        return payer


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
    mine = np.flatnonzero(shares.is_split & (run >= 0))
    kinds: dict[tuple[object, ...], int] = {}
    first: list[int] = []
    kind = np.zeros(len(mine), np.int64)
    for at, one in enumerate(mine.tolist()):
        kind[at] = kinds.setdefault((int(name[one]), *_parts(shares, one)), len(kinds))
        if kind[at] == len(first):
            first.append(one)
    step, steps = ownership.steps.of_pass[run[mine]], ownership.steps.count
    spent = typical.mean(summed_by_step(kind, step, amount[mine], len(kinds), steps))
    count = typical.count(summed_by_step(kind, step, np.ones_like(kind), len(kinds), steps))
    found = [
        FusedKernel(
            name=events.names[int(name[one])],
            count=int(count[number]),
            spent_ns=int(spent[number]),
            parts=tuple(_named(ownership, _parts(shares, one))),
        )
        for number, one in enumerate(first)
    ]
    return tuple(sorted(found, key=lambda kernel: (-kernel.spent_ns, kernel.name, kernel.parts)))


_Part = tuple[int, int, bool, int]
"""The owner, the weight, whether it is forward work again, and the line."""


def _parts(shares: Shares, thing: int) -> Iterable[_Part]:
    columns = (shares.owner, shares.weight, shares.again, shares.line)
    mine = slice(int(shares.first[thing]), int(shares.first[thing + 1]))
    return zip(*(column[mine].tolist() for column in columns), strict=True)


def _named(ownership: Ownership, parts: Iterable[_Part]) -> Iterable[FusedPart]:
    for owner, weight, again, line in parts:
        known = ownership.lines[line] if line >= 0 else None
        place = f"{known.file}:{known.line}" if known else ""
        yield FusedPart(ownership.owners.path(owner), Shares.part(weight), again, place)
