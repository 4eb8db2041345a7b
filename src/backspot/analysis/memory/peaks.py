"""What is in memory: the peak of each device, and what each module keeps for its backward.

Everything follows from the order in which blocks come and go, with a few sorts and sums. The sizes
that an allocator reports are those of its blocks, so the shares of a peak sum to the allocator's
own figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec
import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.memory.allocations import Blocks, find_blocks
from backspot.analysis.memory.checkpointing import find_staying
from backspot.analysis.timeline import FAR, NOTHING, distinct, is_in, numbered, take
from backspot.results.grouping import numberless, parents_of
from backspot.results.memory import (
    BEFORE,
    OPTIMIZER,
    UNACCOUNTED,
    MemoryKind,
    MemoryOfDevice,
    MemoryOfModule,
    MemoryShare,
    MemoryTimeline,
)
from backspot.results.quantities import HOST
from backspot.trace import Events
from backspot.trace.events import Ints, Mask

_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
_MOST = float(1 << 61)
"""Bytes that all blocks of a recording may have together."""
_MOMENTS = 200
_PLOTTED = 8
_LEAST_PLOTTED = 0.005
"""What has a smaller share of the peak is added to all others in a timeline."""


class Kinds(msgspec.Struct, frozen=True):
    """What each block is for. Masks with one entry a block; each block has one of them, or none.

    Attributes:
        activation: allocated in forward, and live when the next backward pass begins.
        recomputed: allocated by forward code that runs again.
        gradient: allocated by a node, and live after the pass.
        backward: allocated by a node, and freed within the pass.
        forward: allocated by a module's call, and freed before the next pass.
        optimizer: allocated by an optimizer.
        run: for an activation the pass that it is kept for, for what nodes allocate their own.
    """

    activation: Mask
    recomputed: Mask
    gradient: Mask
    backward: Mask
    forward: Mask
    optimizer: Mask
    run: Ints

    @property
    def of_block(self) -> Ints:
        """Return the index of each block's kind in ``MemoryKind``."""
        kind_of = np.full(len(self.run), _KINDS.index("other"))
        for number, kind in enumerate(_KINDS):
            if hasattr(self, kind):
                kind_of[getattr(self, kind)] = number
        return kind_of


class Memory(msgspec.Struct, frozen=True):
    """The memory of a trace.

    Attributes:
        devices: each device, those that hold the most first, and the host last.
        of_owner: the memory of each owner of work.
        blocks: the blocks.
        kinds: what they are for.
        allocated: what is allocated on its device after each entry of ``Events.allocations``.
    """

    devices: tuple[MemoryOfDevice, ...]
    of_owner: tuple[MemoryOfModule, ...]
    blocks: Blocks
    kinds: Kinds
    allocated: Ints


def find_memory(events: Events, ownership: Ownership) -> Memory | None:
    """Find what is in memory; ``None`` of a trace recorded without ``profile_memory=True``."""
    size = np.abs(events.allocations.size)
    if not len(size) or size.sum(dtype=np.float64) > _MOST:  # else sums would not fit 64 bits
        return None
    return _Accountant(events, ownership).memory()


class _Accountant:
    def __init__(self, events: Events, ownership: Ownership) -> None:
        self.events, self.o, self.reported = events, ownership, events.allocations
        self.passes, self.spans = ownership.passes, ownership.spans
        self.blocks = find_blocks(events, ownership)
        self.allocated = self._allocated()
        self.until = take(self.reported.time, np.where(self._stays, NOTHING, self.blocks.went), FAR)
        self.kinds = self._kinds()
        self.parent = self._parents()

    def _allocated(self) -> Ints:
        """Return what is allocated after each entry: on the host, of the recorded blocks alone.

        PyTorch counts the host's memory only while it records. A block of an earlier recording
        that was freed since would count for ever.
        """
        blocks, entries = self.blocks, len(self.reported)
        of_host = (blocks.device == HOST) & (blocks.came >= 0)
        change = np.zeros(entries + 1, np.int64)
        np.add.at(change, blocks.came[of_host], blocks.size[of_host])
        np.subtract.at(change, blocks.went[of_host], blocks.size[of_host])
        return np.where(
            self.reported.device == HOST, np.cumsum(change[:-1]), self.reported.allocated
        )

    @property
    def _stays(self) -> Mask:
        stays: Mask = self.blocks.went == len(self.reported)
        return stays

    def _kinds(self) -> Kinds:
        blocks, passes = self.blocks, self.passes
        since = take(self.reported.time, blocks.came)
        recorded = blocks.came >= 0
        own_run = take(passes.of_span, blocks.span)
        in_pass = own_run >= 0
        node = take(self.spans.is_node, blocks.span, False)
        coming = np.searchsorted(passes.start, since, side="right")
        starts = np.append(passes.start, FAR)[coming]
        outside = recorded & ~in_pass & ~blocks.by_optimizer
        is_kept = outside & (self.until > starts)
        survives = self.until > np.append(passes.end, FAR)[own_run]
        return Kinds(
            activation=is_kept,
            recomputed=in_pass & ~node,
            gradient=in_pass & node & survives,
            backward=in_pass & node & ~survives,
            forward=outside & ~is_kept & (blocks.span >= 0),
            optimizer=recorded & blocks.by_optimizer,
            run=np.where(is_kept, coming, own_run),
        )

    def _parents(self) -> Ints:
        """Return the owner around each owner, ``NOTHING`` for none."""
        owners = self.o.owners
        place = {module.path: owner for owner, module in owners.each_module()}
        around = parents_of(module for _, module in owners.each_module() if not module.is_region)
        parent = np.full(len(owners), NOTHING, np.int64)
        for owner, module in owners.each_module():
            outer = around.get(module.path)
            if outer is not None:
                parent[owner] = place[outer]
        return parent

    def _around(self, chosen: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yield these blocks with their owners, then those with an owner around that, and so on."""
        owner = self.blocks.owner[chosen]
        while len(chosen):
            yield chosen, owner
            owner = self.parent[owner]
            inside = owner >= 0
            chosen, owner = chosen[inside], owner[inside]

    # Modules -------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Account for all devices and all owners."""
        numbers = distinct(self.reported.device)
        devices = sorted(
            map(self._device, numbers),
            key=lambda device: (device.device == HOST, -device.peak_bytes),
        )
        counted = [device for device in devices if device.device != HOST] or devices
        of_owner = self._of_owners(counted)
        return Memory(tuple(devices), of_owner, self.blocks, self.kinds, self.allocated)

    def _of_owners(self, devices: list[MemoryOfDevice]) -> tuple[MemoryOfModule, ...]:
        owners, blocks = len(self.o.owners), self.blocks
        recorded = (blocks.came >= 0) & ~self.kinds.optimizer
        recorded &= is_in(blocks.device, [device.device for device in devices])
        begun = self._first_nodes()
        own_kept, kept_bytes, frees = (
            np.zeros((owners, len(self.passes.start)), np.int64) for _ in range(3)
        )
        of_each = np.flatnonzero(recorded & self.kinds.activation)
        np.add.at(own_kept, (blocks.owner[of_each], self.kinds.run[of_each]), blocks.size[of_each])
        for chosen, owner in self._around(of_each):
            run = self.kinds.run[chosen]
            np.add.at(kept_bytes, (owner, run), blocks.size[chosen])
            # What is freed before the module's own backward is not for its backward.
            needed = self.until[chosen] >= begun[owner, run]
            np.add.at(frees, (owner[needed], run[needed]), blocks.size[chosen][needed])
        staying = find_staying(
            self.events, self.o, blocks, self.until, self.kinds.activation, begun, frees
        )
        frees = np.maximum(frees - staying, 0)
        at_peak, total_at_peak, peak, total_peak = (np.zeros(owners, np.int64) for _ in range(4))
        for device in devices:
            on_device = np.flatnonzero(recorded & (blocks.device == device.device))
            _, first = self._peak_of(device.device)
            live = on_device[blocks.live_at(first)[on_device]]
            np.add.at(at_peak, blocks.owner[live], blocks.size[live])
            peak += self._own_peaks([(on_device, blocks.owner[on_device])])
            total_peak += self._own_peaks(list(self._around(on_device)))
            for chosen, owner in self._around(live):
                np.add.at(total_at_peak, owner, blocks.size[chosen])
        columns = (
            self._typical(own_kept),
            at_peak,
            peak,
            self._typical(kept_bytes),
            total_at_peak,
            total_peak,
            self._typical(frees),
        )
        return tuple(
            MemoryOfModule(*numbers)
            for numbers in zip(*(column.tolist() for column in columns), strict=True)
        )

    def _first_nodes(self) -> Ints:
        """Return when each owner's backward begins in each pass, with all that is inside it."""
        begun = np.full((len(self.o.owners), len(self.passes.start)), FAR)
        nodes = np.flatnonzero(self.spans.is_node & (self.passes.of_span >= 0))
        owner, run, start = (
            column[nodes] for column in (self.o.owner, self.passes.of_span, self.spans.start)
        )
        while len(owner):
            np.minimum.at(begun, (owner, run), start)
            owner = self.parent[owner]
            inside = owner >= 0
            owner, run, start = owner[inside], run[inside], start[inside]
        return begun

    def _own_peaks(self, blocks_and_owners: list[tuple[Ints, Ints]]) -> Ints:
        """Return the most that each owner has at one moment, from its blocks."""
        chosen = np.concatenate(
            [np.empty(0, np.int64), *(indices for indices, _ in blocks_and_owners)]
        )
        owner = np.concatenate([np.empty(0, np.int64), *(owner for _, owner in blocks_and_owners)])
        peaks = np.zeros(len(self.o.owners), np.int64)
        if len(chosen):
            blocks = self.blocks
            owner = np.concatenate([owner, owner])
            entry = np.concatenate([blocks.came[chosen], blocks.went[chosen]])
            change = np.concatenate([blocks.size[chosen], -blocks.size[chosen]])
            order = np.argsort(owner * (len(self.reported) + 1) + entry, kind="stable")
            owner = owner[order]
            # Each owner's changes sum to 0, so the next owner begins at 0.
            allocated = np.cumsum(change[order])
            first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
            peaks[owner[first]] = np.maximum.reduceat(allocated, first)
        return peaks

    def _typical(self, by_pass: Ints) -> Ints:
        """Return the median over the steps that have any, of the most that a pass of a step has."""
        by_step = np.zeros((len(by_pass), self.o.steps.count), np.int64)
        np.maximum.at(by_step.T, self.o.steps.of_pass, by_pass.T)
        ordered, present = np.sort(by_step, axis=1), np.count_nonzero(by_step, axis=1)
        middle = np.minimum(by_step.shape[1] - present + (present - 1) // 2, by_step.shape[1] - 1)
        medians: Ints = np.take_along_axis(ordered, np.maximum(middle, 0)[:, None], axis=1)[:, 0]
        return medians

    # Devices -------------------------------------------------------------------------------------

    def _peak_of(self, device: int) -> tuple[Ints, int]:
        """Return the entries of a device, and the one at which its peak is reached first."""
        entries = np.flatnonzero(self.reported.device == device)
        return entries, int(entries[np.argmax(self.allocated[entries])])

    def _device(self, device: int) -> MemoryOfDevice:
        reported, blocks = self.reported, self.blocks
        entries, peak_entry = self._peak_of(device)
        before = 0
        if device != HOST:
            before = max(0, int(self.allocated[entries[0]] - reported.size[entries[0]]))
        at_ns, peak = int(reported.time[peak_entry]), int(self.allocated[peak_entry])
        old = (blocks.device == device) & (blocks.came < 0)
        still = before - int(blocks.size[old & (blocks.went <= peak_entry)].sum()) if before else 0
        live = np.flatnonzero(
            (blocks.device == device) & (blocks.came >= 0) & blocks.live_at(peak_entry)
        )
        shares = self._shares(live)
        if still > 0:
            shares.append(MemoryShare(BEFORE, "", "before", still, 0))
        left = peak - sum(share.bytes for share in shares)
        if left:
            shares.append(MemoryShare(UNACCOUNTED, "", "other", left, 0))
        shares.sort(key=lambda share: (-share.bytes, share.path, share.kind))
        path, phase = self._place(peak_entry)
        return MemoryOfDevice(
            device=device,
            peak_bytes=peak,
            peak_ns=at_ns,
            peak_path=path,
            peak_phase=phase,
            peak_step=self._step_at(at_ns, phase),
            before_bytes=before,
            reserved_bytes=max(0, int(reported.reserved[entries].max())),
            reserved_at_peak_bytes=max(0, int(reported.reserved[peak_entry])),
            live=tuple(shares),
            least_by_step=self._least_by_step(entries, before),
            timeline=self._timeline(device, entries, peak_entry, before),
        )

    def _step_at(self, at_ns: int, phase: str) -> int:
        """Return the step that a moment is in: by the marks, or else by the passes around it."""
        steps, ends = self.o.steps, self.passes.end
        if len(steps.start):
            return max(0, int(np.searchsorted(steps.start, at_ns, side="right")) - 1)
        # An optimizer works for the pass before it; a forward, for the one to come.
        coming = int(np.searchsorted(ends, at_ns)) - (phase == "optimizer")
        return int(steps.of_pass[min(max(coming, 0), len(ends) - 1)])

    def _shares(self, live: Ints) -> list[MemoryShare]:
        kinds = len(_KINDS)
        kind = self.kinds.of_block[live]
        keys, key_of = numbered(self.blocks.owner[live] * kinds + kind)
        bytes_of = np.zeros(len(keys), np.int64)
        np.add.at(bytes_of, key_of, self.blocks.size[live])
        count = np.bincount(key_of, minlength=len(keys))
        by_place: dict[tuple[str, str, MemoryKind], tuple[int, int]] = {}
        for key, size, blocks in zip(keys.tolist(), bytes_of.tolist(), count.tolist(), strict=True):
            path, class_name = self._named(key // kinds, _KINDS[key % kinds])
            place = path, class_name, _KINDS[key % kinds]
            sums = by_place.get(place, (0, 0))
            by_place[place] = sums[0] + size, sums[1] + blocks
        return [MemoryShare(*place, *sums) for place, sums in by_place.items()]

    def _named(self, owner: int, kind: MemoryKind) -> tuple[str, str]:
        """Return the path and the class of who has blocks of a kind."""
        return (OPTIMIZER, "") if kind == "optimizer" else self.o.owners.named(owner)

    def _place(
        self, entry: int
    ) -> tuple[str, Literal["forward", "backward", "optimizer", "other"]]:
        """Return who makes an entry, and what it works for."""
        block = int(np.flatnonzero((self.blocks.came == entry) | (self.blocks.went == entry))[0])
        kind = _KINDS[int(self.kinds.of_block[block])]
        path, _ = self._named(int(self.blocks.owner[block]), kind)
        if kind == "optimizer":
            return path, "optimizer"
        if kind in ("recomputed", "gradient", "backward"):
            return path, "backward"
        return path, "forward" if self.blocks.span[block] >= 0 else "other"

    def _least_by_step(self, entries: Ints, before: int) -> tuple[int, ...]:
        last = np.flatnonzero(
            np.append(self.o.steps.of_pass[1:] != self.o.steps.of_pass[:-1], True)
        )
        begins = np.searchsorted(self.reported.time[entries], self.passes.start[last])
        allocated = np.append(before, self.allocated[entries])
        least = np.minimum.reduceat(allocated, begins)
        return tuple(least[:-1].tolist())

    def _timeline(self, device: int, entries: Ints, peak_entry: int, before: int) -> MemoryTimeline:
        """Return the highest moment of each of many equal parts of the recording."""
        reported, blocks = self.reported, self.blocks
        time, allocated = reported.time[entries], self.allocated[entries]
        width = max(1, -(-int(time[-1] - time[0] + 1) // _MOMENTS))
        begins = np.flatnonzero(np.diff((time - time[0]) // width, prepend=-1))
        most = np.maximum.reduceat(allocated, begins)
        most = np.flatnonzero(allocated == np.repeat(most, np.diff(begins, append=len(time))))
        chosen = entries[most[np.searchsorted(most, begins)]]
        recorded = (blocks.device == device) & (blocks.came >= 0)
        live = np.flatnonzero(recorded & blocks.live_at(peak_entry))
        names, of_owner = self._repeated()
        layers = of_owner[blocks.owner]
        at_peak = np.zeros(len(names), np.int64)
        np.add.at(at_peak, layers[live], blocks.size[live])
        ranked = np.argsort(-at_peak, kind="stable")[:_PLOTTED]
        ranked = ranked[at_peak[ranked] > _LEAST_PLOTTED * self.allocated[peak_entry]]
        by_owner = [
            self._held(np.flatnonzero(recorded & (layers == number)), chosen)
            for number in ranked.tolist()
        ]
        is_old = (blocks.device == device) & (blocks.came < 0) & (device != HOST)
        old = self._held(np.flatnonzero(is_old), chosen)
        unknown = before - int(blocks.size[is_old].sum())
        return MemoryTimeline(
            paths=(BEFORE, *(names[number] for number in ranked.tolist())),
            ns=tuple(reported.time[chosen].tolist()),
            allocated_bytes=tuple(self.allocated[chosen].tolist()),
            bytes_by_path=tuple(tuple(column.tolist()) for column in (old + unknown, *by_owner)),
        )

    def _repeated(self) -> tuple[list[str], Ints]:
        """Return the name of each owner, repeated layers as one, and the name that each has."""
        alike: dict[tuple[str, str], list[int]] = {}
        for owner in range(len(self.o.owners)):
            path, class_name = self.o.owners.named(owner)
            alike.setdefault((numberless(path), class_name), []).append(owner)
        names, of_owner = [], np.zeros(len(self.o.owners), np.int64)
        for number, ((pattern, _), owners) in enumerate(alike.items()):
            names.append(pattern if len(owners) > 1 else self.o.owners.path(owners[0]))
            of_owner[owners] = number
        return names, of_owner

    def _held(self, chosen: Ints, entries: Ints) -> Ints:
        """Return the bytes of some blocks that are live after each of these entries."""
        blocks = self.blocks
        live_bytes = np.zeros(len(entries), np.int64)
        for edge, sign in ((blocks.came, 1), (blocks.went, -1)):
            order = chosen[np.argsort(edge[chosen], kind="stable")]
            summed = np.append(0, np.cumsum(blocks.size[order]))
            live_bytes += sign * summed[np.searchsorted(edge[order], entries, side="right")]
        return live_bytes
