"""What is in memory: the peak of each device by module and kind, and what each module keeps.

All sizes are whole bytes. A block of memory belongs to the module whose forward or backward
allocated it, until it is freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, TypeAlias, TypedDict

import msgspec

from backspot.formatting import percent, size
from backspot.presented import public
from backspot.results.quantities import HOST, SELDOM, Count, OtherCost, Ranking

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


@public
@dataclass(frozen=True, slots=True)
class MemoryShare:
    """What one owner has in memory at the peak of a device, of one kind.

    Attributes:
        path: Path of the row that allocated it, or ``(before the recording)``, ``(optimizer)``, …;
            ``(not accounted for)`` is what the allocator counts although no recorded block explains
            it.
        class_name: Class of the module, or ``""``.
        kind: ``before`` (the recording), ``activation`` (allocated in forward, live when the
            backward begins), ``forward`` (freed before), ``recomputed`` (by checkpointing),
            ``gradient`` (allocated in backward, live after it), ``backward`` (freed before its
            end), ``optimizer`` or ``other``.
        bytes: Size of the blocks. Negative only for ``(not accounted for)``.
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
    """A device's memory over the recording, at some hundred moments in the order of time.

    The columns have one entry a moment; the peak is one of them.

    Attributes:
        paths: What holds the most at the peak; repeated layers are one: ``blocks.*.mlp.fc1``.
        ns: The moments, in nanoseconds from the first event of the trace.
        allocated_bytes: What the allocator has given out.
        bytes_by_path: A column for each of ``paths``.
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
        device: Index of the device, -1 for the host, of which only blocks allocated in the
            recording count.
        peak_bytes: The most that the allocator had given out, as
            ``torch.cuda.max_memory_allocated()`` has it.
        peak_ns: When the peak is reached first, in nanoseconds from the first event of the trace.
        peak_path: The owner whose allocation reaches it.
        peak_phase: In what.
        peak_step: In which step.
        before_bytes: What was allocated before the recording, 0 for the host.
        reserved_bytes: The most that the allocator had from the device, 0 for the host.
        reserved_at_peak_bytes: What it has from the device at the peak.
        live: What is live at the peak, the largest first; sums to ``peak_bytes`` exactly.
        least_by_step: The least that is allocated between the last backward of a step and that of
            the next. It grows if tensors are held over steps.
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

    Attributes:
        kept_bytes: What its forward allocates and keeps until the backward begins.
        at_peak_bytes: What it has at the peak of the device.
        peak_bytes: The most that it has at one moment, ``None`` for a group.
        total_kept_bytes: These bytes with all modules inside.
        total_at_peak_bytes: These bytes with all modules inside.
        total_peak_bytes: These bytes with all modules inside.
        checkpoint_frees_bytes: Estimate of what checkpointing this module frees; the price is
            ``Row.total_forward_ns``.
    """

    kept_bytes: Count
    at_peak_bytes: Count
    peak_bytes: Count | None
    total_kept_bytes: Count
    total_at_peak_bytes: Count
    total_peak_bytes: Count | None
    checkpoint_frees_bytes: Count


class _HasMemory(Protocol):
    @property
    def memory(self) -> MemoryOfModule | None: ...


def _summed(
    rows: Sequence[_HasMemory],
    outer: Sequence[_HasMemory],
    kept_row: _HasMemory | None,
    has_all: bool,
) -> MemoryOfModule | None:
    """Return the memory of a row that takes in others, ``None`` where none is known."""
    memories = [row.memory for row in rows if row.memory is not None]
    if not memories:
        return None
    target = kept_row.memory if kept_row else None
    outermost = [target] if target else [row.memory for row in outer if row.memory is not None]
    alone = memories[0].peak_bytes if len(rows) == 1 else None
    return MemoryOfModule(
        kept_bytes=sum(memory.kept_bytes for memory in memories),
        at_peak_bytes=sum(memory.at_peak_bytes for memory in memories),
        peak_bytes=target.total_peak_bytes if target and has_all else alone,
        total_kept_bytes=sum(memory.total_kept_bytes for memory in outermost),
        total_at_peak_bytes=sum(memory.total_at_peak_bytes for memory in outermost),
        total_peak_bytes=outermost[0].total_peak_bytes if len(outermost) == 1 else None,
        checkpoint_frees_bytes=sum(memory.checkpoint_frees_bytes for memory in outermost),
    )


@dataclass(frozen=True, kw_only=True)
class InRow:
    """What each row has.

    Attributes:
        memory: What it has in memory; only with ``profile_memory=True``.
    """

    __slots__ = ()

    memory: MemoryOfModule | None = field(default=None, metadata={**SELDOM, "summed": _summed})


@dataclass(frozen=True, kw_only=True)
class InReport:
    """What each report has.

    Attributes:
        memory: Memory of each device, the highest peak first, the host last; only with
            ``profile_memory=True``.
        memory_asked: Whether Backspot was asked for the memory (``profile(memory=True)``,
            ``backspot run --memory``). Then a screen begins with it; else, as tutorials record
            memory by habit, with the time.
    """

    __slots__ = ()

    memory: tuple[MemoryOfDevice, ...] = field(default=(), metadata=SELDOM)
    memory_asked: bool = field(default=False, metadata=SELDOM)

    def _contradictions(self, steps: int) -> Iterator[str]:
        for device in self.memory:
            subject = f"the memory of {device.name}"
            if sum(share.bytes for share in device.live) != device.peak_bytes:
                yield f"what is live in {subject} does not sum to its peak_bytes"
            if device.peak_step >= steps:
                yield f"the peak of {subject} is of step {device.peak_step}, of {steps}"
            line = device.timeline
            columns = (line.ns, line.allocated_bytes, *line.bytes_by_path)
            if len(line.paths) != len(line.bytes_by_path) or len(set(map(len, columns))) > 1:
                yield f"the columns of {subject} over time have different lengths"
        if len({device.device for device in self.memory}) < len(self.memory):
            yield "it has a device in memory twice"


class InProfile(TypedDict, total=False):
    """What ``profile`` takes.

    Attributes:
        memory: whether to record what is in memory, for ``Report.memory``, in three steps of their
            own. Default false.
    """

    memory: bool


def _weight(_: InReport, row: InRow) -> int:
    return -1 if row.memory is None else row.memory.at_peak_bytes


class _Holding:
    """What holds memory in place of taking time."""

    __slots__ = ()

    held_bytes: Count | None

    def _other_cost(self) -> OtherCost | None:
        bytes_held = self.held_bytes
        if bytes_held is None:
            return None

        def share(report: InReport) -> str:
            peak = report.memory[0].peak_bytes if report.memory else 0
            return f"{percent(bytes_held / peak if peak else 0.0)} of the peak"

        return OtherCost(bytes_held, size(bytes_held), share)


@dataclass(frozen=True, kw_only=True)
class InPlace(_Holding):
    """What each place of a finding has.

    Attributes:
        held_bytes: What it has in memory there; ``None`` unless the finding is about memory.
    """

    __slots__ = ()

    held_bytes: Count | None = field(default=None, metadata=SELDOM)


@dataclass(frozen=True, kw_only=True)
class InFinding(_Holding):
    """What each finding has.

    Attributes:
        held_bytes: What the cause has in memory; ``None`` if the finding is about time. About
            memory, ``wall_ns`` is 0.
    """

    __slots__ = ()

    held_bytes: Count | None = field(default=None, metadata=SELDOM)


Order = Literal["memory"]
RANKING = Ranking(_weight, lambda report: bool(report.memory), "memory (--memory)", is_time=False)
"""By what rows have in memory at the peak."""
