"""A report as CSV: a line a row, for a spreadsheet or a script."""

from __future__ import annotations

import csv
import io

from backspot.render._records import COLUMNS, record
from backspot.report import Report
from backspot.words import visible

__all__ = ["cell", "to_csv"]

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
