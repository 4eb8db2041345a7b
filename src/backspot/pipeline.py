"""From a source to a report: read, attribute, and complete the report part by part."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from backspot.analysis.attribution.tracks import find_tracks
from backspot.analysis.parts import PARTS, ranking, real_step
from backspot.analysis.recording import Options, Part, Recording
from backspot.checks import check_whole, is_number
from backspot.errors import UsageError
from backspot.formatting import quoted, visible
from backspot.paths import check_force, path_text
from backspot.render.labelled_trace import check_labelled, label_in_place, write_labelled
from backspot.results.report import Report
from backspot.trace import Progress, read_events
from backspot.trace.profiler import LIVE, Export, exported, is_profiler
from backspot.trace.read import trace_file
from backspot.trace.source import Source

__all__ = ["label_export", "locate", "locate_export", "report_of", "save_labelled"]


def locate(
    source: Source,
    *,
    depth: int | None = None,
    progress: Progress | None = None,
    jobs: int | None = None,
    peak_tflops: float | None = None,
    peak_gbps: float | None = None,
    trace: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Report:
    """Rank the modules of a trace by what they cost in the backward.

    Args:
        source: Path of a trace as ``export_chrome_trace`` writes it, or of a folder, whose newest
            trace is read; ``"-"`` for standard input; an open binary file; or a
            ``torch.profiler.profile`` that has stopped, whose one export remains yours.
        depth: Fold every module deeper than this into its ancestor, as in ``Report.top``. ``None``
            (default) folds none.
        progress: Called with the bytes read and the size of the file, or ``None`` if that is
            unknown. Default ``None``.
        jobs: Maximum number of processes to decode a large uncompressed ``.json``. ``None``
            (default) chooses. The result is the same.
        peak_tflops: What the device can do at best, in 10¹² floating point operations a second, for
            traces with ``record_shapes=True``. ``None`` (default): from a table.
        peak_gbps: The bandwidth of its memory, in 10⁹ bytes a second. ``None`` (default): from a
            table.
        trace: Where to write a copy of the trace (``.json`` or ``.json.gz``) with tracks of nested
            ``backward: …`` spans and arrows from forward to backward. For a profiler this uses its
            one export. ``None`` (default) writes none.
        force: Whether to overwrite a file at ``trace``. Default false.

    Returns:
        The report, with times of a typical step in nanoseconds.

    Raises:
        SourceNotFoundError: If ``source`` is missing or cannot be read.
        NotATraceError: If ``source`` is not a trace, or is too broken to use.
        NoBackwardError: If the trace has no backward pass.
        OutputExistsError: If ``trace`` exists, without ``force``.
        UsageError: If an argument is invalid, the profiler is still running, or ``trace`` is given
            and the profiler has been exported already.

    Example:
        >>> report = backspot.locate("trace.json.gz")
        >>> report.top(1)
        (<Row patch_drop (PatchDropout): wall 5.868, GPU 4.836, CPU 2.374 ms per step>,)
    """
    check_whole("depth", depth, 0, "None for all")
    check_whole("jobs", jobs, 1, "None")
    for word, peak in (("peak_tflops", peak_tflops), ("peak_gbps", peak_gbps)):
        if peak is not None and not (is_number(peak) and peak > 0):
            raise UsageError(f"{word}={quoted(peak)}: give a number above 0, or None")
    check_force(force)
    if progress is not None and not callable(progress):
        raise UsageError(f"progress={quoted(progress)}: give a function of two numbers, or None")
    if isinstance(source, (str, os.PathLike)):
        path_text(source, "locate")
    options = Options(depth, peak_tflops, peak_gbps, live=is_profiler(source))
    if trace is None:
        return report_of(Recording.of(read_events(source, progress=progress, jobs=jobs)), options)
    path_text(trace, "trace=")
    if options.live:
        return locate_export(source, LIVE, options, trace=trace, force=force)
    if not isinstance(source, (str, os.PathLike)) or os.fspath(source) in ("", "-"):
        raise UsageError(
            "a trace is read twice to be labelled, which standard input or another stream cannot "
            "be: give a file"
        )
    path = trace_file(source)
    check_labelled(trace, force=force, source=path)
    recording = Recording.of(read_events(path, progress=progress, jobs=jobs))
    report = report_of(recording, options)
    _label(path, recording, report, trace, force=force)
    return report


def report_of(
    recording: Recording, options: Options | None = None, parts: Sequence[Part] = ()
) -> Report:
    """Return the report of a recording: its ranking, completed by ``PARTS`` and then by others."""
    options = options or Options()
    recording = recording.whole
    recording = recording.in_real_time(real_step(recording, options))
    report = ranking(recording, options)
    for part in (*PARTS, *parts):
        report = part(report, recording, options)
    return report


def locate_export(
    profiler: Any,
    named: str,
    options: Options,
    *,
    in_detail: Any = None,
    parts: Sequence[Part] = (),
    trace: str | os.PathLike[str] | None = None,
    force: bool = False,
    use: Callable[[Path, Recording], None] | None = None,
) -> Report:
    """Locate from a profiler's one export, which has more than the profiler's events in memory.

    Args:
        profiler: a ``torch.profiler.profile`` that has stopped, or its ``Export``.
        named: what was recorded, for ``Report.trace``.
        in_detail: a profiler that recorded memory or shapes in other steps of the same training.
            It is exported, too, or is its ``Export``.
        parts: more parts of this report.
        trace: as in ``locate``.
        force: as in ``locate``.
        use: called with the exported file, and with the recording of it.

    Raises:
        NoBackwardError: If the trace has no backward pass.
        OutputExistsError: If ``trace`` exists and ``force`` is false.
        UsageError: If the profiler is still running or has already been exported.
    """
    if trace is not None:
        check_labelled(trace, force=force)
    more = None
    if in_detail is not None:
        with _opened(in_detail) as path:
            more = read_events(path)
        if options.place is not None:
            more = replace(more, frames=more.frames.renamed(options.place))
    with _opened(profiler) as path:
        recording = Recording.of(replace(read_events(path), source=named), more, options.training)
        if use is not None:
            use(path, recording.whole)
        report = report_of(recording, options, parts)
        if trace is not None:
            _label(path, recording, report, trace, force=force)
        return report


def label_export(path: Path, check: Callable[[], None]) -> None:
    """Write tracks of ``backward: …`` spans into a plain trace itself, as ``_label`` into a copy.

    Without a report, as that takes longer than reading. A trace without a backward stays as it is.

    Args:
        check: called now and then, and before the file changes. What it raises ends the work.

    Raises:
        BackspotError: If the trace cannot be read or written; it stays as it is.
    """
    # The process trains: it starts no others.
    recording = Recording.of(read_events(path, progress=lambda *_: check(), jobs=1))
    tracks = find_tracks(recording.events, recording.ownership)
    if tracks.tracks:
        label_in_place(path, recording.events, tracks, check)


def _label(
    source: Path, recording: Recording, report: Report, path: str | os.PathLike[str], *, force: bool
) -> None:
    tracks = find_tracks(recording.events, recording.ownership)
    write_labelled(source, recording.events, tracks, report, path, force=force)


def _opened(profiler: Any) -> AbstractContextManager[Path]:
    return profiler if isinstance(profiler, Export) else exported(profiler)


def save_labelled(report: Report, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a labelled copy of the trace file that a report was made of.

    Args:
        path: where to write the copy (``.json`` or ``.json.gz``).

    Raises:
        UsageError: If the report was not made of a file, or the file has changed since.
        OutputExistsError: If the output exists and ``force`` is false.
        SourceNotFoundError: If the output's folder does not exist.
        NotATraceError: If the trace is cut short.
    """
    source = Path(report.trace)
    if not report.trace or not source.is_file():
        raise UsageError(
            f"{visible(os.fspath(path))}: a report of {report.trace or 'no trace'} has no file to "
            "label; ask for the labelled trace where the report is made: "
            "backspot.profile(step, model, trace=...) or backspot.locate(prof, trace=...)"
        )
    check_labelled(path, force=force, source=source)
    recording = Recording.of(read_events(source))
    if not recording.whole.made(report):
        raise UsageError(
            f"{visible(report.trace)} is not the trace that this report was made of: "
            "locate it again"
        )
    _label(source, recording, report, path, force=force)
    return Path(path)
