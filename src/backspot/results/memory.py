"""What is in memory: the peak of each device by module and kind, and what each module keeps.

All sizes are whole bytes. A block of memory belongs to the module whose forward or backward
allocated it, until it is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec

from backspot.formatting import size
from backspot.presented import public
from backspot.results.quantities import Count

MemoryKind = Literal[
    "before",
    "activation",
    "recomputed",
    "gradient",
    "backward",
    "forward",
    "optimizer",
    "other",
]
_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""As ``Count``, but below 0 where more is freed than was there at the start."""

BEFORE = "(before the recording)"
"""The path of what was allocated before the recording: parameters, optimizer state, …"""
OPTIMIZER = "(optimizer)"
"""The path of what optimizers allocated."""
UNACCOUNTED = "(not accounted for)"
"""The path of what the allocator counts although no recorded block explains it."""
ALLOCATOR = "(allocator)"
"""The path of what the allocator has from the device and has not given out."""
HOST = -1
"""The index of the host among the devices."""


@public
@dataclass(frozen=True, slots=True)
class MemoryShare:
    """What one owner has in memory at the peak of a device, of one kind.

    Attributes:
        path: Path of the module that allocated the blocks, as in its row; or a name in parentheses:
            ``(before the recording)``, ``(optimizer)``, ``(outside model)``, …; ``(not accounted
            for)`` is what the allocator counts although no recorded block explains it.
        class_name: Class of the module, ``""`` if the owner is not a module.
        kind: ``before`` (allocated before the recording: parameters, optimizer state, gradients
            that were kept), ``activation`` (allocated in forward and still live when the backward
            begins), ``recomputed`` (allocated by forward code that checkpointing runs again),
            ``gradient`` (allocated in backward and live after it: gradients of parameters),
            ``backward`` (gradients of activations, and workspace of the backward), ``forward``
            (freed before the backward begins), ``optimizer`` or ``other``.
        bytes: Size of the blocks together. Negative only for ``(not accounted for)``.
        blocks: Number of blocks, 0 where it is not known.
    """

    path: str
    class_name: str
    kind: MemoryKind
    bytes: Count
    blocks: Count


@public
@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """A device's memory over the recording, at moments in the order of time.

    At most some hundred moments: the highest of each of many equal parts of the recording, and so
    the peak. The columns have one entry a moment.

    Attributes:
        paths: The modules that hold the most at the peak, after ``(before the recording)``. Layers
            that repeat are one: ``blocks.*.mlp.fc1``.
        ns: The moments, in nanoseconds from the first event of the trace.
        allocated_bytes: What the allocator has given out.
        bytes_by_path: For each of ``paths`` what it has. The rest belongs to all others.
    """

    paths: tuple[str, ...]
    ns: tuple[Count, ...]
    allocated_bytes: tuple[Count, ...]
    bytes_by_path: tuple[tuple[_Bytes, ...], ...]


@public
@dataclass(frozen=True, slots=True)
class MemoryOfDevice:
    """The memory of one device over the recording, and what is in it at the peak.

    Attributes:
        device: Index of the device, -1 for the host. PyTorch counts the host's memory only while it
            records, so the figures of the host are those of the blocks that it allocates during
            the recording.
        peak_bytes: The most that the allocator had given out. On CUDA this equals
            ``torch.cuda.max_memory_allocated()`` over the recording.
        peak_ns: When the peak is reached first, in nanoseconds from the first event of the trace.
        peak_path: Path of the owner whose allocation reaches the peak.
        peak_phase: What that owner does: ``forward``, ``backward``, ``optimizer`` or ``other``.
        peak_step: Index of the step that reaches the peak.
        before_bytes: What was allocated before the recording, 0 for the host.
        reserved_bytes: The most that the allocator had from the device; 0 on the host.
        reserved_at_peak_bytes: What the allocator has from the device at the peak.
        live: What is live at the peak, the largest first. The shares sum to ``peak_bytes`` exactly.
        least_by_step: The least that is allocated from the start of the last backward pass of each
            step until that of the next step, so one entry fewer than steps. It grows if tensors are
            held over steps.
        timeline: The memory over the recording.
    """

    device: int
    peak_bytes: Count
    peak_ns: Count
    peak_path: str
    peak_phase: Literal["forward", "backward", "optimizer", "other"]
    peak_step: Count
    before_bytes: Count
    reserved_bytes: Count
    reserved_at_peak_bytes: Count
    live: tuple[MemoryShare, ...]
    least_by_step: tuple[int, ...]
    timeline: MemoryTimeline

    def __repr__(self) -> str:
        return f"<Memory of {self.name}: peak {size(self.peak_bytes)}, {self.peak_phase}>"

    @property
    def name(self) -> str:
        """``CPU``, or ``GPU 0``."""
        return "CPU" if self.device == HOST else f"GPU {self.device}"

    @property
    def kinds(self) -> dict[MemoryKind, int]:
        """The bytes of each kind at the peak, the largest first."""
        sums: dict[MemoryKind, int] = {}
        for share in self.live:
            sums[share.kind] = sums.get(share.kind, 0) + share.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


@public
@dataclass(frozen=True, slots=True)
class MemoryOfModule:
    """What a module has in memory: on the devices, or on the host in a trace without devices.

    Bytes of a typical step. ``total_*`` includes the modules inside.

    Attributes:
        kept_bytes: What its forward allocates and keeps until the backward begins.
        at_peak_bytes: What it has at the peak of the device, of all kinds.
        peak_bytes: The most that it has at one moment of the recording. ``None`` for a group of
            modules, because their peaks do not add up.
        total_kept_bytes: ``kept_bytes`` of this module and all modules inside it.
        total_at_peak_bytes: ``at_peak_bytes`` of this module and all modules inside it.
        total_peak_bytes: As ``peak_bytes``, of this module and all modules inside it together.
        checkpoint_frees_bytes: An estimate of what is no longer kept from forward to backward if
            this module is checkpointed as a whole. Its output stays if the operator that runs next
            saves it; its input counts against it if nothing else keeps the input. Both are read
            from neighbouring operators; where these leave it open, the estimate is too large. 0 if
            checkpointing frees nothing. The price is the module's forward once more:
            ``total_forward_ns`` of the row.
    """

    kept_bytes: Count
    at_peak_bytes: Count
    peak_bytes: Count | None
    total_kept_bytes: Count
    total_at_peak_bytes: Count
    total_peak_bytes: Count | None
    checkpoint_frees_bytes: Count


def summed_memory(
    members: Sequence[MemoryOfModule | None],
    outer: Sequence[MemoryOfModule | None],
    target: MemoryOfModule | None = None,
    *,
    has_all: bool = False,
) -> MemoryOfModule | None:
    """Return the memory of a row that takes in others, ``None`` where none is known.

    Args:
        outer: the memory of those members that lie in no other one.
        target: the memory of the module that stays, if the others are inside it.
        has_all: whether these are all modules inside it.
    """
    known = [one for one in members if one is not None]
    if not known:
        return None
    outermost = [target] if target else [one for one in outer if one is not None]
    alone = known[0].peak_bytes if len(members) == 1 else None
    return MemoryOfModule(
        kept_bytes=sum(one.kept_bytes for one in known),
        at_peak_bytes=sum(one.at_peak_bytes for one in known),
        peak_bytes=target.total_peak_bytes if target and has_all else alone,
        total_kept_bytes=sum(one.total_kept_bytes for one in outermost),
        total_at_peak_bytes=sum(one.total_at_peak_bytes for one in outermost),
        total_peak_bytes=outermost[0].total_peak_bytes if len(outermost) == 1 else None,
        checkpoint_frees_bytes=sum(one.checkpoint_frees_bytes for one in outermost),
    )
