"""Reads the TRACE of a command line."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from backspot.analysis.recording import Options, Recording
from backspot.commands._console import complain, reading
from backspot.errors import BackspotError, SourceNotFoundError
from backspot.pipeline import locate, report_of
from backspot.results.report import Report
from backspot.trace import read_events
from backspot.trace.parallel import keep_freed
from backspot.trace.profiler import LIVE
from backspot.trace.read import trace_file, traces_in

_SNIFFED = 4096


def read(source: str, *, depth: int | None = None, replays: bool = False, **options: Any) -> Report:
    """Read a trace with a progress bar, or a saved report; say which file of a folder was read.

    Beside the newest trace of a folder, its report has more: real times, memory, trials.

    Args:
        replays: whether the report must be able to replay its recording, as no saved one is.
        options: other arguments of ``locate``, for a trace.
    """
    beside = source if is_report(source) else _report_beside(source)
    of_trace = any(options.get(name) is not None for name in ("trace", "peak_tflops", "peak_gbps"))
    if beside and (beside == source or not (replays or of_trace)):
        report = Report.load(beside)
        if beside != source:
            complain(f"read {beside}, the report of the newest trace in {source}")
        return report if depth is None else replace(report, modules=report.top(depth=depth))
    if source == "-" and sys.stdin is None:
        raise SourceNotFoundError("standard input is closed: there is no trace to read")
    if not source.endswith(".gz"):  # unpacked text would lie among the columns
        keep_freed()
    try:
        with reading(source) as progress:
            if beside and replays:  # as the report, by the steps that were timed for it
                path, jobs = trace_file(source), options.get("jobs")
                events = read_events(path, progress=progress.update, jobs=jobs)
                saved = Report.load(beside)
                return report_of(
                    Recording.of(events, None, saved.training),
                    Options(
                        depth, real_steps=saved.unprofiled_step_ns_by_step, training=saved.training
                    ),
                )
            report = locate(source, depth=depth, progress=progress.update, **options)
    except OSError as error:
        if isinstance(error, BackspotError):
            raise
        name = "standard input" if source == "-" else source
        raise SourceNotFoundError(f"{name} cannot be read: {error.strerror or error}") from error
    if source != "-" and Path(source).is_dir():
        complain(f"read {report.trace}, the newest trace in {source}")
    return report


def _report_beside(source: str) -> str:
    """The report that ``run`` wrote after the newest trace of a folder; ``""`` if there is none."""
    if source == "-" or not Path(source).is_dir():
        return ""
    with suppress(OSError):  # reading it reports the error
        trace = trace_file(source)
        report = _report_of_run(trace)
        if _is_of_run(report, trace):
            return str(report)
    return ""


def _report_of_run(trace: Path) -> Path:
    """The file in which ``run`` saves its report beside this trace."""
    return trace.with_name(trace.name.replace("trace", "report", 1).removesuffix(".gz"))


def _is_of_run(report: Path, trace: Path) -> bool:
    """Whether ``run`` wrote this report after this trace, as their names and times say."""
    return (
        report == _report_of_run(trace)
        and is_report(str(report))
        and report.stat().st_mtime_ns >= trace.stat().st_mtime_ns
    )


def trace_of(report: Report, file: Path) -> tuple[Path | None, bool]:
    """Return the trace that a saved report is of, and whether that is known.

    It is known where the report names it with its folder and it is still there, and where ``run``
    wrote both. Else it can be one of that name, or one that lies alone beside the report.
    """
    made_of, traces = Path(report.trace), list[Path]()
    known, possible = list[Path](), list[Path]()
    with suppress(OSError, SourceNotFoundError):
        traces = traces_in(file.parent)
        if file in traces:  # there is no trace, so that each .json is listed
            traces = []
    with suppress(OSError):
        if report.trace == LIVE:
            known = [trace for trace in traces if _is_of_run(file, trace)]
        elif made_of.is_absolute():
            known = [made_of] * made_of.is_file()
        else:  # to the folder in which the command ran, which may be another one today
            length, name = len(made_of.parts), made_of.parts
            known = [trace for trace in traces if trace.resolve().parts[-length:] == name]
            possible = [made_of] * made_of.is_file()
    possible = [trace for trace in traces if trace.name == made_of.name] or possible
    if not possible and len(traces) == 1:
        possible = traces
    return next(iter(known or possible), None), bool(known)


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
