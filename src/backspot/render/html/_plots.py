"""Plots for the page, as SVG that needs no script: memory over time, and the roofline.

Each band and each point can be reached by the keyboard. What it is appears above the plot while it
has the focus or the pointer.

A plot is as wide as its place, and its text keeps its size: points, ticks and text are placed in
per cent of the plot, and areas and lines are stretched to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from backspot.formatting import duration, percent, size
from backspot.render._memory import layers_over_time, shown_devices
from backspot.render.html._fragments import shown
from backspot.results.costs import Row
from backspot.results.limits import LimitOfModule
from backspot.results.memory import MemoryOfDevice
from backspot.results.report import Report

_NUMBERED = 8
_MOST_POINTS = 200
_ROOFS = 3


def plots(report: Report) -> str:
    """The plots of what was recorded; nothing if neither memory nor work was."""
    found = [_memory(report, one) for one in shown_devices(report)]
    drawn = "".join([*found, _roofline(report)])
    return f'<div class="plots">{drawn}</div>' if drawn else ""


# Memory over time --------------------------------------------------------------------------------


def _memory(report: Report, one: MemoryOfDevice) -> str:
    line = one.timeline
    begin, end = line.ns[0], max(line.ns[-1], line.ns[0] + 1)
    highest = max(*line.allocated_bytes, 1)
    step = _round_step(highest / 4)

    def x(ns: int) -> float:
        return 100 * (ns - begin) / (end - begin)

    def y(held: float) -> float:
        return 100 - 100 * held / highest

    marks = [(y(tick * step), size(int(tick * step))) for tick in range(int(highest // step) + 1)]
    parts = [_across(at, text) for at, text in marks]
    spaced = [begin + (end - begin) * tick // 4 for tick in range(5)]
    parts += [_below(at, x(ns), duration(ns - begin)) for at, ns in enumerate(spaced)]
    floor = [0] * len(line.ns)
    legend = []
    at_peak = line.ns.index(one.peak_ns) if one.peak_ns in line.ns else 0
    for number, (name, held) in enumerate(layers_over_time(report, line)):
        top = [low + more for low, more in zip(floor, held, strict=True)]
        up = [f"{x(ns):.2f},{y(of):.2f}" for ns, of in zip(line.ns, top, strict=True)]
        down = [f"{x(ns):.2f},{y(of):.2f}" for ns, of in zip(line.ns, floor, strict=True)]
        text = f"{name}: {size(held[at_peak])} at the peak, {size(max(held))} at most"
        band = f'<polygon class="c{number}" points="{" ".join([*up, *reversed(down)])}"/>'
        parts.append(_reachable(text, _stretched(band)))
        legend.append(
            f'<li><i class="c{number}" aria-hidden="true"></i>{shown(name)} '
            f"<b>{size(held[at_peak])}</b></li>"
        )
        floor = top
    peak = f"peak {size(one.peak_bytes)}"
    anchor, shift = ("end", -9) if x(one.peak_ns) > 50 else ("start", 9)
    parts.append(
        f'<circle class="peak" cx="{x(one.peak_ns):.2f}%" cy="{y(one.peak_bytes):.2f}%" r="5"/>'
        f'<text class="strong" x="{x(one.peak_ns):.2f}%" y="{y(one.peak_bytes):.2f}%" '
        f'dx="{shift}" dy="4" text-anchor="{anchor}">{peak}</text>'
    )
    label = f"Memory of {one.name} over the recorded steps, {peak}"
    return _figure(
        f"Memory of {one.name}",
        "allocated over the recorded steps, by the module that allocated it",
        label,
        parts,
        f'<ul class="legend" aria-label="At the peak">{"".join(legend)}</ul>',
    )


def _round_step(about: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``about``."""
    power = 10.0 ** math.floor(math.log10(max(about, 1.0)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= about)


# Roofline ----------------------------------------------------------------------------------------


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
        one = self.limit
        parts = [f"{self.tflops:,.3g} TFLOP/s", f"{self.intensity:,.3g} FLOP/byte"]
        if one.of_peak is not None:
            parts.append(f"{percent(one.of_peak)} of the peak")
        if one.bound is not None:
            parts.append(f"bound by {one.bound}")
        return ", ".join(parts)


def _roofline(report: Report) -> str:
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

    parts = [_across(y(10.0**power), _power(power)) for power in range(low, high + 1)]
    powers = range(least, most + 1)
    parts += [_below(at, x(10.0**power), _power(power)) for at, power in enumerate(powers)]
    begin = max(10.0**least, 1e3 * 10.0**low / peaks.gbps)
    for number, (kind, peak) in enumerate(roofs.items()):
        ridge = 1e3 * peak / peaks.gbps
        corners = [(begin, begin * peaks.gbps / 1e3), (ridge, peak), (10.0**most, peak)]
        drawn = " ".join(f"{x(at):.2f},{y(of):.2f}" for at, of in corners)
        parts.append(_stretched(f'<polyline class="roof r{number}" points="{drawn}"/>'))
        parts.append(
            f'<text x="100%" y="{y(peak):.2f}%" dy="-6" text-anchor="end">'
            f"{peak:,.0f} TFLOP/s {shown(kind)}</text>"
        )
    parts.append('<text x="100%" y="100%" dy="37" text-anchor="end">FLOP per byte</text>')
    largest = max(point.row.gpu_ns for point in points)
    for number, point in reversed(list(enumerate(points, 1))):
        radius = 4 + 9 * math.sqrt(point.row.gpu_ns / largest)
        at, of = f"{x(point.intensity):.2f}%", f"{y(point.tflops):.2f}%"
        drawn = f'<circle class="point" cx="{at}" cy="{of}" r="{radius:.1f}"/>'
        if number <= _NUMBERED:
            drawn += f'<text class="number" x="{at}" y="{of}" dy="4">{number}</text>'
        parts.append(_reachable(f"{point.name}: {point.said}", drawn))
    items = "".join(
        f"<li><b>{number}</b> <code>{shown(point.name)}</code> {shown(point.said)}, "
        f"{duration(point.row.gpu_ns)}</li>"
        for number, point in enumerate(points[:_NUMBERED], 1)
    )
    return _figure(
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


# Parts -------------------------------------------------------------------------------------------


def _figure(title: str, about: str, label: str, parts: Sequence[str], below: str) -> str:
    return (
        f'<section class="plot"><h2>{shown(title)} <span class="muted">{shown(about)}</span></h2>'
        f'<div class="plot-box"><svg role="group" aria-label="{shown(label)}">{"".join(parts)}'
        f"</svg></div>{below}</section>"
    )


def _stretched(drawn: str) -> str:
    """Areas and lines whose points are in per cent of the plot."""
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{drawn}</svg>'


def _reachable(text: str, drawn: str) -> str:
    said = shown(text)
    return (
        f'<g class="reach" tabindex="0" role="img" aria-label="{said}">{drawn}'
        f'<foreignObject class="said" y="-44" width="100%" height="38" aria-hidden="true">{said}'
        "</foreignObject></g>"
    )


def _across(y: float, text: str) -> str:
    return (
        f'<line x2="100%" y1="{y:.2f}%" y2="{y:.2f}%"/>'
        f'<text x="-8" y="{y:.2f}%" dy="4" text-anchor="end">{text}</text>'
    )


def _below(at: int, x: float, text: str) -> str:
    """The label of a tick; each second one goes where it is narrow."""
    anchor = "end" if x > 98 else "middle"
    kind = ' class="odd"' if at % 2 else ""
    return f'<text{kind} x="{x:.2f}%" y="100%" dy="19" text-anchor="{anchor}">{text}</text>'
