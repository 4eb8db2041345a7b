"""The most expensive modules as a bar chart, and the way to the other plots."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, get_args

from backspot.errors import MissingDependencyError, UsageError
from backspot.formatting import quoted, visible
from backspot.render._terminal import keep_end
from backspot.render._words import KINDS
from backspot.render.plot_limits import plot_memory, plot_roofline
from backspot.render.view import View, only_nodes, operators_by, select
from backspot.results.costs import Row, Sort, time_of
from backspot.results.report import By, PlotKind, Report
from backspot.trace.names import short_node_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

_COLOURS = {
    "gpu": "#4a86c0",
    "communication": "#9a72c0",
    "queued": "#8497a1",
    "sync": "#d65a4c",
    "host": "#c98a1b",
}
_PLAIN = "#6f8dab"
_LONGEST = 44  # characters of a name
_TITLES: dict[Sort, str] = {
    "wall": "wall time in the backward",
    "gpu": "GPU time in the backward",
    "cpu": "CPU time in the backward",
    "saves": "what a step would save",
}


def plot(
    report: Report,
    *,
    kind: PlotKind,
    top: int,
    depth: int | None,
    sort: Sort,
    by: By,
    ax: Axes | None,
) -> Axes:
    """Draw a report; the arguments are those of ``Report.plot``.

    Raises:
        MissingDependencyError: If matplotlib is not installed.
        UsageError: If ``ax`` is not matplotlib axes, or what ``kind`` needs was not recorded.
    """
    if kind not in get_args(PlotKind):
        names = ", ".join(get_args(PlotKind))
        raise UsageError(f"plot({quoted(kind)}): choose one of {names}")
    if ax is not None and not hasattr(ax, "barh"):
        raise UsageError(f"ax={quoted(ax)}: give matplotlib axes, or None for a new figure")
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            "plot() needs matplotlib: pip install 'backspot[plot]'"
        ) from error
    if kind == "modules":
        bars = _bars(report, View(top, depth, sort, by))
        size = 8, 1.2 + 0.28 * max(1, len(bars.names))
    else:
        size = 8, 4.5
    if ax is None:
        _, ax = plt.subplots(figsize=size, layout="constrained")
    if kind == "memory":
        plot_memory(report, ax)
    elif kind == "roofline":
        plot_roofline(report, ax)
    else:
        _draw(bars, ax)
        ax.set_xlabel(f"{_TITLES[sort]}, ms per {report.per}")
    return ax


@dataclass(frozen=True, slots=True)
class _Bars:
    """What to draw: times in nanoseconds, and what they are spent on as far as that is known."""

    names: list[str]
    times: list[int]
    kinds: dict[str, list[int]]


def _bars(report: Report, view: View) -> _Bars:
    chosen = select(report, view)
    if only_nodes(report):
        return _Bars(*_nodes(report, view.sort, view.top), {})
    kinds = _kinds(report, chosen.shown) if view.sort == "wall" else {}
    return _Bars(*_modules(chosen.shown, view.sort), kinds)


def _draw(bars: _Bars, ax: Axes) -> None:
    scale = 1e6
    places = range(len(bars.names))
    left = [0.0] * len(bars.names)
    for kind, spent in bars.kinds.items():
        widths = [ns / scale for ns in spent]
        ax.barh(places, widths, left=left, color=_COLOURS[kind], label=KINDS[kind])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    if bars.kinds:
        ax.legend(frameon=False, loc="lower right")
    else:
        ax.barh(places, [ns / scale for ns in bars.times], color=_PLAIN)
    # A dollar sign would start a formula.
    shown = [keep_end(visible(name), _LONGEST).replace("$", r"\$") for name in bars.names]
    ax.set_yticks(places, labels=shown)
    ax.invert_yaxis()
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _modules(rows: tuple[Row, ...], sort: Sort) -> tuple[list[str], list[int]]:
    return [row.label for row in rows], [time_of(row, sort) for row in rows]


def _nodes(report: Report, sort: Sort, top: int | None) -> tuple[list[str], list[int]]:
    ranked = operators_by(report, sort)[:top]
    return [short_node_name(one.name) for one in ranked], [time_of(one, sort) for one in ranked]


def _kinds(report: Report, rows: tuple[Row, ...]) -> dict[str, list[int]]:
    """What the rows' wall time is spent on; empty if the report does not know."""
    if not report.has_gpu or any(row.wall_ns and not any(astuple(row.wall_on)) for row in rows):
        return {}
    # Medians of the kinds do not quite sum to the median of the row.
    scales = [row.wall_ns / (sum(astuple(row.wall_on)) or 1) for row in rows]
    kinds = {
        kind: [
            round(scale * getattr(row.wall_on, f"{kind}_ns"))
            for row, scale in zip(rows, scales, strict=True)
        ]
        for kind in KINDS
    }
    return {kind: spent for kind, spent in kinds.items() if any(spent)}
