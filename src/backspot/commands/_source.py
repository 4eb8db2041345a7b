"""Reads the TRACE of a command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from backspot.commands._console import complain, reading
from backspot.errors import BackspotError, SourceNotFoundError
from backspot.pipeline import locate
from backspot.trace.parallel import keep_freed

if TYPE_CHECKING:
    from backspot.results.report import Report

__all__ = ["read"]


def read(source: str, *, depth: int | None = None, jobs: int | None = None) -> Report:
    """Read a trace with a progress bar; for a folder, say which trace was read."""
    if source == "-" and sys.stdin is None:
        raise SourceNotFoundError("standard input is closed: there is no trace to read")
    if not source.endswith(".gz"):  # unpacked text would lie among the columns
        keep_freed()
    try:
        with reading(source) as progress:
            report = locate(source, depth=depth, progress=progress.update, jobs=jobs)
    except OSError as error:
        if isinstance(error, BackspotError):
            raise
        name = "standard input" if source == "-" else source
        raise SourceNotFoundError(f"{name} cannot be read: {error.strerror or error}") from error
    if source != "-" and Path(source).is_dir():
        complain(f"read {report.trace}, the newest trace in {source}")
    return report
