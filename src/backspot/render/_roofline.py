"""The points and roofs of a roofline plot: what modules achieve, and what their device can do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from backspot.formatting import percent
from backspot.results.costs import Row
from backspot.results.limits import LimitOfModule, Peaks
from backspot.results.report import Report

_ROOFS = 3


@dataclass(frozen=True, slots=True)
class Point:
    """The backward of a module, repeated layers as one; ``intensity`` is operations per byte."""

    row: Row
    limit: LimitOfModule
    intensity: float
    tflops: float

    @property
    def name(self) -> str:
        """The module, or how many repeated layers these are."""
        row = self.row
        return f"{row.members} × {row.name}" if row.members > 1 else row.name

    @property
    def said(self) -> str:
        """What it achieves, as one text."""
        one = self.limit
        parts = [f"{self.tflops:,.3g} TFLOP/s", f"{self.intensity:,.3g} FLOP/byte"]
        if one.of_peak is not None:
            parts.append(f"{percent(one.of_peak)} of the peak")
        if one.bound is not None:
            parts.append(f"bound by {one.bound}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Roofline:
    """All points, those with the most device time first, and what the device can do.

    Attributes:
        roofs: the peak in TFLOP/s of each type of number that is multiplied, the most used first.
    """

    points: tuple[Point, ...]
    peaks: Peaks
    roofs: dict[str, float]


def roofline(report: Report) -> Roofline | None:
    """Return what to plot; ``None`` without a known device, or if no module has a known limit."""
    if report.peaks is None or not report.peaks.gbps:
        return None
    points = []
    used: Counter[str] = Counter()
    for row in sorted(report.top(by="pattern"), key=lambda row: -row.gpu_ns):
        limit = report.limit(row) if row.is_module else None
        if limit is None or limit.of_peak is None or not limit.intensity or not limit.tflops:
            continue
        points.append(Point(row, limit, limit.intensity, limit.tflops))
        if row.work is not None:
            used.update(row.work.flops_by_type)
    roofs = {kind: report.peaks.tflops[kind] for kind, _ in used.most_common(_ROOFS)}
    return Roofline(tuple(points), report.peaks, roofs) if points else None
