"""The way from a source to a report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from backspot.accounting import account
from backspot.attribution import AMBIGUOUS, UNRECORDED, Ownership, attribute
from backspot.errors import NoBackwardError, UsageError
from backspot.findings import Evidence, find_all
from backspot.lines import MOST_NODES
from backspot.report import Report
from backspot.timeline import NOTHING
from backspot.trace import Category, Events, Progress, read_events

__all__ = ["locate", "no_backward", "warnings_of"]


def locate(
    source: Any,  # noqa: ANN401 - a path, a stream or a profiler; torch is not imported for its type
    *,
    depth: int | None = None,
    progress: Progress | None = None,
    jobs: int | None = None,
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

    Returns:
        The ranked report.

    Raises:
        SourceNotFoundError: where there is nothing to read.
        NotATraceError: where it is no trace, or is broken beyond use.
        NoBackwardError: where the trace holds no backward pass.
        UsageError: where the arguments cannot be meant, or the profiler still runs.
    """
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise UsageError(f"depth={depth!r}: give a whole number of at least 0, or None for all")
    events = read_events(source, progress=progress, jobs=jobs)
    ownership = attribute(events)
    if not len(ownership.passes.start):
        raise NoBackwardError(no_backward(events))
    report = account(ownership, depth=depth, warnings=warnings_of(events, ownership))
    findings = find_all(Evidence(events, ownership, report))
    return replace(report, trace=events.source, findings=findings)


def no_backward(events: Events) -> str:
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
    return (
        f"{events.source} holds no backward pass: record a training step, "
        "with loss.backward() while the profiler runs"
    )


def warnings_of(events: Events, ownership: Ownership) -> tuple[str, ...]:
    """What a reader must know before trusting the numbers."""
    spans, passes, steps, work = (
        ownership.spans,
        ownership.passes,
        ownership.steps,
        ownership.work,
    )
    warnings = list(events.warnings)
    nodes = int(spans.is_node.sum())
    regions = sum(module.is_region for module in spans.modules)
    if regions:
        warnings.append(
            f"{regions} compiled regions bear no module's label, for their hooks were compiled "
            "away; they stand under the profiler's names. Compile parts of the model, or a module "
            "of a class of your own, to have them named."
        )
    unrecorded = int((spans.is_node & (ownership.owner == UNRECORDED)).sum())
    # Without any forward there is nothing that labels could stand around.
    if spans.source == "none" and not regions and unrecorded < nodes:
        warnings.append(
            "The trace names no modules: run the steps within backspot.instrument(model) "
            "while profiling. Nodes are ranked by name instead."
        )
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
    first = np.flatnonzero(steps.of_pass == 0)
    lasting = np.array(
        [
            int((passes.end - passes.start)[steps.of_pass == step].sum())
            for step in range(len(steps.duration))
        ]
    )
    if len(lasting) >= 3 and lasting[0] > 1.5 * np.median(lasting[1:]) > 0:
        warnings.append(
            f"The first step's backward took {lasting[0] / np.median(lasting[1:]):.1f} times as "
            "long as the others': warm up before profiling."
        )
    elif len(lasting) == 1 and len(first) and _loads_code(events, passes.start[0]):
        warnings.append(
            "The one step recorded loads GPU code: it is warm-up; run a few steps before profiling."
        )
    return tuple(warnings)


def _loads_code(events: Events, since: int) -> bool:
    loading = events.name_mask("cuModuleLoad", "cuLibraryLoad", "hipModuleLoad", "cudaModuleLoad")
    return bool((loading[events.name] & (events.start >= since)).any())
