"""Memory over time, as a plot for the page."""

from __future__ import annotations

import math

from backspot.formatting import duration, size
from backspot.render._memory import devices_of, layers_over_time
from backspot.render.html._fragments import shown
from backspot.render.html._plots import across, below, figure, reachable, stretched
from backspot.results.memory import MemoryOfDevice
from backspot.results.report import Report


def memory_over_time(report: Report) -> str:
    """A plot for each device whose memory was recorded."""
    return "".join(_memory(report, device) for device in devices_of(report))


def _memory(report: Report, device: MemoryOfDevice) -> str:
    line = device.timeline
    begin, end = line.ns[0], max(line.ns[-1], line.ns[0] + 1)
    highest = max(*line.allocated_bytes, 1)
    step = _round_step(highest / 4)

    def x(ns: int) -> float:
        return 100 * (ns - begin) / (end - begin)

    def y(bytes_held: float) -> float:
        return 100 - 100 * bytes_held / highest

    marks = [(y(tick * step), size(int(tick * step))) for tick in range(int(highest // step) + 1)]
    drawn = [across(height, text) for height, text in marks]
    spaced = [begin + (end - begin) * tick // 4 for tick in range(5)]
    drawn += [below(index, x(ns), duration(ns - begin)) for index, ns in enumerate(spaced)]
    floor = [0] * len(line.ns)
    legend = []
    at_peak = line.ns.index(device.peak_ns) if device.peak_ns in line.ns else 0
    for number, (name, layer) in enumerate(layers_over_time(report, line)):
        top = [low + more for low, more in zip(floor, layer, strict=True)]
        up = [
            f"{x(ns):.2f},{y(bytes_held):.2f}" for ns, bytes_held in zip(line.ns, top, strict=True)
        ]
        down = [
            f"{x(ns):.2f},{y(bytes_held):.2f}"
            for ns, bytes_held in zip(line.ns, floor, strict=True)
        ]
        text = f"{name}: {size(layer[at_peak])} at the peak, {size(max(layer))} at most"
        band = f'<polygon class="c{number}" points="{" ".join([*up, *reversed(down)])}"/>'
        drawn.append(reachable(text, stretched(band)))
        legend.append(
            f'<li><i class="c{number}" aria-hidden="true"></i>{shown(name)} '
            f"<b>{size(layer[at_peak])}</b></li>"
        )
        floor = top
    peak = f"peak {size(device.peak_bytes)}"
    anchor, shift = ("end", -9) if x(device.peak_ns) > 50 else ("start", 9)
    drawn.append(
        f'<circle class="peak" cx="{x(device.peak_ns):.2f}%" cy="{y(device.peak_bytes):.2f}%" '
        'r="5"/>'
        f'<text class="strong" x="{x(device.peak_ns):.2f}%" y="{y(device.peak_bytes):.2f}%" '
        f'dx="{shift}" dy="4" text-anchor="{anchor}">{peak}</text>'
    )
    label = f"Memory of {device.name} over the recorded steps, {peak}"
    return figure(
        f"Memory of {device.name}",
        "allocated over the recorded steps, by the module that allocated it",
        label,
        drawn,
        f'<ul class="legend" aria-label="At the peak">{"".join(legend)}</ul>',
    )


def _round_step(about: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``about``."""
    power = 10.0 ** math.floor(math.log10(max(about, 1.0)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= about)
