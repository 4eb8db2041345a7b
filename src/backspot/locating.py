"""The way from a source to a report."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from backspot.accounting import account
from backspot.annotating import check_labelled, write_labelled
from backspot.attribution import AMBIGUOUS, OUTSIDE, UNRECORDED, Ownership, attribute
from backspot.errors import NoBackwardError, UsageError
from backspot.findings import Evidence, find_all
from backspot.garbage import without_collecting
from backspot.heap import keep_freed
from backspot.lines import MOST_NODES
from backspot.phasing import find_phases, step_windows
from backspot.report import Report
from backspot.timeline import NOTHING
from backspot.trace import Category, Events, Progress, read_events
from backspot.trace.live import LIVE, exported, is_profiler
from backspot.trace.reading import newest
from backspot.transforms import are_transformed
from backspot.words import counted, duration, visible

__all__ = ["NO_LABELS", "TRANSFORMED", "locate", "locate_export", "save_labelled"]

NO_LABELS = (
    "The trace names no modules: run the steps within backspot.instrument(model) while profiling. "
    "Nodes are ranked by name instead."
)
"""The warning where nothing in a trace says which module an operator ran in."""

TRANSFORMED = (
    "Nodes were made under torch.func (grad, vmap, jacrev, …), where backspot.instrument(model) "
    "writes no labels: to see modules, record a step with loss.backward() or torch.autograd.grad; "
    "functional_call can stay."
)
"""The warning where labels are missing for that reason."""

_LEAST_LOADING = 0.01
"""Of the backward: what loads code for less is not worth a word."""


def locate(
    source: Any,  # noqa: ANN401 - a path, a stream or a profiler; torch is not imported for its type
    *,
    depth: int | None = None,
    progress: Progress | None = None,
    jobs: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Report:
    """Find the modules that make the backward slow.

    Args:
        source: a trace's path (``.json`` or ``.json.gz`` as ``export_chrome_trace`` writes it, or a
            folder of such, whose newest is read), ``"-"`` for standard input, an open binary file,
            or a ``torch.profiler.profile`` that has stopped. A profiler's one export is not used
            up.
        depth: fold every module deeper than this into its ancestor; ``None`` keeps all.
        progress: called while a file is read, with the bytes read and, where known, how many there
            are.
        jobs: how many processes decode a large plain ``.json``; ``None`` takes as many as pay. What
            comes out is the same.
        trace: where to write a labelled copy of the trace (``.json`` or ``.json.gz``): all that it
            holds, and tracks of nested spans ``backward: …`` below each thread that ran autograd
            and each GPU stream, with arrows from forward. Of a profiler this takes the one export.
        force: overwrite what is at ``trace``.

    Returns:
        The ranked report.

    Raises:
        SourceNotFoundError: where there is nothing to read.
        NotATraceError: where it is no trace, or is broken beyond use.
        NoBackwardError: where the trace holds no backward pass.
        OutputExistsError: where ``trace`` exists and ``force`` is false.
        UsageError: where the arguments cannot be meant, or the profiler still runs, or its one
            export is gone and ``trace`` asks for it.
    """
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise UsageError(f"depth={depth!r}: give a whole number of at least 0, or None for all")
    if trace is None:
        events = read_events(source, progress=progress, jobs=jobs)
        return _report(events, _owned(events), depth=depth)
    if is_profiler(source):
        return locate_export(source, LIVE, depth=depth, trace=trace, force=force)
    if not isinstance(source, (str, os.PathLike)) or os.fspath(source) in ("", "-"):
        raise UsageError(
            "a trace is read twice to be labelled, which standard input or another stream cannot "
            "be: give a file"
        )
    path = newest(Path(source)) if Path(source).is_dir() else Path(source)
    check_labelled(trace, force=force, source=path)
    events = read_events(path, progress=progress, jobs=jobs)
    return _labelled(path, events, trace, depth=depth, force=force)


def locate_export(
    profiler: Any,  # noqa: ANN401 - a torch profiler, which is not imported for its type
    named: str,
    *,
    depth: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Report:
    """Locate by way of a profiler's one export, which tells more than its events in memory.

    Args:
        profiler: a ``torch.profiler.profile`` that has stopped.
        named: what the report calls the source.
        depth: as in ``locate``.
        trace: as in ``locate``.
        force: as in ``locate``.

    Raises:
        NoBackwardError: where the trace holds no backward pass.
        OutputExistsError: where ``trace`` exists and ``force`` is false.
        UsageError: where the profiler still runs or its export is gone.
    """
    if trace is not None:
        check_labelled(trace, force=force)
    with exported(profiler) as path:
        events = replace(read_events(path), source=named)
        if trace is None:
            return _report(events, _owned(events), depth=depth)
        return _labelled(path, events, trace, depth=depth, force=force)


def save_labelled(report: Report, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a labelled copy of the trace file that a report was made of.

    Raises:
        UsageError: where the report was made of no file, or the file is not the same any more.
        OutputExistsError: where the output exists and ``force`` is false.
        SourceNotFoundError: where there is no such folder.
        NotATraceError: where the trace is cut short.
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
    ownership = _owned(events)
    if account(ownership, depth=None, warnings=()).passes != report.passes:
        raise UsageError(
            f"{visible(report.trace)} is not the trace that this report was made of: "
            "locate it again"
        )
    write_labelled(source, events, ownership, path, force=force)
    return Path(path)


def _labelled(
    path: Path,
    events: Events,
    output: str | os.PathLike[str],
    *,
    depth: int | None,
    force: bool,
) -> Report:
    ownership = _owned(events)
    report = _report(events, ownership, depth=depth)
    write_labelled(path, events, ownership, output, force=force)
    return report


def _owned(events: Events) -> Ownership:
    keep_freed()
    ownership = attribute(events)
    if not len(ownership.passes.start):
        raise NoBackwardError(_no_backward(events))
    return ownership


def _report(events: Events, ownership: Ownership, *, depth: int | None) -> Report:
    with without_collecting():
        report = account(ownership, depth=depth, warnings=_warnings_of(events, ownership))
        windows = step_windows(events, ownership)
        report = replace(
            report,
            trace=events.source,
            phases=find_phases(events, ownership, windows) if windows else (),
            step_ns=windows.lengths if windows else report.step_ns,
        )
        if events.truncated:
            # Kineto writes the GPU's work last: without it every rule would blame the host.
            return report
        return replace(report, findings=find_all(Evidence(events, ownership, report, windows)))


def _no_backward(events: Events) -> str:
    """Why a trace holds no backward pass, and what to do."""
    if len(events.named(Category.RUNTIME, "cudaGraphLaunch", "hipGraphLaunch")):
        return (
            f"{events.source} holds no backward pass but replays of a captured graph, in which no "
            "autograd node runs: profile the step without graph capture"
        )
    if not len(events.of(Category.OPERATOR)):
        return (
            f"{events.source} holds no CPU activity, so no backward can be seen in it: "
            "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    if events.truncated:
        return (
            f"{events.source} is cut short before its first backward pass: copy it, or export it, "
            "again"
        )
    return (
        f"{events.source} holds no backward pass: record a training step, "
        "with loss.backward() while the profiler runs"
    )


def _warnings_of(events: Events, ownership: Ownership) -> tuple[str, ...]:
    """What a reader must know before trusting the numbers."""
    spans, work = ownership.spans, ownership.work
    warnings = list(events.warnings)
    nodes = int(spans.is_node.sum())
    regions = sum(module.is_region for module in spans.modules)
    if regions:
        warnings.append(
            f"{regions} compiled regions bear no module's label, for their hooks were compiled "
            "away; they stand under the profiler's names. Compile parts of the model, or a module "
            "of a class of your own, to have them named."
        )
    unowned = spans.is_node & (ownership.owner == UNRECORDED)
    unseen = int((unowned & ownership.join.unseen).sum())
    unrecorded = int(unowned.sum()) - unseen
    outside = np.flatnonzero(spans.is_node & (ownership.owner == OUTSIDE))
    # Without any forward there is nothing that labels could stand around.
    if 2 * len(outside) > nodes and are_transformed(events, ownership.join, outside):
        warnings.append(TRANSFORMED)
    elif spans.source == "none" and not regions and unrecorded < nodes:
        warnings.append(NO_LABELS)
    elif spans.source == "python":
        warnings.append(
            "Modules are named by class and counter (Linear_0), as with_stack=True records them; "
            "backspot.instrument(model) gives their paths."
        )
    if unrecorded:
        warnings.append(
            f"{unrecorded} of {nodes} backward nodes have no forward operator in the trace: start "
            "the profiler before the forward that they belong to."
        )
    if unseen:
        warnings.append(
            f"{unseen} of {nodes} backward nodes were made by no recorded operator, as scripted "
            "graphs and C++ functions make them, and nothing tells in which module; they count as "
            "'(forward not recorded)'."
        )
    ambiguous = int((spans.is_node & (ownership.owner == AMBIGUOUS)).sum())
    if ambiguous:
        warnings.append(
            f"{ambiguous} of {nodes} backward nodes could come from more than one thread's "
            "forward; they have no owner here."
        )
    if spans.unmarked:
        warnings.append(
            f"{spans.unmarked} tensors could not safely be marked; the trace shows fewer "
            "'backward:' labels there, the numbers here are not affected."
        )
    lost = int(((work.launch == NOTHING) & (work.run >= 0)).sum())
    if lost:
        warnings.append(
            f"{lost} kernels or copies within backward have no launch record; they stand in "
            "'(no launch record)'."
        )
    if events.lines.broken:
        warnings.append("The trace's table of source lines is broken; no line is named here.")
    elif not events.lines.complete:
        warnings.append(
            f"Source lines are known for the first {MOST_NODES:,} nodes only: profile fewer steps."
        )
    warnings += _of_warm_up(events, ownership)
    return tuple(warnings)


def _of_warm_up(events: Events, ownership: Ownership) -> list[str]:
    """Whether what was recorded is no steady step, as far as it shows; a sentence at most."""
    steps, passes, work = ownership.steps, ownership.passes, ownership.work
    lasting = np.zeros(steps.count, np.int64)
    np.add.at(lasting, steps.of_pass, passes.end - passes.start)
    if len(lasting) >= 3 and lasting[0] > 1.5 * np.median(lasting[1:]) > 0:
        return [
            f"The first step's backward took {lasting[0] / np.median(lasting[1:]):.1f} times as "
            "long as the others': warm up before profiling."
        ]
    if len(lasting) == 1 and _loads_code(events, passes.start[0]):
        return [
            "The one step recorded loads GPU code: it is warm-up; run a few steps before profiling."
        ]
    loading = work.queued > work.launch
    spent = int((work.queued - work.launch)[loading].sum())
    if spent > _LEAST_LOADING * (ownership.windows.end - ownership.windows.start).sum():
        return [
            f"{counted(int(loading.sum()), 'first launch', 'first launches')} of a kernel took "
            f"{duration(spent)}, for code is loaded as it is first wanted: that is warm-up; run a "
            "few steps before profiling."
        ]
    return []


def _loads_code(events: Events, since: int) -> bool:
    loading = events.name_mask("cuModuleLoad", "cuLibraryLoad", "hipModuleLoad", "cudaModuleLoad")
    return bool((loading[events.name] & (events.start >= since)).any())
