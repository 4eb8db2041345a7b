"""A report as a data frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backspot.errors import MissingDependencyError
from backspot.render._records import COLUMNS, record

if TYPE_CHECKING:
    import pandas as pd

    from backspot.report import Report

__all__ = ["to_frame"]


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
