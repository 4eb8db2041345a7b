"""What a reader must know before trusting the numbers of a trace."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.transforms import are_transformed
from backspot.analysis.timeline import NOTHING
from backspot.formatting import counted, duration
from backspot.trace import Category, Events, names
from backspot.trace.source_lines import MOST_NODES

__all__ = ["NO_LABELS", "TRANSFORMED", "warnings_of", "why_no_backward"]


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


def why_no_backward(events: Events) -> str:
    """Why a trace holds no backward pass, and what to do."""
    if len(events.named(Category.RUNTIME, *names.GRAPH_LAUNCHES)):
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


def warnings_of(events: Events, ownership: Ownership) -> tuple[str, ...]:
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
    unowned = spans.is_node & (ownership.owner == Special.UNRECORDED)
    unseen = int((unowned & ownership.join.unseen).sum())
    unrecorded = int(unowned.sum()) - unseen
    outside = np.flatnonzero(spans.is_node & (ownership.owner == Special.OUTSIDE))
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
    ambiguous = int((spans.is_node & (ownership.owner == Special.AMBIGUOUS)).sum())
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
    loading = events.name_mask(*names.CODE_LOADS)
    return bool((loading[events.name] & (events.start >= since)).any())
