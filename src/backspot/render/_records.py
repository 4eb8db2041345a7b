"""A row as a flat record: the columns that the CSV file and the data frame share."""

from __future__ import annotations

from backspot.render._story import heaviest, heaviest_line
from backspot.report import Report, Row

__all__ = ["COLUMNS", "record"]

_FIELDS = (
    "path",
    "class_name",
    "root",
    "is_module",
    "members",
    "calls",
    "wall_ns",
    "gpu_ns",
    "cpu_ns",
    "forward_ns",
    "recompute_ns",
    "total_wall_ns",
    "total_gpu_ns",
    "total_cpu_ns",
    "total_forward_ns",
    "total_recompute_ns",
    "wall_ms_per_step",
    "gpu_ms_per_step",
    "cpu_ms_per_step",
    "forward_ms_per_step",
)
COLUMNS = (
    *_FIELDS,
    "wall_share",
    "heaviest_node",
    "heaviest_node_wall_ns",
    "heaviest_node_line",
)
"""The columns in their order."""


def record(report: Report, row: Row) -> tuple[str | int | float | bool, ...]:
    """One row, flat: who, what it costs in nanoseconds, the same per step, its share, its node."""
    node = heaviest(row, "wall")
    line = heaviest_line(row, "wall")
    name, time = (node.name, node.wall_ns) if node else ("", 0)
    fields = (getattr(row, field) for field in _FIELDS)
    return (*fields, report.share(row), name, time, line.place if line else "")
