"""Memory over time, and the roofline, as matplotlib plots."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from backspot.errors import UsageError
from backspot.formatting import size, visible
from backspot.render._memory import layers_over_time
from backspot.render._roofline import roofline
from backspot.results.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_memory", "plot_roofline"]

_NAMED = 8
_OLD, _OTHERS = "#c9ced4", "#e4dcc8"


def plot_memory(report: Report, ax: Axes) -> None:
    """Draw what is allocated over the recorded steps, by module.

    Raises:
        UsageError: If memory was not recorded.
    """
    if not report.memory:
        raise UsageError(
            "the report has no memory: record it with profile(memory=True), or with "
            "torch.profiler.profile(profile_memory=True)"
        )
    one = report.memory[0]
    line = one.timeline
    layers = layers_over_time(report, line)
    at = [(ns - line.ns[0]) / 1e6 for ns in line.ns]
    colours = [f"C{number}" for number in range(10)]
    ax.stackplot(
        at,
        *([held / 1e9 for held in each] for _, each in layers),
        labels=[_plain(name) for name, _ in layers],
        colors=[_OLD, *colours[: len(layers) - 2], _OTHERS],
    )
    peak = (one.peak_ns - line.ns[0]) / 1e6, one.peak_bytes / 1e9
    ax.plot(*peak, "o", color="#c23b2c")
    ax.annotate(
        f"peak {size(one.peak_bytes)}", peak, xytext=(8, 0), textcoords="offset points", va="center"
    )
    ax.set_xlabel("ms")
    ax.set_ylabel(f"memory of {one.name}, GB")
    ax.margins(x=0)
    handles, names = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], names[::-1], frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def plot_roofline(report: Report, ax: Axes) -> None:
    """Draw what modules achieve in the backward below what their device can do.

    Raises:
        UsageError: If no module has a known limit.
    """
    lines = roofline(report)
    if lines is None:
        raise UsageError(
            "the report has no roofline: record shapes with profile(shapes=True), or with "
            "torch.profiler.profile(record_shapes=True); for a device that Backspot does not know, "
            "give locate() peak_tflops= and peak_gbps="
        )
    points, peaks = lines.points, lines.peaks
    ridges = [1e3 * peak / peaks.gbps for peak in lines.roofs.values()]
    intensities = [point.intensity for point in points]
    least = min(*intensities, *ridges) / 3
    most = 3 * max(*intensities, *ridges)
    for number, (kind, peak) in enumerate(lines.roofs.items()):
        ridge = 1e3 * peak / peaks.gbps
        ax.plot(
            [least, ridge, most],
            [least * peaks.gbps / 1e3, peak, peak],
            color="black" if not number else "grey",
            linestyle="-" if not number else "--",
            label=f"{peak:,.0f} TFLOP/s {kind}, {peaks.gbps:,.0f} GB/s",
        )
    largest = max(point.row.gpu_ns for point in points)
    ax.scatter(
        intensities,
        [point.tflops for point in points],
        s=[20 + 180 * point.row.gpu_ns / largest for point in points],
        color="#3a78b5",
        edgecolor="white",
        zorder=3,
    )
    for point in points[:_NAMED]:
        radius = math.sqrt(20 + 180 * point.row.gpu_ns / largest) / 2
        ax.annotate(
            _plain(point.name),
            (point.intensity, point.tflops),
            xytext=(radius + 2, -3),
            textcoords="offset points",
            fontsize="small",
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(least, most)
    ax.set_xlabel("FLOP per byte, in the backward")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(peaks.device)
    ax.legend(frameon=False, loc="lower right")


def _plain(name: str) -> str:
    # A dollar sign would start a formula, and an underscore hide an entry of the legend.
    text = visible(name).replace("$", r"\$")
    return f"\N{ZERO WIDTH SPACE}{text}" if text.startswith("_") else text
