"""Blocks of memory: which allocation each free belongs to, and who allocated the block.

The owner of a block is the owner of the span that the host was in when it allocated the block: a
module's call in forward, an autograd node in backward.
"""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.updates import optimizer_steps
from backspot.analysis.timeline import NOTHING, enclosing, grouped, merged, take
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask


class Blocks(msgspec.Struct, frozen=True):
    """Blocks of memory that were allocated or freed during the recording; one entry a block.

    Attributes:
        device: the device, -1 for the host.
        size: bytes.
        came: index into ``Events.allocations`` of its allocation, ``NOTHING`` if it was there
            before the recording.
        went: index of its end; the number of allocations if it is never freed. If the address is
            allocated again without a free, that is its end.
        span: the span that allocated it, ``NOTHING`` for none.
        owner: who allocated it, an index into ``Ownership.owners``.
        by_optimizer: whether an optimizer allocated it.
    """

    device: Ints
    size: Ints
    came: Ints
    went: Ints
    span: Ints
    owner: Ints
    by_optimizer: Mask

    def live_at(self, index: int) -> Mask:
        """Whether each block is live after an entry of ``Events.allocations``."""
        live: Mask = (self.came <= index) & (self.went > index)
        return live


def find_blocks(events: Events, ownership: Ownership) -> Blocks:
    """Match each allocation with the free of the same address that follows."""
    reported = events.allocations
    count = len(reported)
    order = np.lexsort((reported.address, reported.device))
    comes = reported.size[order] > 0
    alike = np.ones(max(count - 1, 0), bool)
    for column in (reported.address[order], reported.device[order]):
        alike &= column[1:] == column[:-1]
    following = np.where(np.append(alike, False), np.append(order[1:], count), count)
    after_coming = np.append(False, alike & comes[:-1]) if count else comes
    old = order[~comes & ~after_coming]
    came = np.concatenate([order[comes], np.full(len(old), NOTHING)])
    went = np.concatenate([following[comes], old])
    entry = np.where(came >= 0, came, went)
    span = np.full(count, NOTHING, np.int64)
    for thread, members in grouped(reported.thread):
        span[members] = ownership.spans.at(thread, reported.time[members])
    marks = events.chosen(events.names_where(names.is_optimizer_mark), Category.ANNOTATION)
    marks = merged(marks, optimizer_steps(events))
    by_optimizer = enclosing(events, marks, reported.thread, reported.time) >= 0
    in_pass = take(ownership.passes.of_span, span) >= 0
    return Blocks(
        device=reported.device[entry],
        size=np.abs(reported.size[entry]),
        came=came,
        went=went,
        span=take(span, came),
        owner=take(take(ownership.owner, span, Special.OUTSIDE), came, Special.OUTSIDE),
        by_optimizer=take(by_optimizer & ~in_pass, came, False),
    )
