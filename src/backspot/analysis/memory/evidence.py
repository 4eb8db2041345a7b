"""What the rules about memory look at: the blocks of the device that holds the most."""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.memory.allocations import Blocks
from backspot.analysis.memory.peaks import Memory
from backspot.analysis.timeline import enclosing, take
from backspot.formatting import percent
from backspot.results.findings import Finding, Place
from backspot.results.memory import ALLOCATOR, MemoryOfDevice
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask

LEAST_HELD = 0.05
"""The share of the peak that a finding about memory holds at least."""


class MemoryEvidence(msgspec.Struct, frozen=True, dict=True):
    """What every rule about memory is a function of. Masks have one entry a block.

    Attributes:
        events: the trace.
        ownership: its owners.
        memory: its blocks, and the memory of its devices.
    """

    events: Events
    ownership: Ownership
    memory: Memory

    @property
    def device(self) -> MemoryOfDevice:
        """The device that holds the most."""
        return self.memory.devices[0]

    @property
    def blocks(self) -> Blocks:
        """The blocks of all devices."""
        return self.memory.blocks

    @property
    def least(self) -> int:
        """The bytes that a finding holds at least."""
        return int(LEAST_HELD * self.device.peak_bytes)

    @cached_property
    def mine(self) -> Mask:
        """Whether each block is on the device, and was allocated during the recording."""
        is_own: Mask = (self.blocks.device == self.device.device) & (self.blocks.came >= 0)
        return is_own

    @cached_property
    def kept(self) -> Mask:
        """Whether each block is kept from forward to backward."""
        return self.mine & self.memory.kinds.activation

    @cached_property
    def _at_peak(self) -> Mask:
        entries = np.flatnonzero(self.events.allocations.device == self.device.device)
        highest = entries[np.argmax(self.memory.allocated[entries])]
        return self.mine & self.blocks.live_at(int(highest))

    def at_peak(self, chosen: Mask) -> Mask:
        """Whether each of some blocks is live at the peak."""
        return chosen & self._at_peak

    def held_at_peak(self, chosen: Mask) -> int:
        """Return what some blocks hold at the peak."""
        return int(self.blocks.size[self.at_peak(chosen)].sum())

    def allocated_in(self, *operators: str) -> Mask:
        """Whether each block was allocated while one of these operators ran."""
        events, blocks = self.events, self.blocks
        operator_names = frozenset(operators)
        index = events.chosen(events.names_where(operator_names.__contains__), Category.OPERATOR)
        time = take(events.allocations.time, blocks.came)
        thread = take(events.allocations.thread, blocks.came)
        is_allocated: Mask = (enclosing(events, index, thread, time) >= 0) & self.mine
        return is_allocated

    def allocated_by_node(self, *nodes: str) -> Mask:
        """Whether each block was allocated by an autograd node with one of these names."""
        spans = self.ownership.spans
        wanted = np.array([name in nodes for name in (*spans.node_names, "")], bool)
        is_allocated: Mask = take(wanted[spans.node], self.blocks.span, False) & self.mine
        return is_allocated

    def step_of(self, entries: Ints) -> Ints:
        """Return how many steps have begun their last backward pass before each entry."""
        steps, passes = self.ownership.steps, self.ownership.passes
        last = np.append(steps.of_pass[1:] != steps.of_pass[:-1], True)
        times = take(self.events.allocations.time, entries)
        return np.searchsorted(passes.start[last], times, side="right")

    def share(self, bytes_held: int) -> str:
        """Return bytes as a share of the peak."""
        return percent(bytes_held / self.device.peak_bytes if self.device.peak_bytes else 0.0)

    def finding(
        self,
        chosen: Mask,
        bytes_held: int,
        *,
        title: str = "",
        seen: str,
        remedy: str = "",
        link: str = "",
        times: int = 1,
    ) -> Finding:
        """Return a finding whose places are the owners of some blocks, by what these hold.

        Args:
            chosen: the blocks; none if the memory is in no block.
            title: as the other texts, a field of ``Finding``. The head of the rule is filled in.
            seen: as ``title``.
            remedy: as ``title``.
            link: as ``title``.
            times: how many times the cause is in ``chosen``, if ``bytes_held`` counts it once.
        """
        owners = self.ownership.owners
        size, count = np.zeros(len(owners), np.int64), np.zeros(len(owners), np.int64)
        np.add.at(size, self.blocks.owner[chosen], self.blocks.size[chosen])
        np.add.at(count, self.blocks.owner[chosen], 1)
        ranked = [owner for owner in np.argsort(-size, kind="stable").tolist() if size[owner]]
        places = [
            Place(
                *owners.named(owner),
                int(count[owner]) // times,
                0,
                held_bytes=int(size[owner]) // times,
            )
            for owner in ranked
        ]
        return Finding(
            rule="",
            title=title,
            seen=seen,
            remedy=remedy,
            wall_ns=0,
            places=tuple(places) or (Place(ALLOCATOR, "", 0, 0, held_bytes=bytes_held),),
            steps=self.ownership.steps.count,
            link=link,
            held_bytes=bytes_held,
        )
