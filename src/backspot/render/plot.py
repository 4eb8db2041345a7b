"""The most expensive modules as a bar chart."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from backspot.errors import MissingDependencyError, UsageError
from backspot.formatting import quoted, visible
from backspot.render._sentences import KINDS
from backspot.render._terminal import keep_end
from backspot.render.view import View, only_nodes, operators_by, select
from backspot.results.report import By, Report, Row, Sort, time_of
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
    report: Report, *, top: int, depth: int | None, sort: Sort, by: By, ax: Axes | None
) -> Axes:
    """Draw the modules' times per step; the arguments are those of ``Report.plot``.

    Raises:
        MissingDependencyError: If matplotlib is not installed.
        UsageError: If ``ax`` is not matplotlib axes.
    """
    if ax is not None and not hasattr(ax, "barh"):
        raise UsageError(f"ax={quoted(ax)}: give matplotlib axes, or None for a new figure")
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            "plot() needs matplotlib: pip install 'backspot[plot]'"
        ) from error
    chosen = select(report, View(top, depth, sort, by))
    labelled = not only_nodes(report)
    names, times = _modules(chosen.shown, sort) if labelled else _nodes(report, sort, top)
    if ax is None:
        height = 1.2 + 0.28 * max(1, len(names))
        _, ax = plt.subplots(figsize=(8, height), layout="constrained")
    scale = 1e6
    places = range(len(names))
    kinds = _kinds(report, chosen.shown) if sort == "wall" and labelled else {}
    left = [0.0] * len(names)
    for kind, spent in kinds.items():
        widths = [ns / scale for ns in spent]
        ax.barh(places, widths, left=left, color=_COLOURS[kind], label=KINDS[kind])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    if kinds:
        ax.legend(frameon=False, loc="lower right")
    else:
        ax.barh(places, [ns / scale for ns in times], color=_PLAIN)
    # A dollar sign would start a formula.
    shown = [keep_end(visible(name), _LONGEST).replace("$", r"\$") for name in names]
    ax.set_yticks(places, labels=shown)
    ax.invert_yaxis()
    ax.set_xlabel(f"{_TITLES[sort]}, ms per {report.per}")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def _modules(rows: tuple[Row, ...], sort: Sort) -> tuple[list[str], list[int]]:
    return [row.label for row in rows], [time_of(row, sort) for row in rows]


def _nodes(report: Report, sort: Sort, top: int) -> tuple[list[str], list[int]]:
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
