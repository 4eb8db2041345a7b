"""A report as CSV: a line a row, for a spreadsheet or a script."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from backspot.errors import MissingDependencyError
from backspot.formatting import visible
from backspot.render._sentences import heaviest, heaviest_line
from backspot.results.report import Report, Row

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "cell", "record", "to_csv", "to_frame"]


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


# What a spreadsheet takes for the start of a formula, full-width forms included.
_FORMULA = tuple("=+-@\t\r＝＋－＠")


def to_csv(report: Report) -> bytes:
    """A header and a line for each row, in UTF-8.

    Every text is quoted, so that a spreadsheet that splits at semicolons splits nothing within it.
    A text that would be run as a formula starts with an apostrophe; characters without a shape are
    written as escapes.
    """
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in report.modules:
        writer.writerow([cell(value) for value in record(report, row)])
    return file.getvalue().encode()


def cell(value: str | float) -> str | int | float:
    """A value as a spreadsheet takes it: text that would run as a formula is defused."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return round(value, 6)
    return _defused(value) if isinstance(value, str) else value


def _defused(text: str) -> str:
    runs = text.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA)
    return ("'" if runs else "") + visible(text)


def to_frame(report: Report) -> pd.DataFrame:
    """The report's rows as a frame, one row a module, in the report's order.

    Raises:
        MissingDependencyError: where pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingDependencyError(
            "to_pandas() needs pandas: pip install 'backspot[pandas]'"
        ) from error
    records = [record(report, row) for row in report.modules]
    columns = zip(*records, strict=True) if records else [()] * len(COLUMNS)
    frame: pd.DataFrame = pd.DataFrame(
        {
            name: pd.Series(values, dtype=None if _is_plain(values) else object)
            for name, values in zip(COLUMNS, columns, strict=True)
        }
    )
    return frame


def _is_plain(values: tuple[object, ...]) -> bool:
    """Whether Arrow can hold them: half of a surrogate pair in a foreign name is no UTF-8."""
    try:
        "".join(value for value in values if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return False
    return True
