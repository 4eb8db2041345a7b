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
    frame: pd.DataFrame = pd.DataFrame(
        [record(report, row) for row in report.modules], columns=list(COLUMNS)
    )
    return frame
