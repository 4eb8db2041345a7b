"""From a source to a report: read, attribute, account, find, report."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from backspot.analysis.accounting.activity import find_activity
from backspot.analysis.accounting.clock import Clock
from backspot.analysis.accounting.holders import find_fused
from backspot.analysis.accounting.ledger import Ledger
from backspot.analysis.accounting.memory import Memory, find_memory
from backspot.analysis.accounting.peaks import peaks_of
from backspot.analysis.accounting.phases import phase_times
from backspot.analysis.accounting.rows import account
from backspot.analysis.accounting.steps import step_windows
from backspot.analysis.accounting.work import find_work
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.tracks import find_tracks
from backspot.analysis.caveats import warnings_of
from backspot.analysis.findings import (
    Evidence,
    Found,
    MemoryEvidence,
    find_all,
    find_in_memory,
    rules_about_memory,
)
from backspot.analysis.recorded import find_recorded, owned, whole
from backspot.analysis.replay.predict import Prediction, predict
from backspot.analysis.replay.recording import Refusal
from backspot.analysis.replay.saving import Change, change_of_paths, free_owners
from backspot.analysis.typical import typical_step
from backspot.checks import check_whole, is_number
from backspot.errors import BackspotError, SourceNotFoundError, UsageError
from backspot.formatting import quoted, visible
from backspot.paths import check_force, path_text
from backspot.render.labelled_trace import check_labelled, write_labelled
from backspot.results.costs import Row, WorkOfModule
from backspot.results.findings import Finding, Saving
from backspot.results.grouping import fold, parents_of, ranked_rows
from backspot.results.limits import share_of_peak
from backspot.results.report import Report, changed
from backspot.trace import Events, Progress, read_events
from backspot.trace.profiler import LIVE, Export, exported, is_profiler
from backspot.trace.read import newest
from backspot.trace.source import Source

__all__ = ["locate", "locate_export", "save_labelled", "trace_file"]

_Given: TypeAlias = tuple[float | None, float | None]
"""The peaks that a user gives: operations and bandwidth."""
_NOTHING = Saving(0, 0, 0)
"""What a module saves that has no part in the backward."""


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
        source: Path of a trace as ``export_chrome_trace`` writes it (``.json`` or ``.json.gz``) or
            of a folder, whose newest trace is read; ``"-"`` for standard input; an open binary
            file; or a ``torch.profiler.profile`` that has stopped. Reading a profiler leaves its
            one export to you.
        depth: Add every module deeper than this to its ancestor at this depth, as in
            ``Report.top``. ``None`` (default) keeps every module.
        progress: Function that is called while a file is read, with the number of bytes read and
            the size of the file, or ``None`` if the size is unknown. Default: ``None``.
        jobs: Maximum number of processes used to decode a large uncompressed ``.json``. ``None``
            (default) chooses by file size and CPU count. Does not affect the result.
        peak_tflops: What the device can do at best, in 10¹² floating point operations per second,
            for a trace that was recorded with ``record_shapes=True``. ``None`` (default) takes
            Backspot's own table for the device.
        peak_gbps: The bandwidth of its memory, in 10⁹ bytes per second; as ``peak_tflops``.
        trace: Where to write a labelled copy of the trace (``.json`` or ``.json.gz``). The copy has
            in addition tracks of nested ``backward: …`` spans below each thread that ran autograd
            and each GPU stream, and arrows from forward to backward. For a profiler this uses its
            one export. ``None`` (default) writes nothing.
        force: Whether to overwrite an existing file at ``trace``. Default: ``False``.

    Returns:
        The report, with times of a typical step in nanoseconds.

    Raises:
        SourceNotFoundError: If ``source`` is missing or cannot be read.
        NotATraceError: If ``source`` is not a trace, or is too broken to use.
        NoBackwardError: If the trace has no backward pass.
        OutputExistsError: If ``trace`` exists and ``force`` is false.
        UsageError: If an argument is invalid, if the profiler is still running, or if ``trace`` is
            given and the profiler has already been exported.

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
    given = (peak_tflops, peak_gbps)
    check_force(force)
    if progress is not None and not callable(progress):
        raise UsageError(f"progress={quoted(progress)}: give a function of two numbers, or None")
    if isinstance(source, (str, os.PathLike)):
        path_text(source, "locate")
    if trace is None:
        events = read_events(source, progress=progress, jobs=jobs)
        live = is_profiler(source)
        return _report(events, owned(events), depth, given_peaks=given, live=live)
    path_text(trace, "trace=")
    if is_profiler(source):
        return locate_export(source, LIVE, depth=depth, trace=trace, force=force, given_peaks=given)
    if not isinstance(source, (str, os.PathLike)) or os.fspath(source) in ("", "-"):
        raise UsageError(
            "a trace is read twice to be labelled, which standard input or another stream cannot "
            "be: give a file"
        )
    path = trace_file(source)
    check_labelled(trace, force=force, source=path)
    events = read_events(path, progress=progress, jobs=jobs)
    ownership = owned(events)
    report = _report(events, ownership, depth, given_peaks=given)
    write_labelled(path, events, find_tracks(events, ownership), report, trace, force=force)
    return report


def trace_file(source: str | os.PathLike[str]) -> Path:
    """Return the file that a path names: the path itself, or the newest trace in a folder.

    Raises:
        SourceNotFoundError: If the folder has no trace, or cannot be read.
        UsageError: If ``source`` is not a path.
    """
    shown = visible(path_text(source, "locate"))
    path = Path(source)
    try:
        return newest(path) if path.is_dir() else path
    except OSError as error:
        if isinstance(error, BackspotError):
            raise
        raise SourceNotFoundError(f"{shown} cannot be read: {error.strerror or error}") from error


def locate_export(
    profiler: Any,
    named: str,
    *,
    in_detail: Any = None,
    warmed_up: bool = False,
    real_steps: tuple[int, ...] = (),
    depth: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    force: bool = False,
    given_peaks: _Given = (None, None),
    use: Callable[[Path, Events, Ownership], None] | None = None,
    note: str = "",
) -> Report:
    """Locate from a profiler's one export, which has more than the profiler's events in memory.

    Args:
        profiler: a ``torch.profiler.profile`` that has stopped, or its ``Export``.
        in_detail: a profiler that recorded memory or shapes in other steps of the same training.
            It is exported, too, or is its ``Export``.
        warmed_up: whether steps are known to have run before the recording.
        real_steps: how long steps take without the profiler, in nanoseconds.
        depth: as in ``locate``.
        trace: as in ``locate``.
        force: as in ``locate``.
        given_peaks: ``peak_tflops`` and ``peak_gbps`` as in ``locate``.
        use: called with the exported file, and with its events and owners as ``read_whole`` has
            them.
        note: the first of the report's warnings, if any.

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
    with _opened(profiler) as path:
        events = replace(read_events(path), source=named)
        ownership = owned(events)
        if use is not None:
            use(path, *whole(events, ownership))
        report = _report(
            events, ownership, depth, warmed_up, real_steps, more, given_peaks, live=True
        )
        if note:
            report = replace(report, warnings=(note, *report.warnings))
        if trace is not None:
            write_labelled(path, events, find_tracks(events, ownership), report, trace, force=force)
        return report


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
    events = read_events(source)
    ownership = owned(events)
    if not _are_passes_of(report, whole(events, ownership)[1]):
        raise UsageError(
            f"{visible(report.trace)} is not the trace that this report was made of: "
            "locate it again"
        )
    write_labelled(source, events, find_tracks(events, ownership), report, path, force=force)
    return Path(path)


def _report(
    events: Events,
    ownership: Ownership,
    depth: int | None,
    warmed_up: bool = False,
    real_steps: tuple[int, ...] = (),
    in_detail: Events | None = None,
    given_peaks: _Given = (None, None),
    *,
    live: bool = False,
) -> Report:
    events, ownership = whole(events, ownership)
    detailed, of_detailed = events, ownership
    if in_detail is not None:
        detailed, of_detailed = whole(in_detail, owned(in_detail))
    clock = Clock(ownership)
    windows = step_windows(events, ownership, clock)
    steps = windows or ownership.windows
    ledger = Ledger(ownership, clock, steps)
    phases = None
    if windows:
        phases = phase_times(events, ledger, find_activity(events, ownership))
    costs = account(events, ledger, phases)
    typical, real = costs.typical, np.array(real_steps, np.int64)
    memory, work = find_memory(detailed, of_detailed), find_work(detailed, of_detailed)
    step_ns = steps.end - steps.start
    report = Report(
        modules=_with_details(costs.modules, of_detailed, memory, work),
        operators=costs.operators,
        passes=costs.passes,
        devices=costs.devices,
        step_unit=ownership.steps.unit,
        step_ns=typical.value(step_ns),
        wall_ns=costs.wall_ns,
        gpu_ns=costs.gpu_ns,
        cpu_ns=costs.cpu_ns,
        step_ns_by_step=tuple(step_ns.tolist()),
        wall_ns_by_step=costs.wall_ns_by_step,
        gpu_ns_by_step=costs.gpu_ns_by_step,
        cpu_ns_by_step=costs.cpu_ns_by_step,
        unprofiled_step_ns=typical_step(real).value(real) if real_steps else None,
        unprofiled_step_ns_by_step=real_steps,
        coverage=costs.coverage,
        source=ownership.spans.source,
        has_gpu=bool(clock.devices),
        warnings=warnings_of(events, ownership, warmed_up=warmed_up),
        trace=events.source,
        phases=phases.typical(typical) if phases else (),
        memory=() if memory is None else memory.devices,
        fused=find_fused(events, ownership, typical),
        hiccups=typical.hiccups,
        noise=costs.noise,
        recorded=find_recorded(events, ownership, live=live),
    )
    if not events.truncated:
        # Kineto writes device work last. Without it, every rule would find the host at fault.
        judged = find_all(Evidence(events, ledger, report, typical))
        report = replace(
            report,
            findings=judged.findings,
            rules_looked=judged.looked,
            rules_unable=judged.unable,
        )
    if memory is not None and not detailed.truncated:
        held = find_in_memory(MemoryEvidence(detailed, of_detailed, memory))
        looked = report.rules_looked + len(rules_about_memory())
        report = replace(report, findings=(*report.findings, *held), rules_looked=looked)
    prediction = predict(events, ownership, steps, typical, report.unprofiled_step_ns)
    report = _with_savings(report, events, ownership, prediction)
    if work is not None:
        report = _with_peaks(report, detailed, of_detailed, given_peaks)
    if depth is None:
        return report
    return changed(report, modules=ranked_rows(fold(report.modules, depth)))


def _with_details(
    rows: tuple[Row, ...],
    ownership: Ownership,
    memory: Memory | None,
    work: tuple[WorkOfModule, ...] | None,
) -> tuple[Row, ...]:
    """Add to each row its owner's memory and work, as far as they are recorded."""
    if memory is None and work is None:
        return rows
    owner_of = {ownership.owners.named(owner): owner for owner in range(len(ownership.owners))}
    found = []
    for row in rows:
        owner = owner_of.get((row.path, row.class_name))
        if owner is not None:
            held = memory.of_owner[owner] if memory else None
            row = replace(
                row,
                memory=held,
                work=work[owner] if work else None,
            )
        found.append(row)
    return tuple(found)


def _with_peaks(
    report: Report, events: Events, ownership: Ownership, given_peaks: _Given
) -> Report:
    """Add what the device can do, if all device work is on devices of one name."""
    devices = set(ownership.work.device.tolist())
    used = {events.device_names.get(device, "") for device in devices}
    peaks = peaks_of(next(iter(used)), *given_peaks) if len(used) == 1 else None
    replayed = report.replayed_step.ns if report.replayed_step else 0
    step_ns = report.unprofiled_step_ns or replayed or report.step_ns
    mfu = share_of_peak(report.modules, peaks, step_ns, len(devices))
    return changed(report, peaks=peaks, mfu=mfu)


def _with_savings(
    report: Report, events: Events, ownership: Ownership, prediction: Prediction | Refusal
) -> Report:
    """Add what the step would save without each row, each subtree and the work of each finding."""
    if isinstance(prediction, Refusal):
        findings = tuple(_with_saving(finding, None) for finding in report.findings)
        return replace(report, findings=findings, not_replayed=prediction.reason)
    replayed = prediction.recording.ownership
    free = {replayed.owners.named(owner): one for owner, one in free_owners(replayed).items()}
    parents = parents_of(row for row in report.modules if row.is_module)
    outer = dict.fromkeys(parent for parent in parents.values() if parent is not None)
    subtrees = {path: change_of_paths(replayed, {path: 0.0}) for path in outer}
    causes = [_change_of(finding, events, ownership, prediction) for finding in report.findings]
    changes = [*free.values(), *subtrees.values(), *(one for one in causes if one is not None)]
    step, savings = prediction.savings(changes)
    each = iter(savings)
    of_rows = {key: next(each) for key in free}
    of_subtrees = {path: next(each) for path in subtrees}
    of_findings = [None if one is None else next(each) for one in causes]

    def saves(row: Row) -> Row:
        if not row.is_module and row.path == Special.ENGINE.path:
            return row  # replays give the engine's time to the nodes before
        own = of_rows.get((row.path, row.class_name), _NOTHING)
        total = of_subtrees.get(row.path, own) if row.is_module else own
        return replace(row, saves=own, total_saves=total)

    return changed(
        report,
        prediction,
        modules=tuple(map(saves, report.modules)),
        findings=tuple(map(_with_saving, report.findings, of_findings)),
        replayed_step=step,
    )


def _change_of(
    finding: Finding, events: Events, ownership: Ownership, prediction: Prediction
) -> Change | None:
    """Return the change in which a finding's work is free, ``None`` where that is not known."""
    work = finding.removable if isinstance(finding, Found) else None
    # Where the step waits for the host, device work alone does not say what a cause costs.
    if work is None or not (work.with_host or prediction.is_device_bound):
        return None
    return prediction.change_of(events, ownership, work.spans, work.work, work.waits)


def _with_saving(finding: Finding, saves: Saving | None) -> Finding:
    """Return the finding with its saving, which is at most the clock time that the cause takes."""
    if not isinstance(finding, Found):
        return finding
    if saves is not None:
        most = finding.wall_ns
        saves = Saving(min(saves.ns, most), min(saves.low_ns, most), saves.high_ns)
    return finding.with_saves(saves)


def _are_passes_of(report: Report, ownership: Ownership) -> bool:
    """Whether a report has these passes, at the same times and in the same steps."""
    windows, steps = ownership.windows, ownership.steps
    columns = (windows.start, windows.end - windows.start, steps.of_pass)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    return found == [(one.start_ns, one.duration_ns, one.step) for one in report.passes]
