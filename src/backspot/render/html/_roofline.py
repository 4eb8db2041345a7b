"""The roofline, as a plot for the page."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from backspot.formatting import duration, percent
from backspot.render.html._fragments import shown
from backspot.render.html._plots import across, below, figure, reachable, stretched
from backspot.results.costs import Row
from backspot.results.limits import LimitOfModule
from backspot.results.report import Report

_NUMBERED = 8
_MOST_POINTS = 200
_ROOFS = 3


@dataclass(frozen=True, slots=True)
class _Point:
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
        limit = self.limit
        facts = [f"{self.tflops:,.3g} TFLOP/s", f"{self.intensity:,.3g} FLOP/byte"]
        if limit.of_peak is not None:
            facts.append(f"{percent(limit.of_peak)} of the peak")
        if limit.bound is not None:
            facts.append(f"bound by {limit.bound}")
        return ", ".join(facts)


def roofline(report: Report) -> str:
    """The roofline; nothing without a known device, or if no module has a known limit."""
    peaks = report.peaks
    if peaks is None or not peaks.gbps:
        return ""
    points = []
    used: Counter[str] = Counter()
    for row in sorted(report.top(by="pattern"), key=lambda row: -row.gpu_ns):
        limit = report.limit(row) if row.is_module else None
        if limit and limit.of_peak is not None and limit.intensity and limit.tflops:
            points.append(_Point(row, limit, limit.intensity, limit.tflops))
            used.update(row.work.flops_by_type if row.work else {})
    if not points:
        return ""
    points = points[:_MOST_POINTS]
    roofs = {kind: peaks.tflops[kind] for kind, _ in used.most_common(_ROOFS)}
    highest = max([*roofs.values(), *(point.tflops for point in points)])
    low, high = _decades(min(point.tflops for point in points), highest)
    ridges = [1e3 * peak / peaks.gbps for peak in roofs.values()]
    intensities = [point.intensity for point in points]
    least, most = _decades(min(*intensities, *ridges), 3 * max(*intensities, *ridges))

    def x(intensity: float) -> float:
        return 100 * (math.log10(intensity) - least) / (most - least)

    def y(tflops: float) -> float:
        return 100 - 100 * (math.log10(tflops) - low) / (high - low)

    parts = [across(y(10.0**power), _power(power)) for power in range(low, high + 1)]
    powers = range(least, most + 1)
    parts += [below(index, x(10.0**power), _power(power)) for index, power in enumerate(powers)]
    begin = max(10.0**least, 1e3 * 10.0**low / peaks.gbps)
    for number, (kind, peak) in enumerate(roofs.items()):
        ridge = 1e3 * peak / peaks.gbps
        corners = [(begin, begin * peaks.gbps / 1e3), (ridge, peak), (10.0**most, peak)]
        drawn = " ".join(f"{x(intensity):.2f},{y(tflops):.2f}" for intensity, tflops in corners)
        parts.append(stretched(f'<polyline class="roof r{number}" points="{drawn}"/>'))
        parts.append(
            f'<text x="100%" y="{y(peak):.2f}%" dy="-6" text-anchor="end">'
            f"{peak:,.0f} TFLOP/s {shown(kind)}</text>"
        )
    parts.append('<text x="100%" y="100%" dy="37" text-anchor="end">FLOP per byte</text>')
    largest = max(point.row.gpu_ns for point in points)
    for number, point in reversed(list(enumerate(points, 1))):
        radius = 4 + 9 * math.sqrt(point.row.gpu_ns / largest)
        left, top = f"{x(point.intensity):.2f}%", f"{y(point.tflops):.2f}%"
        drawn = f'<circle class="point" cx="{left}" cy="{top}" r="{radius:.1f}"/>'
        if number <= _NUMBERED:
            drawn += f'<text class="number" x="{left}" y="{top}" dy="4">{number}</text>'
        parts.append(reachable(f"{point.name}: {point.said}", drawn))
    items = "".join(
        f"<li><b>{number}</b> <code>{shown(point.name)}</code> {shown(point.said)}, "
        f"{duration(point.row.gpu_ns)}</li>"
        for number, point in enumerate(points[:_NUMBERED], 1)
    )
    return figure(
        "Roofline of the backward",
        f"TFLOP/s over FLOP per byte; {peaks.gbps:,.0f} GB/s; larger points take more GPU time; "
        "modules without products of matrices have no point",
        f"Roofline of {peaks.device}: {len(points)} points",
        parts,
        f'<ol class="points">{items}</ol>',
    )


def _decades(least: float, most: float) -> tuple[int, int]:
    """Return the powers of ten around two numbers above 0."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return low, max(high, low + 1)


def _power(power: int) -> str:
    return f"{10.0**power:,.{max(0, -power)}f}"
