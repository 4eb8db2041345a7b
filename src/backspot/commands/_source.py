"""From the TRACE of a command line to a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from backspot.commands._console import complain, reading
from backspot.locating import locate

if TYPE_CHECKING:
    from backspot.report import Report

__all__ = ["read"]


def read(source: str) -> Report:
    """Read a trace with a progress bar, and say which one where the name left it open."""
    with reading(source) as progress:
        report = locate(source, progress=progress)
    if source != "-" and Path(source).is_dir():
        complain(f"read {report.trace}, the newest trace in {source}")
    return report
