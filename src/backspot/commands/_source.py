"""Reads the TRACE of a command line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from backspot.commands._console import complain, reading
from backspot.errors import BackspotError, SourceNotFoundError
from backspot.pipeline import locate
from backspot.results.report import Report
from backspot.trace.parallel import keep_freed

__all__ = ["is_report", "read"]

_SNIFFED = 4096


def read(
    source: str,
    *,
    depth: int | None = None,
    jobs: int | None = None,
    peak_tflops: float | None = None,
    peak_gbps: float | None = None,
) -> Report:
    """Read a trace with a progress bar, or a saved report; say which trace of a folder was read."""
    if is_report(source):
        report = Report.load(source)
        return report if depth is None else replace(report, modules=report.top(depth=depth))
    if source == "-" and sys.stdin is None:
        raise SourceNotFoundError("standard input is closed: there is no trace to read")
    if not source.endswith(".gz"):  # unpacked text would lie among the columns
        keep_freed()
    try:
        with reading(source) as progress:
            report = locate(
                source,
                depth=depth,
                progress=progress.update,
                jobs=jobs,
                peak_tflops=peak_tflops,
                peak_gbps=peak_gbps,
            )
    except OSError as error:
        if isinstance(error, BackspotError):
            raise
        name = "standard input" if source == "-" else source
        raise SourceNotFoundError(f"{name} cannot be read: {error.strerror or error}") from error
    if source != "-" and Path(source).is_dir():
        complain(f"read {report.trace}, the newest trace in {source}")
    return report


def is_report(source: str, family: str = "backspot.report") -> bool:
    """Whether a file is a saved report of a family of schemas.

    Its first and last bytes decide: a trace may be huge.
    """
    path = Path(source)
    if source == "-" or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            start = file.read(_SNIFFED)
            file.seek(max(0, path.stat().st_size - _SNIFFED))
            end = file.read()
    except OSError:  # reading it reports the error
        return False
    return b'"traceEvents"' not in start and f'"{family}/'.encode() in start + end
