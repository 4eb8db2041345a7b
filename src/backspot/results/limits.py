"""How far modules are from what the device can do, and the peaks that this is measured against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.presented import public
from backspot.results.costs import Row
from backspot.results.quantities import SELDOM, Measure, Ranking

REACHABLE_COMPUTE, REACHABLE_MEMORY = 0.7, 0.85
"""The shares of the peaks that headroom is measured against: large products of matrices and large
copies reach about as much."""


_MOST_UNKNOWN = 0.5
"""With a larger share of unknown work, what is known says nothing about a module."""


@public
@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device can do at best, without sparsity.

    Attributes:
        device: Name of the device, as the trace has it.
        tflops: Peak by type of number, in 10¹² operations a second: ``bf16``, ``fp16``, ``tf32``,
            ``fp32``, ``fp64``, ``fp8``, as far as known.
        gbps: Peak of the memory's bandwidth, in 10⁹ bytes a second.
        source: Where the numbers are from.
    """

    device: str
    tflops: dict[str, Measure]
    gbps: Measure
    source: str


@public
@dataclass(frozen=True, slots=True)
class LimitOfModule:
    """How fast the backward of a module runs on its device, and what that is of the peak.

    Over its device time in a typical step, with forward work that runs again. ``None`` is unknown.

    Attributes:
        tflops: Achieved 10¹² operations a second.
        gbps: Achieved 10⁹ bytes a second, of those that must move.
        intensity: Operations per byte.
        of_peak: Time that the work would take at the peak, over the time that it takes. Caches can
            make it more than 1.
        bound: The peak that takes longer; ``launch`` if the device idles for most of the clock
            time.
        headroom_ns: Device time in nanoseconds that would be saved at 70% of the peak operations
            and 85% of the bandwidth.
    """

    tflops: float | None
    gbps: float | None
    intensity: float | None
    of_peak: float | None
    bound: Literal["compute", "memory", "launch"] | None
    headroom_ns: int | None


def limit_of(row: Row, peaks: Peaks | None) -> LimitOfModule | None:
    """Return how fast the backward of a row runs; ``None`` without known work or device time."""
    work = row.work
    if work is None or not row.gpu_ns:
        return None
    operations = _together(work.flops, work.recompute_flops)
    moved = _together(work.bytes, work.recompute_bytes)
    if operations is None and moved is None:
        return None
    known_ns = row.gpu_ns * (1 - work.unknown_share)
    tflops = None if operations is None else operations / row.gpu_ns / 1e3
    gbps = None if moved is None else moved / row.gpu_ns
    intensity = operations / moved if operations is not None and moved else None
    computing = None if peaks is None else _computing_ns(work.flops_by_type, peaks)
    if (
        peaks is None
        or computing is None
        or moved is None
        or not known_ns
        or work.unknown_share > _MOST_UNKNOWN
    ):
        return LimitOfModule(tflops, gbps, intensity, None, None, None)
    moving = moved / peaks.gbps if peaks.gbps else 0.0
    reachable = max(computing / REACHABLE_COMPUTE, moving / REACHABLE_MEMORY)
    return LimitOfModule(
        tflops=tflops,
        gbps=gbps,
        intensity=intensity,
        of_peak=max(computing, moving) / known_ns,
        bound=_bound(row, computing, moving),
        headroom_ns=min(max(0, round(known_ns - reachable)), row.gpu_ns),
    )


def share_of_peak(
    rows: Sequence[Row], peaks: Peaks | None, step_ns: int, devices: int = 1
) -> float | None:
    """Return the model FLOPs utilisation of a step: its share of what its devices could compute.

    Forward work that runs again does not count, as it is no work of the model. ``step_ns`` is the
    clock time without the profiler, as far as that is known. ``None`` if a part of the work has no
    known peak, or no work is known.
    """
    if peaks is None or not step_ns:
        return None
    computing_ns = 0.0
    for row in rows:
        if row.work is not None:
            again = (row.work.recompute_flops or 0) / (
                _together(row.work.flops, row.work.recompute_flops) or 1
            )
            times = [_computing_ns(row.work.forward_flops_by_type, peaks)]
            backward = _computing_ns(row.work.flops_by_type, peaks)
            times.append(None if backward is None else backward * (1 - again))
            for time_ns in times:
                if time_ns is None:
                    return None
                computing_ns += time_ns
    return computing_ns / (step_ns * devices) if computing_ns else None


def _computing_ns(by_type: Mapping[str, int], peaks: Peaks) -> float | None:
    """Return how long operations take at the peaks; ``None`` if the peak of a type is not known."""
    if any(kind not in peaks.tflops for kind in by_type):
        return None
    return sum(count / peaks.tflops[kind] / 1e3 for kind, count in by_type.items())


def _bound(row: Row, computing: float, moving: float) -> Literal["compute", "memory", "launch"]:
    on = row.wall_on
    if 2 * (on.host_ns + on.queued_ns + on.sync_ns) > row.wall_ns:
        return "launch"
    return "compute" if computing >= moving else "memory"


def _together(first: int | None, second: int | None) -> int | None:
    return None if first is None and second is None else (first or 0) + (second or 0)


@dataclass(frozen=True, kw_only=True)
class InReport:
    """What each report has.

    Attributes:
        peaks: What the device can do at best; only with ``record_shapes=True`` on a known device.
        mfu: Model FLOPs utilisation (0 to 1), without forward work that runs again; ``None`` where
            it is not known.
    """

    __slots__ = ()

    peaks: Peaks | None = field(default=None, metadata=SELDOM)
    mfu: Measure | None = field(default=None, metadata=SELDOM)

    def limit(self, row: Row) -> LimitOfModule | None:
        """Return how fast the backward of a row runs, and how far it is from the device's limit.

        Args:
            row: A row of this report.

        Returns:
            The limit; ``None`` without known work or device time.

        Raises:
            UsageError: If ``row`` is not a row.

        Example:
            >>> limit = report.limit(report["blocks.0.mlp.fc1"].row)
            >>> f"{limit.tflops:.0f} TFLOP/s, {limit.of_peak:.0%} of {report.peaks.device}"
            '464 TFLOP/s, 47% of NVIDIA H200'
        """
        if not isinstance(row, Row):
            raise UsageError(f"limit({quoted(row)}): give a row; report.modules has them")
        return limit_of(row, self.peaks)


def _weight(report: InReport, row: Row) -> int:
    limit = limit_of(row, report.peaks)
    return -1 if limit is None or limit.headroom_ns is None else limit.headroom_ns


Order = Literal["headroom"]
RANKING = Ranking(_weight, lambda report: report.has_work, "shapes (--shapes)", is_time=True)
"""By the device time that a row would save near the peak of the device."""
