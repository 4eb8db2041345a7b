"""The compiled kernels that work for several modules, and for how much of each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from backspot.analysis.accounting.pieces import summed_by_step
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.timeline import take
from backspot.analysis.typical import TypicalStep
from backspot.results.costs import FusedKernel, FusedPart
from backspot.trace import Events

__all__ = ["find_fused"]


def find_fused(
    events: Events, ownership: Ownership, typical: TypicalStep
) -> tuple[FusedKernel, ...]:
    """Return the kernels of the backward whose time is split, most time first.

    Where the trace has no device work, these are the launches on the host.

    Args:
        events: the trace.
        ownership: its owners.
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
