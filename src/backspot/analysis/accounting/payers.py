"""Who pays for what holds the clock: a holder's time in shares of owners.

A *payer* is a holder or a part of one: first come the spans, then the pieces of device work, then
the launches of compiled code, whose owners differ from that of the span around, and last *nothing*.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.timeline import NOTHING, merged
from backspot.trace.events import Ints, Mask

__all__ = ["Payers"]


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
