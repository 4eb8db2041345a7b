"""Results as CSV and pandas: a line for each row, for a spreadsheet or a script."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from backspot.errors import MissingDependencyError
from backspot.formatting import visible
from backspot.render._columns import fields_of, records
from backspot.render._comparison import FIELDS as CHANGE_FIELDS
from backspot.render.formats import Format
from backspot.render.view import View
from backspot.results.comparison import Comparison
from backspot.results.report import Report

if TYPE_CHECKING:
    import pandas as pd

# Characters that start a formula in a spreadsheet, full-width forms included.
_FORMULA = tuple("=+-@\t\r＝＋－＠")


def to_csv(report: Report, view: View | None = None) -> bytes:
    """A header and a line for each row, in UTF-8; ``None`` writes all rows.

    Every text is quoted, so that a spreadsheet that splits at semicolons splits nothing inside it.
    A text that would run as a formula starts with an apostrophe; invisible characters are written
    as escapes.
    """
    rows = report.modules if view is None else view.rows(report)
    return _csv(fields_of(report), records(report, rows))


def comparison_to_csv(comparison: Comparison, view: View | None = None) -> bytes:
    """A header, the step, its phases, ranks, the backward and its parts; ``None`` writes all."""
    changes = comparison.changes[: None if view is None else view.top]
    rows = [comparison.step, *comparison.phases, *comparison.ranks, comparison.whole, *changes]
    return _csv(CHANGE_FIELDS, ([getattr(row, field) for field in CHANGE_FIELDS] for row in rows))


FORMATS = (
    Format(".csv", {Report: to_csv, Comparison: comparison_to_csv}, name="csv", has_warnings=False),
)


def _csv(fields: Sequence[str], rows: Iterable[Iterable[str | float | None]]) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(map(_cell, row) for row in rows)
    return file.getvalue().encode()


def _cell(value: str | float | None) -> str | int | float:
    """A value for a spreadsheet; text that would run as a formula is defused."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return round(value, 6)
    return _defused(value) if isinstance(value, str) else value


def _defused(text: str) -> str:
    runs = text.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA)
    return ("'" if runs else "") + visible(text)


def to_frame(report: Report) -> pd.DataFrame:
    """The report's rows as a data frame, in the report's order.

    Raises:
        MissingDependencyError: If pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingDependencyError(
            "to_pandas() needs pandas: pip install 'backspot[pandas]'"
        ) from error
    rows = list(records(report, report.modules))
    fields = fields_of(report)
    columns = zip(*rows, strict=True) if rows else [()] * len(fields)
    frame: pd.DataFrame = pd.DataFrame(
        {
            name: pd.Series(values, dtype=None if _is_plain(values) else object)
            for name, values in zip(fields, columns, strict=True)
        }
    )
    return frame


def _is_plain(values: tuple[object, ...]) -> bool:
    """Whether Arrow can hold them: half a surrogate pair, as in a foreign name, is not UTF-8."""
    try:
        "".join(value for value in values if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return False
    return True
