"""Warnings that a reader needs before trusting the numbers of a trace.

One is about ``torch.func``: each transform handles an operator and calls the operator again for the
next level. So under ``grad``, ``vmap`` and other transforms an operator contains itself, twice or
more.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.compiled import Unmatched
from backspot.analysis.attribution.join import Join
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.partial import is_between_forwards
from backspot.analysis.attribution.updates import optimizer_steps
from backspot.analysis.timeline import enclosing, grouped, innermost, is_in, median, take
from backspot.formatting import counted, duration
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask
from backspot.trace.source_lines import MOST_NODES

_LEAST = 0.25
"""Share of the nodes: a transform replaces some operators, and those do not contain themselves."""


def are_transformed(events: Events, join: Join, nodes: Ints) -> bool:
    """Whether these nodes were made under a transform, judged by their operators."""
    operator = join.operator[nodes]
    operator = operator[operator >= 0]
    if not len(operator):
        return False
    index, least = events.of(Category.OPERATOR), _LEAST * len(nodes)
    is_forward_thread = np.zeros(len(events.threads), bool)
    is_forward_thread[events.thread[operator]] = True
    index = index[is_forward_thread[events.thread[index]]]
    alike = index[is_in(events.name[index], events.name[operator])]
    if _within_themselves(events, alike)[events.name[operator]].sum() < least:
        return False
    within = np.zeros(len(events.start), bool)
    for _, members in grouped(events.thread, index):
        parent = innermost(events.start[members], events.end[members]).parent
        name, outer = events.name[members], take(parent, parent)
        third = np.flatnonzero((name == take(name, parent)) & (name == take(name, outer)))
        for chain in (third, parent[third], outer[third]):
            within[members[chain]] = True
    return bool(within[operator].sum() >= least)


def _within_themselves(events: Events, index: Ints) -> Mask:
    """For each distinct name, return whether one of these events starts within another of it."""
    start, end = events.start[index], events.end[index]
    kind = events.thread[index] * np.int64(len(events.names)) + events.name[index]
    order = np.lexsort((-end, start, kind))
    after, before = order[1:], order[:-1]
    inside = (kind[after] == kind[before]) & (start[after] < end[before])
    is_nested = np.zeros(len(events.names), bool)
    is_nested[events.name[index[after[inside]]]] = True
    return is_nested


NO_LABELS = (
    "The trace names no modules: run the steps within backspot.instrument(model) while profiling. "
    "Without labels, nodes are ranked by name."
)
"""The warning for a trace without any labels of modules."""
NO_CALLS = (
    "The trace names no modules: none was called as module(…). A call of module.forward(…), or of "
    "a function of its weights, has no label. Nodes are ranked by name."
)
"""The same where modules had labels."""

TRANSFORMED = (
    "Nodes were made under torch.func (grad, vmap, jacrev, …), where backspot.instrument(model) "
    "writes no labels. To see modules, record a step with loss.backward() or torch.autograd.grad; "
    "functional_call can stay."
)
"""The warning for a trace without labels because of ``torch.func``."""

_LONGER = 1.5
"""How many times as long as every other step the first one takes, if it is a warm-up."""
_LEAST_LOADING = 0.01
"""Share of the backward; shorter loading of code is not worth a warning."""


def why_no_backward(events: Events) -> str:
    """Explain why a trace has no backward pass, and what to do."""
    if len(events.prefixed(Category.RUNTIME, *names.GRAPH_LAUNCHES)):
        return (
            f"{events.source} holds no backward pass, only replays of a captured graph, which run "
            "no autograd nodes: profile the step without graph capture"
        )
    # A step without any operator has the annotation around it, which is CPU activity too.
    if not len(events.of(Category.OPERATOR)) and not len(events.of(Category.ANNOTATION)):
        return (
            f"{events.source} holds no CPU activity, so no backward can be seen in it: "
            "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    if events.truncated:
        return (
            f"{events.source} is cut short before its first backward pass: copy or export it again"
        )
    return (
        f"{events.source} holds no backward pass: none ran while the profiler recorded; "
        "record a whole training step, with loss.backward()"
    )


def warnings_of(
    events: Events, ownership: Ownership, *, warmed_up: bool = False
) -> tuple[str, ...]:
    """Return the warnings that a reader of the numbers needs.

    Args:
        warmed_up: whether Backspot recorded the steps, so that modules have labels and steps have
            run before.
    """
    spans, work = ownership.spans, ownership.work
    warnings = list(events.warnings)
    nodes = int(spans.is_node.sum())
    regions = sum(module.is_region for module in spans.modules)
    unnamed = sum(module.is_region and not module.is_function for module in spans.modules)
    if unnamed:
        have, their = ("has", "its") if unnamed == 1 else ("have", "their")
        they = "it is" if unnamed == 1 else "they are"
        warnings.append(
            f"{counted(unnamed, 'compiled region')} {have} no module's label, because {their} "
            f"hooks were compiled away; {they} listed under the profiler's names. Compile parts of "
            "the model, or a module of a class of your own, to have them named."
        )
    warnings += _of_compiled(events, ownership)
    warnings += _of_compilations(events, ownership)
    unowned = spans.is_node & (ownership.owner == Special.UNRECORDED)
    unseen = int((unowned & ownership.join.unseen).sum())
    unrecorded = int(unowned.sum()) - unseen
    outside = np.flatnonzero(spans.is_node & (ownership.owner == Special.OUTSIDE))
    # Without a recorded forward there can be no labels.
    if 2 * len(outside) > nodes and are_transformed(events, ownership.join, outside):
        warnings.append(TRANSFORMED)
    elif spans.source == "none" and not regions and unrecorded < nodes:
        warnings.append(NO_CALLS if warmed_up else NO_LABELS)
    elif spans.source == "python":
        warnings.append(
            "Modules are named by class and counter (Linear_0), as with_stack=True records them; "
            "backspot.instrument(model) records their paths."
        )
    if unrecorded:
        remedy = (
            "the profiler steps between forward and backward, so record two steps or more at a time"
            if is_between_forwards(events, ownership)
            else "start the profiler before the forward that made them"
        )
        warnings.append(
            f"{unrecorded} of {nodes} backward nodes have no forward operator in the trace: "
            f"{remedy}."
        )
    if unseen:
        warnings.append(
            f"{unseen} of {nodes} backward nodes were made by no recorded operator, but by "
            "scripted graphs or C++ functions, and their modules are not known; they count as "
            "'(forward not recorded)'."
        )
    ambiguous = int((spans.is_node & (ownership.owner == Special.AMBIGUOUS)).sum())
    if ambiguous:
        warnings.append(
            f"{ambiguous} of {nodes} backward nodes could come from more than one thread's "
            "forward; they count as '(ambiguous thread)'."
        )
    if spans.unmarked:
        first, *others = spans.unmarked
        place = f"{first.path} ({first.class_name})" if first.path else first.class_name
        more = f" and {counted(len(others), 'more module')}" if others else ""
        warnings.append(
            f"Views that were changed in place, at {place}{more}, have no 'backward:' label in a "
            "trace viewer. The numbers here do not need these labels."
        )
    lost = int(((ownership.work_owner == Special.NO_LAUNCH) & (work.run >= 0)).sum())
    if lost:
        warnings.append(
            f"{lost} kernels or copies within backward have no launch record; they count as "
            "'(no launch record)'."
        )
    if events.lines.broken:
        warnings.append("The trace's table of source lines is broken, so no source line is named.")
    elif not events.lines.complete:
        warnings.append(
            f"Source lines are known for the first {MOST_NODES:,} nodes only: profile fewer steps."
        )
    warnings += _of_warm_up(events, ownership, warmed_up=warmed_up)
    return tuple(warnings)


def _of_compiled(events: Events, ownership: Ownership) -> list[str]:
    """Return the warnings that say why compiled regions keep one owner."""
    if events.compiled.broken:
        return ["The trace's table of compiled code is broken: each compiled region has one owner."]
    named = any(not module.is_region for module in ownership.spans.modules)
    if named and not events.compiled.recorded and _has_compiled_graphs(events):
        return [
            "The modules inside compiled code are not known, as nothing recorded them while the "
            "code was compiled. That needs torch 2.10 or later, and where neither backspot run nor "
            "a callback makes the recording, backspot.instrument(model) before the first step."
        ]
    by_reason: dict[tuple[str, bool], list[Unmatched]] = {}
    for unmatched in ownership.compiled.unmatched:
        by_reason.setdefault((unmatched.reason, unmatched.partly), []).append(unmatched)
    warnings = []
    for (reason, partly), regions in by_reason.items():
        scope = "of some launches inside" if partly else "inside"
        first, *others = sorted({region.path for region in regions})
        more = f" and {counted(len(others), 'more module')}" if others else ""
        calls = counted(sum(region.calls for region in regions), "call")
        warnings.append(
            f"The modules {scope} {calls} of compiled code, in {first or 'the model'}{more}, are "
            f"not known: {reason}."
        )
    return warnings


def _has_compiled_graphs(events: Events) -> bool:
    """Whether a compiled graph is called outside of the optimizers' steps."""
    calls = events.chosen(
        events.prefix_mask(names.COMPILED_GRAPH), Category.OPERATOR, Category.ANNOTATION
    )
    steps = optimizer_steps(events)
    within = enclosing(events, steps, events.thread[calls], events.start[calls])
    return bool((within < 0).any())


def _of_compilations(events: Events, ownership: Ownership) -> list[str]:
    """Return a warning if code was compiled in the recorded steps, with the first reason."""
    compiling = events.prefixed(Category.OPERATOR, *names.COMPILING)
    windows = ownership.windows
    if len(windows.end):
        compiling = compiling[events.start[compiling] < windows.end[-1]]
    if not len(compiling):
        return []
    by_region = {compilation.region: compilation for compilation in events.compiled.compilations}
    regions = events.prefixed(Category.OPERATOR, names.COMPILED_REGION)
    regions = regions[np.argsort(events.start[regions], kind="stable")]
    causes = []
    for event in compiling.tolist():
        after = regions[
            (events.thread[regions] == events.thread[event])
            & (events.start[regions] >= events.end[event])
        ]
        name = events.names[events.name[after[0]]] if len(after) else ""
        compilation = by_region.get(name.removeprefix(names.COMPILED_REGION))
        if compilation is not None:
            causes.append(compilation)
    spent = int((events.end[compiling] - events.start[compiling]).sum())
    begun = (
        f"The recorded steps compile code {counted(len(compiling), 'time')}, which took "
        f"{duration(spent)}: "
    )
    if not causes:
        return [f"{begun}torch._logging.set_logs(recompiles=True) prints why."]
    again = [cause for cause in causes if cause.reason] or causes
    first = again[0]
    place = f"{first.function} ({first.file}:{first.line})"
    why = f"again, because {first.reason}" if first.reason else "for the first time"
    more = f"; and {len(causes) - 1} more" if len(causes) > 1 else ""
    return [f"{begun}{place} {why}{more}."]


def _of_warm_up(events: Events, ownership: Ownership, *, warmed_up: bool) -> list[str]:
    """Return a warning if the recorded steps include warm-up, else nothing."""
    steps, passes, work = ownership.steps, ownership.passes, ownership.work
    lasting = np.zeros(steps.count, np.int64)
    np.add.at(lasting, steps.of_pass, passes.end - passes.start)
    if not warmed_up and len(lasting) >= 3 and lasting[0] > _LONGER * lasting[1:].max() > 0:
        return [
            f"The first step's backward took {lasting[0] / median(lasting[1:]):.1f} times as "
            "long as the others: warm up before profiling."
        ]
    more = "more steps" if warmed_up else "a few steps"
    if len(lasting) == 1 and _loads_code(events, passes.start[0]):
        return [
            f"The only recorded step loads GPU code, which is warm-up: run {more} before profiling."
        ]
    loading = work.queued > work.launch
    spent = int((work.queued - work.launch)[loading].sum())
    if spent > _LEAST_LOADING * (ownership.windows.end - ownership.windows.start).sum():
        return [
            f"{counted(int(loading.sum()), 'first launch', 'first launches')} of a kernel took "
            f"{duration(spent)}, because it loaded the kernel's code, which is warm-up: run "
            f"{more} before profiling."
        ]
    return []


def _loads_code(events: Events, since: int) -> bool:
    loading = events.prefix_mask(*names.CODE_LOADS)
    return bool((loading[events.name] & (events.start >= since)).any())
