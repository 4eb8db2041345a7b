"""Rules about gradients of parameters, and the optimizer that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backspot.analysis.attribution.launches import Precedence, in_optimizer
from backspot.analysis.attribution.ownership import Special
from backspot.analysis.attribution.updates import forms_of, optimizer_steps
from backspot.analysis.findings.costs import LEAST_SHARE, Placed, Removable
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import (
    UPDATED_BY_HAND,
    Stretches,
    accumulating,
    at_once,
    both_ways,
    fills,
    made_by_nodes,
    zeroing,
)
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import (
    NOTHING,
    distinct,
    enclosing,
    first_started,
    is_in,
    median,
    merged,
    pieces,
    take,
)
from backspot.formatting import counted
from backspot.results.findings import Finding, Saving
from backspot.trace import Category, names
from backspot.trace.events import Ints, Mask
from backspot.trace.labels import Kind, unused_part
from backspot.trace.operations import FUSED, optimizer_of

_ACCUMULATION_LEAST = 0.01  # of the step
_ACCUMULATION_LEAST_OF_SEVERAL = 0.03
"""Several passes per step must add their gradients; below this share of the step that is as usual.
"""
_ACCUMULATION_NODE = (names.AUTOGRAD_NAMESPACE + names.ACCUMULATE_GRAD, names.ACCUMULATE_GRAD)
_ACCUMULATION_WORK = ("aten::add_", "aten::add", "aten::clone", "aten::copy_")
"""The operators that add a gradient to an earlier one, or copy one that cannot be taken over."""
_ACCUMULATION_SHARE = 0.25  # of a node on the host; in others, a hook of the user does the work


@rule(
    "gradient-accumulation",
    title="Gradients are copied or added at their parameters",
    link="https://docs.pytorch.org/docs/stable/notes/autograd.html",
)
def gradient_accumulation(evidence: Evidence) -> Finding | None:
    """Gradients are copied or added at their parameters.

    **Cause.** `AccumulateGrad` copies or adds, where it normally takes a gradient over: a step has
    several passes, a parameter is used in several places, or the gradient's strides are not its
    parameter's.

    **Found by** additions and copies that `AccumulateGrad` launches, without what hooks do there.
    With several passes, which have to add, from 3% of the step.

    **Fix.** With one pass: `zero_grad(set_to_none=True)`; look at gradients that are shared
    (`weight + change`, both trained) or kept by a hook; with DistributedDataParallel,
    `gradient_as_bucket_view=True`. With several: fewer, larger micro-batches.
    """
    costs, say = evidence.costs, evidence.wording
    nodes = accumulating(evidence)
    passes = _passes(evidence, nodes)
    parallel = bool(evidence.events.prefix_mask(names.DDP_FORWARD).any())
    # Data parallelism copies and communicates in hooks of these nodes. Optimizers may step there.
    work = (
        evidence.work_of(nodes)
        & (evidence.work.precedence != Precedence.COMMUNICATION)
        & evidence.recorded
    )
    work &= ~evidence.work.optimizer
    if evidence.report.has_gpu and not work.any():
        return None
    operator = evidence.launched_in(*_ACCUMULATION_WORK)
    if not parallel:
        # Hooks of users run here, too, and do other things than to add and to copy.
        work &= (evidence.launched_in(*_ACCUMULATION_NODE) >= 0) & (operator >= 0)
    if evidence.report.has_gpu:
        nodes &= evidence.spans_of_work(work)
        placed, by_step = costs.places_of_work(work), costs.of_work_by_step(work)
    else:
        nodes &= _working(evidence)
        placed, by_step = costs.places_of_spans(nodes), costs.of_spans_by_step(nodes)
    filled = fills(evidence).any() if evidence.report.has_gpu else len(zeroing(evidence)) > 0
    if not placed.places or (passes <= 1 and filled):
        return None  # zero_grad left zeros to add to: the finding zero-grad-fill says so
    if not costs.holds_in_most_steps(
        by_step, _ACCUMULATION_LEAST_OF_SEVERAL if passes > 1 else _ACCUMULATION_LEAST
    ):
        return None
    title, change, at_least, changes_training = "", None, passes > 1, False
    if passes > 1:
        why = (
            f"with {passes} passes before each update, each pass adds to the gradients so far. "
            "That fewer passes run operators on larger tensors, and compute each gradient of a "
            "weight fewer times, is not counted and can be more than the additions"
        )
        remedy = (
            "Use fewer, larger micro-batches, as far as memory has room: each pass reads and "
            "writes every gradient once more. Gradients in bf16 halve the cost."
        )
        further = _further_passes(evidence)
        if len(further.start):
            title = "A step has several passes, each of which adds its gradients"
            placed, change = _in_one_pass(evidence, further, work)
            at_least = False  # it holds the idle time of all further passes
            why += (
                ". The host launches the whole model for each of them, while no device has work "
                "for a part of the time, which counts. The price is that of a single pass, and "
                "fewer passes save a part of it"
            )
            changes_training = _has_batch_norm(evidence, further)
            if changes_training:
                remedy += " Batch norms then normalize over more samples."
    elif parallel:
        why = "DistributedDataParallel copies each gradient into its buckets"
        remedy = (
            "DistributedDataParallel(..., gradient_as_bucket_view=True) keeps gradients in the "
            "buckets from the start."
        )
    else:
        why = (
            "a gradient is copied or added when its memory is shared, or when its strides differ "
            "from those of its parameter"
        )
        remedy = (
            "Call zero_grad(set_to_none=True) before each backward. Give parameters that are used "
            "in several places, or through expand or transpose, contiguous storage of their own."
        )
    return finding(
        placed,
        title=title,
        seen=(
            f"{say.per_step(int(nodes.sum()), 'AccumulateGrad node')} with work to do, "
            f"{say.ms(placed.wall_ns)}: {why}."
        ),
        remedy=remedy,
        nodes=costs.top_nodes(nodes),
        operators=costs.top_operators(
            evidence.names_of(operator[work]), np.maximum(costs.work_ns[work], 1)
        ),
        kernels=costs.top_kernels(work),
        at_least=at_least,
        change=change,
        changes_training=changes_training,
    )


def _further_passes(evidence: Evidence) -> Stretches:
    """Return where the host runs again what a pass of the step has run, for other samples.

    Each begins with the first call of a model that ran before the last pass too, and ends with a
    pass, of all passes but the first, where a device does the work, no update comes between, both
    passes give gradients to the same modules, and no model runs that did not before the last pass.
    """
    ownership, spans, events = evidence.ownership, evidence.spans, evidence.events
    passes, owner = ownership.passes, ownership.owner
    updates = np.sort(events.start[optimizer_steps(events)])
    turn = np.searchsorted(updates, passes.start)
    added = accumulating(evidence)
    of_pass = passes.of_span[added]
    owners_of = [
        frozenset(owner[added][of_pass == run].tolist()) for run in range(len(passes.start))
    ]
    calls = np.flatnonzero(~evidence.in_pass & (spans.module >= 0) & (spans.parent < 0))
    calls = calls[np.argsort(spans.start[calls], kind="stable")]
    after = np.append(0, np.searchsorted(spans.start[calls], passes.end))
    before = np.searchsorted(spans.start[calls], passes.start)
    called = [calls[low:high] for low, high in zip(after[:-1], before, strict=True)]
    stretches: list[tuple[int, int, int]] = []
    for run in range(1, len(passes.start)):
        same_step = ownership.steps.of_pass[run] == ownership.steps.of_pass[run - 1] >= 0
        alike = turn[run] == turn[run - 1] and owners_of[run] == owners_of[run - 1] != frozenset()
        again = is_in(spans.module[called[run]], distinct(spans.module[called[run - 1]]))
        if same_step and alike and again.any() and again[again.argmax() :].all():
            first = called[run][again.argmax()]
            stretches.append((int(spans.start[first]), int(passes.end[run]), int(first)))
    stretches *= evidence.report.has_gpu
    return Stretches(*np.array(stretches, np.int64).reshape(-1, 3).T)


def _has_batch_norm(evidence: Evidence, further: Stretches) -> bool:
    """Whether a batch norm is called in these passes."""
    spans = evidence.spans
    norms = np.array(["BatchNorm" in module.class_name for module in spans.modules], bool)
    called = spans.start[take(norms, spans.module, False)]
    place = np.searchsorted(further.start, called, side="right") - 1
    return bool(((place >= 0) & (called < take(further.end, place))).any())


def _in_one_pass(
    evidence: Evidence, further: Stretches, work: Mask
) -> tuple[Placed, dict[str, Removable]]:
    """Return what further passes cost, and the change without them.

    The device computes as much in a single pass, but adds nothing, and the host launches it once.

    Args:
        further: where the host runs the passes after the first of a step.
        work: the additions.
    """
    costs, waits, start, end = evidence.costs, evidence.recording.waits, further.start, further.end
    none = np.zeros(len(evidence.spans.start), bool)
    by_step = costs.owned_by_step(none, work)
    owner = np.maximum(evidence.ownership.owner[further.span], 0)
    by_step = by_step + costs.operators_by_step(start, costs.idle_within(start, end), owner)
    place = np.searchsorted(start, waits.start, side="right") - 1
    inside = waits.event[(place >= 0) & (waits.end <= take(end, place))]
    gone = replace(costs.removable(None, work, inside), stretches=np.stack([start, end]))
    return costs.places_by_step(by_step), {"free": gone}


def _working(evidence: Evidence) -> Mask:
    """Whether each span is mostly operators that add or copy.

    Hooks on the node do not count, nor do optimizers that step in the node.
    """
    events, spans = evidence.events, evidence.spans
    index = events.chosen(
        events.names_where(lambda name: name in _ACCUMULATION_WORK), Category.OPERATOR
    )
    itself = evidence.around(events.thread[index], events.start[index], *_ACCUMULATION_NODE)
    start, thread = events.start[index], events.thread[index]
    updates = in_optimizer(events, evidence.ownership.passes, start, thread)
    index = index[(itself >= 0) & ~updates]
    span = spans.of(events, index)
    spent = np.bincount(span[span >= 0], events.duration[index][span >= 0], len(spans.start))
    working: Mask = (spent > 0) & (spent >= _ACCUMULATION_SHARE * (spans.end - spans.start))
    return working


def _passes(evidence: Evidence, accumulate: Mask) -> int:
    """Return the largest number of passes that give a module gradients before one update."""
    events, passes = evidence.events, evidence.ownership.passes
    updates = np.sort(events.start[optimizer_steps(events)])
    run = passes.of_span[accumulate]
    turn = np.searchsorted(updates, passes.start[run], side="right")
    if not len(updates):
        turn = evidence.ownership.steps.of_pass[run]
    owner = evidence.ownership.owner[accumulate]
    # Sorted, a pass begins where the owner, the update or the pass differs from the one before.
    order = np.lexsort((run, turn, owner))
    owner, turn, run = owner[order], turn[order], run[order]
    begins = np.append(True, (owner[1:] != owner[:-1]) | (turn[1:] != turn[:-1]))[: len(owner)]
    differs = begins | np.append(True, run[1:] != run[:-1])[: len(owner)]
    return int(np.bincount(np.cumsum(begins)[differs]).max(initial=0))


_OPTIMIZER_MANY = 50  # kernels per step
_OPTIMIZER_SMALL = 30_000  # nanoseconds
_FASTER_FUSED = [name for name in FUSED if name != "SGD"]
"""Optimizers that run faster with ``fused=True``; SGD has so few operators that it does not matter.
``foreach=True`` runs the same operators one after the other on a CPU."""
_OPTIMIZER_LEAST = 0.05
_OPTIMIZER_LINK = "https://docs.pytorch.org/docs/stable/optim.html"


@rule(
    "optimizer-kernels",
    tier="stable",
    common=True,
    sources=(
        "DLR-RM/stable-baselines3#1770",
        "ultralytics/ultralytics#25288",
        "timm",
    ),
    devices=("cpu", "cuda"),
)
def optimizer_kernels(evidence: Evidence) -> Finding | None:
    """The optimizer updates parameters one by one, or is not fused.

    **Cause.** On a GPU, the optimizer launches several small kernels for each parameter; or, on
    both, each of its operators reads and writes all parameters again (`foreach`, the default on a
    GPU). Parameters with equal settings can be in many groups, which are updated one after the
    other.

    **Found by** at least fifty kernels of less than 30 µs in each `Optimizer.step`, neither fused
    nor `foreach`; by Adam, AdamW and Adagrad without a fused operator, from 5% of the step; by
    groups that could be one, from 2%, in trainings that Backspot recorded. Of another optimizer,
    and of gradient clipping, from 5%, where another form was [tried](tried.md) and helps.

    **Fix.** One group for each setting. `fused=True`; on a GPU, where the optimizer lacks it,
    `foreach=True`. On a CPU, `foreach=True` and SGD gained nothing.
    """
    cause = _optimizer_of_groups(evidence)
    if cause is None and evidence.device == "cuda":
        cause = _optimizer_one_by_one(evidence)
    return cause or _optimizer_unfused(evidence)


_GROUPS_LEAST = 0.02
"""Share of the step from which the host's time for groups is worth a change."""


def _optimizer_of_groups(evidence: Evidence) -> Finding | None:
    """Find optimizers that have several groups of parameters for the same settings.

    The host does the same for each group, whether it has one tensor or hundreds. The live half
    marks how many groups there are, and how many are necessary.
    """
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    counted_at = events.prefixed(Category.ANNOTATION, names.OPTIMIZER_GROUPS)
    steps = events.prefixed(Category.ANNOTATION, names.OPTIMIZER_STEP)
    marks = enclosing(events, steps, events.thread[counted_at], events.start[counted_at])
    counted_at, marks = counted_at[marks >= 0], marks[marks >= 0]
    if not len(marks):
        return None
    marks_read = [
        names.read_groups_mark(events.names[name]) or (1, 1) for name in events.name[counted_at]
    ]
    groups, needed = np.array(marks_read, np.int64).T
    begin = evidence.ownership.passes.after(events.start[marks], events.end[marks])
    of_groups = _of_groups(evidence, marks, begin)
    recorded = np.maximum(events.end[marks] - begin, 1)
    taken_share = of_groups.sum() / int(recorded.sum())
    if evidence.report.has_gpu:
        held_ns = costs.idle_within(begin, events.end[marks])
    else:
        held_ns = of_groups * costs.elapsed(begin, events.end[marks]) / recorded
    by_step = costs.times_by_step(begin, (held_ns * (1 - needed / groups)).astype(np.int64))
    if not costs.holds_in_most_steps(by_step, _GROUPS_LEAST):
        return None
    cost = costs.place("(optimizer)", by_step, int(groups.sum()))
    most = int(groups.argmax())
    return finding(
        cost,
        title="The optimizer has more groups of parameters than settings",
        seen=(
            f"{optimizer_of(events.names[events.name[marks[most]]])} updates "
            f"{counted(int(groups[most]), 'group')} one after the other, with "
            f"{counted(int(needed[most]), 'different setting')}: {say.ms(cost.wall_ns)} of the "
            f"host, {say.share(cost.wall_ns)} of the step, for those that could be one."
        ),
        remedy=(
            "Put all parameters with equal settings (lr, weight_decay, betas, …) into one group. "
            "foreach=True and fused=True work on the parameters of one group at a time."
        ),
        link=_OPTIMIZER_LINK,
        change={"groups": (float(taken_share), float(needed.sum() / groups.sum()))},
    )


def _of_groups(evidence: Evidence, marks: Ints, begin: Ints) -> Ints:
    """Return how long the host works for groups in each of these steps, from ``begin`` on.

    Operators that update a group run once for each. Others run once for each parameter anyway, and
    only what takes longer between two groups counts.
    """
    events, end = evidence.events, evidence.events.end[marks]
    index = events.prefixed(Category.OPERATOR, names.ATEN)
    inside = enclosing(events, marks, events.thread[index], events.start[index]) >= 0
    batched = events.names_where(names.is_fused_optimizer)[events.name[index[inside]]].any()
    if batched and evidence.report.has_gpu:
        return end - begin
    running = first_started(events.start[index], events.end[index], np.zeros_like(index))
    number, busy, length = pieces(running, first_started(begin, end, np.arange(len(marks))))
    number, between = number[busy < 0], length[busy < 0]
    usual = 0.0 if batched or not len(between) else float(median(between))
    longer = (between - usual).clip(0)
    return np.bincount(number, longer, minlength=len(marks)).astype(np.int64)


def _optimizer_unfused(evidence: Evidence) -> Finding | None:
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    marks = events.prefixed(Category.ANNOTATION, names.OPTIMIZER_STEP)
    marks = marks[np.array([form in _FASTER_FUSED for form in forms_of(events, marks)], bool)]
    operators = events.prefixed(Category.OPERATOR, names.ATEN)
    inside = enclosing(events, marks, events.thread[operators], events.start[operators])
    fused = inside[events.prefix_mask("aten::_fused_")[events.name[operators]]]
    marks = marks[~is_in(marks, fused)]
    begin = evidence.ownership.passes.after(events.start[marks], events.end[marks])
    if evidence.device == "cuda":
        work = enclosing(events, marks, evidence.work.thread, evidence.work.launch) >= 0
        by_step = costs.of_work_by_step(work & (evidence.work.precedence == Precedence.COMPUTE))
        idle = costs.idle_within(begin, events.end[marks])
        by_step = by_step + costs.times_by_step(begin, idle)
    else:
        by_step = costs.times_by_step(begin, costs.elapsed(begin, events.end[marks]))
    if not costs.holds_in_most_steps(by_step, _OPTIMIZER_LEAST):
        return None
    cost = costs.place("(optimizer)", by_step, len(marks))
    classes = sorted({optimizer_of(events.names[name]) for name in events.name[marks]})
    return finding(
        cost,
        title="The optimizer is not fused",
        seen=(
            f"{' and '.join(classes)}: {say.ms(cost.wall_ns)}, {say.share(cost.wall_ns)} of the "
            "step, for operators that read and write all parameters several times."
        ),
        remedy=(
            "Pass fused=True to the optimizer, which reads and writes each parameter once, and "
            "needs dense gradients. On a CPU, foreach=True does not help."
        ),
        link=_OPTIMIZER_LINK,
        change={"optimizer": "fused"},
    )


def _optimizer_one_by_one(evidence: Evidence) -> Finding | None:
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    inside = evidence.launched_in(f"{names.OPTIMIZER_STEP}*", category=Category.ANNOTATION)
    marks = merged(inside[inside >= 0])
    start, end = events.start[marks], events.end[marks]
    # A step that is given a closure runs forward and backward first.
    begin = evidence.ownership.passes.after(start, end)
    begins = np.append(begin, 0)[np.searchsorted(marks, inside)]
    kernels = (inside >= 0) & (evidence.work.precedence == Precedence.COMPUTE)
    kernels &= evidence.work.launch >= begins
    single = kernels & ~evidence.work_named(names.is_fused_optimizer)
    number = int(single.sum())
    if number < _OPTIMIZER_MANY * evidence.report.steps or 2 * number < int(kernels.sum()):
        return None
    usual = median(costs.device_ns[single])
    if usual > _OPTIMIZER_SMALL:
        return None
    used = is_in(marks, inside[single])
    idle = costs.idle_within(begin[used], end[used])
    by_step = costs.of_work_by_step(single) + costs.times_by_step(begin[used], idle)
    cost = costs.place("(optimizer)", by_step, number)
    optimizers = sorted({optimizer_of(events.names[name]) for name in events.name[marks[used]]})
    forms = forms_of(events, marks[used])
    return finding(
        cost,
        title="The optimizer updates parameters one by one",
        seen=(
            f"{' and '.join(optimizers)}: {say.per_step(number, 'kernel')} of "
            f"{usual / 1e3:.1f} µs (median), {say.ms(cost.wall_ns)} in all, "
            f"{say.share(cost.wall_ns)} of the step."
        ),
        remedy=at_once(forms) or UPDATED_BY_HAND,
        link=_OPTIMIZER_LINK,
        at_best=not FUSED.keys() >= set(forms),  # others read and write more than once
        change={"optimizer": "fused"},
        kernels=costs.top_kernels(single),
    )


@rule(
    "unused-gradient",
    needs=("labels",),
    title="Gradients are computed that no optimizer uses",
    remedy=(
        "Call parameter.requires_grad_(False) before the forward, not after it, or run the "
        "frozen part under torch.no_grad(). Frozen layers at the start of the model then need "
        "no backward at all."
    ),
    link=(
        "https://docs.pytorch.org/docs/stable/notes/autograd.html"
        "#locally-disabling-gradient-computation"
    ),
)
def unused_gradient(evidence: Evidence) -> Finding | None:
    """No optimizer uses the gradients.

    **Cause.** Parameters get gradients, but no optimizer has them: they were frozen after the
    forward, or left out of the optimizer.

    **Found by** labels that `instrument` writes after each optimizer step. Gradients that were
    dropped before their optimizer used them count too. Nodes that also pass a gradient on count
    half; of a module of whose parameters an optimizer has some, the part of the others' numbers.

    **Fix.** `requires_grad_(False)` before the forward. Frozen layers at the start of a network
    then need no backward at all.
    """
    # The engine runs from the last layer to the first. What it runs after the last used gradient is
    # useless. Before that, a node of such a module also passes its gradient on, so half of the node
    # counts.
    costs, spans, owner = evidence.costs, evidence.spans, evidence.ownership.owner
    unused = _unused(evidence)
    if not unused.any():
        return None
    accumulate = accumulating(evidence)
    feeder = evidence.ownership.join.feeder
    of_span = unused[owner]
    fraction = np.zeros(len(owner))
    for run in range(len(evidence.report.passes)):
        of_run = evidence.ownership.passes.of_span == run
        used = of_run & accumulate & (of_span < 1)
        wasted = of_run & accumulate & (of_span > 0)
        last = spans.start[used].max(initial=-1)
        # If no unused gradient comes last, the engine goes on for the gradient of an input.
        behind = last >= 0 and spans.start[wasted].max(initial=-1) > last
        needless = of_run & (spans.start > last) if behind else np.zeros(len(of_run), bool)
        fed = feeder[wasted & ~needless]
        fed = fed[fed >= 0]
        fraction[fed] = np.maximum(fraction[fed], of_span[fed] / 2)
        fraction[wasted] = of_span[wasted]
        fraction[needless] = 1.0
    owners = len(evidence.ownership.owners)
    by_step = np.zeros((owners, len(costs.step_ns)), np.int64)
    gone: list[tuple[Removable, float]] = []
    for share in sorted(set(fraction[fraction > 0].tolist())):
        chosen = fraction == share
        group = np.where(chosen, np.maximum(owner, Special.OUTSIDE), NOTHING)
        by_step += (share * costs.spans_by_step(group, owners)).astype(np.int64)
        # What is needed in part is launched as before.
        spans_gone = chosen if share == 1 else None
        gone.append((costs.removable(spans_gone, evidence.work_of(chosen)), share))
    cost = costs.places_by_step(by_step, owner[fraction > 0])
    return finding(
        cost,
        seen=(
            f"In {counted(len(cost.places), 'place')} backward computes gradients of parameters "
            f"that no optimizer updates: about {evidence.wording.ms(cost.wall_ns)} of needless "
            "work."
        ),
        nodes=costs.top_nodes(fraction > 0),
        saves=_of_a_part(evidence, cost.wall_ns),
        change=_on_a_device(evidence, gone),
    )


def _unused(evidence: Evidence) -> NDArray[np.float64]:
    """Return which part of each owner's parameters the last optimizer step found in no optimizer.

    It is a part of their numbers, as these decide how long their gradients take.
    """
    events = evidence.events
    wanted = np.array(
        [label is not None and label.kind is Kind.UNUSED for label in events.labels], bool
    )
    index = events.chosen(wanted, Category.OPERATOR, Category.ANNOTATION)
    steps = events.prefixed(Category.ANNOTATION, names.OPTIMIZER_STEP)
    if len(steps):
        # Before each optimizer has taken a step, its parameters seem to belong to none.
        index = index[events.start[index] >= events.start[steps].max()]
    unused: dict[tuple[str, str], float] = {}
    for name in distinct(events.name[index]):
        if (label := events.labels[name]) is not None:
            key = label.path, label.class_name
            unused[key] = max(unused.get(key, 0.0), unused_part(label))
    owners = evidence.ownership.owners
    fractions = (unused.get((module.path, module.class_name), 0.0) for module in owners.modules)
    return np.array([*[0.0] * len(Special), *fractions])


@rule(
    "zero-grad-fill",
    sources=("pytorch/pytorch#82777",),
    devices=("cpu", "cuda"),
    title="zero_grad fills gradients with zeros",
    remedy=(
        "Use zero_grad(set_to_none=True), the default since PyTorch 2.0. Backward then stores "
        "its gradients without filling or adding."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
)
def zero_grad_fill(evidence: Evidence) -> Finding | None:
    """`zero_grad` writes zeros.

    **Cause.** Gradients are filled with zeros, and backward adds to the zeros: all gradients are
    written twice for nothing.

    **Found by** fills inside `zero_grad`. If a step has one pass, the additions of `AccumulateGrad`
    count too.

    **Fix.** `zero_grad(set_to_none=True)`, the default since PyTorch 2.0.
    """
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    adds = accumulating(evidence)
    adds &= len(evidence.report.passes) <= evidence.report.steps
    kernels: tuple[str, ...] = ()
    change: dict[str, Removable] = {}
    if evidence.device == "cpu":
        calls = zeroing(evidence)
        number, noun = len(calls), "call"
        change = {"free": costs.removable(adds, None, operators=calls)}
        start, end = events.start[calls], events.end[calls]
        filled = costs.times_by_step(start, costs.elapsed(start, end))
        added = costs.of_spans_by_step(adds) * (filled > 0)
    else:
        work = fills(evidence)
        # Hooks of these nodes launch the exchange of gradients, which is not an addition.
        around = evidence.launched_in("aten::add_", "aten::add")
        adding = evidence.work_of(adds) & (around >= 0)
        operators = merged(zeroing(evidence), around[adding])
        change = {"free": costs.removable(None, work | adding, operators=operators)}
        number, noun = int(work.sum()), "kernel"
        filled, added = costs.of_work_by_step(work), costs.of_work_by_step(adding)
        kernels = costs.top_kernels(work | adding)
    if not number:
        return None
    spent, later = (evidence.typical.value(times) for times in (filled, added))
    then = f" Backward then adds to the zeros for {say.ms(later)}." if later else ""
    return finding(
        costs.place("(optimizer)", filled + added, number),
        seen=f"{say.per_step(number, noun)} of zero_grad, {say.ms(spent)}.{then}",
        kernels=kernels,
        change=change,
    )


@rule(
    "unread-gradient",
    tier="stable",
    sources=("cai4cai/torchsparsegradutils#31", "meta-pytorch/torchrec#4749"),
    needs=("labels",),
    title="A backward computes gradients that nobody reads",
    remedy=(
        "In the backward of this torch.autograd.Function, compute a gradient only where "
        "ctx.needs_input_grad[i] is true, and return None for the others."
    ),
    link="https://docs.pytorch.org/docs/stable/notes/extending.html",
)
def unread_gradient(evidence: Evidence) -> Finding | None:
    """A Function computes gradients that nobody reads.

    **Cause.** The backward of a `torch.autograd.Function` returns gradients for inputs that need
    none. Autograd throws them away. PyTorch's own nodes ask before they compute.

    **Found by** marks that `profile`, `run` and the callbacks write. Of each node as large a part
    counts as of its gradients: an estimate.

    **Fix.** `if ctx.needs_input_grad[i]:` in the backward, and `None` otherwise.
    """
    # The live half marks them. Which of the work was for them is not known, so that all gradients
    # of a node count alike. Each has operators of its own, which the host then does not launch.
    costs, say, events, spans = evidence.costs, evidence.wording, evidence.events, evidence.spans
    marks = events.chosen(events.prefix_mask(names.UNREAD), Category.OPERATOR, Category.ANNOTATION)
    span = spans.of(events, marks)
    marks, span = marks[span >= 0], span[span >= 0]
    if not len(marks):
        return None
    fractions = np.array([_part(events.names[name]) for name in events.name[marks]])
    owner, owners = evidence.ownership.owner, len(evidence.ownership.owners)
    by_step = np.zeros((owners, len(costs.step_ns)), np.int64)
    unread: list[tuple[Removable, float]] = []
    for fraction in merged(fractions).tolist():
        nodes = evidence.spans_with(span[fractions == fraction])
        owned_ns = costs.owned_by_step(nodes, evidence.work_of(nodes))
        by_step += (fraction * owned_ns).astype(np.int64)
        unread.append((costs.removable(nodes, evidence.work_of(nodes)), fraction))
    placed = costs.places_by_step(by_step, owner[span])
    of_user = costs.top_nodes(evidence.spans_with(span))
    return finding(
        placed,
        seen=(
            f"{', '.join(of_user)}: {say.per_step(len(marks), 'backward')} of a Function returns "
            "gradients for inputs that need none, and autograd throws them away: about "
            f"{say.ms(placed.wall_ns)}, if all gradients of a node cost the same."
        ),
        saves=_of_a_part(evidence, placed.wall_ns),
        nodes=of_user,
        change=_on_a_device(evidence, unread),
    )


def _of_a_part(evidence: Evidence, ns: int) -> Saving | None:
    """Return what a step saves without a part of the work of nodes; ``None`` beside a device.

    It is the part, and may be none or twice as much: gradients of one node differ.
    """
    return None if evidence.report.has_gpu else Saving(ns, 0, min(2 * ns, evidence.step_ns))


def _on_a_device(
    evidence: Evidence, works: Sequence[tuple[Removable, float]]
) -> dict[str, Sequence[tuple[Removable, float]]]:
    """Return the change without parts of some work: beside a device, a replay knows what that is.

    Where the host launches all of it as before, what the device does less can save nothing.
    """
    return {"parts": works} if evidence.report.has_gpu else {}


def _part(mark: str) -> float:
    """Return which part of the gradients of a node nobody reads."""
    unread, total = names.read_unread_mark(mark) or (0, 1)
    return unread / max(1, total)


_REPEATS = 0.75
"""Of the time of a pass, for nodes that an earlier pass has run: from here on it repeats that one.
A gradient of a gradient runs some nodes of the first one again, for another result."""
_SELDOM = 7 / 8
"""What goes of a penalty that is computed in every eighth step, or on an eighth of the batch."""


@rule(
    "second-backward",
    least=0.1,
    title="The step differentiates through a backward",
    remedy=(
        "A penalty or another regularizer can be computed in every eighth or sixteenth step with "
        "that weight, or on a part of the batch. Where the training is about these gradients "
        "themselves, as forces, scores or the terms of an equation are, they are needed."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html",
)
def second_backward(evidence: Evidence) -> Finding | None:
    """The step differentiates through a backward.

    **Cause.** A backward with `create_graph=True`, as of a gradient penalty, and the next backward
    through it take several times the work of the loss.

    **Found by** nodes that another node made, from 10% of the step, in most steps. Checkpointing
    does not count. Whether the step is about these gradients (forces, scores, an equation) is not
    in a trace, so there is no price, but where three quarters of a pass are nodes that an earlier
    pass of the step has run, too; and where another forward of the same modules, at least as large,
    is trained without them, which a penalty is beside: then the price is that of seven eighths.

    **Fix.** Compute a penalty in every eighth or sixteenth step with that weight. For several
    gradients of one result, call `torch.autograd.grad` once with all inputs; for several
    directions, `is_grads_batched=True`, `torch.func.vmap` or forward mode (`torch.func.jvp`).
    """
    costs, say = evidence.costs, evidence.wording
    made_nodes, within = made_by_nodes(evidence)
    # A Function that differentiates in its own backward runs these nodes in it, and no later pass.
    later = evidence.spans.start[made_nodes] >= evidence.spans.end[within]
    made_nodes, within = made_nodes[later], within[later]
    passes = evidence.ownership.passes.of_span
    inner = is_in(passes, distinct(passes[within])) & evidence.in_pass
    both = inner.copy()
    both[made_nodes] = True
    placed = costs.places_of_spans(both)
    if not placed.places:
        return None
    again, times = _again(evidence, inner)
    while (
        more := again[within] & ~again[made_nodes]
    ).any():  # and what the next passes run for them
        again[made_nodes[more]] = True
    several = costs.holds_in_most_steps(costs.of_spans_by_step(again), LEAST_SHARE)
    evidence_text = (
        f"A backward with create_graph=True, and {say.per_step(len(made_nodes), 'node')} of the "
        f"next one that go through it, take {say.ms(placed.wall_ns)}: this double backward is what "
        "a gradient penalty costs."
    )
    if not several:
        nodes = costs.top_nodes(both)
        penalty = _beside_a_loss(evidence, inner, made_nodes)
        if penalty is None or penalty.removable is None:
            return finding(placed, seen=evidence_text, nodes=nodes, priced=False)
        gone = penalty.removable
        if evidence.report.has_gpu:  # on a part of the batch, the host does as much as before
            gone = costs.removable(None, gone.work)
        return finding(
            penalty,
            seen=(
                f"{evidence_text} With its forward, and what of that runs again, it is "
                f"{say.ms(penalty.wall_ns)}. The same modules also run without it. If it is a "
                "penalty, the price is that of computing it on an eighth of the batch."
            ),
            nodes=nodes,
            at_best=True,
            change={"parts": [(gone, _SELDOM)]},
            changes_training=True,
        )
    repeated = costs.places_of_spans(again)
    return finding(
        replace(placed, removable=repeated.removable),
        title="Backward passes run the same nodes again",
        seen=(
            f"{evidence_text} In it, {say.per_step(times, 'pass', 'passes')} mostly run nodes that "
            f"an earlier pass of the step has run: {say.ms(repeated.wall_ns)}, with the nodes that "
            "they make."
        ),
        remedy=(
            "Ask for all gradients of one result in a single torch.autograd.grad(result, [a, b, "
            "c]). For several directions, torch.autograd.grad(…, is_grads_batched=True), "
            "torch.func.vmap or forward mode (torch.func.jvp) run one pass for all."
        ),
        nodes=costs.top_nodes(again),
        at_best=True,
    )


def _beside_a_loss(evidence: Evidence, inner: Mask, made_nodes: Ints) -> Placed | None:
    """Return what gradients of gradients and their forward cost, where a loss is beside them.

    There the same modules run another forward, at least as large, that a pass trains without any
    such gradient, and no gradient is differentiated twice, as the terms of equations are.

    Args:
        inner: the nodes of passes that are differentiated.
        made_nodes: the nodes that those made.
    """
    join, spans, owner = evidence.ownership.join, evidence.spans, evidence.ownership.owner
    if inner[made_nodes].any():
        return None
    nodes = np.flatnonzero(evidence.in_pass & spans.is_node & (join.sequence >= 0))
    key = join.builder[nodes] * (int(join.sequence.max()) + 1) + join.sequence[nodes]
    shared = is_in(key, distinct(key[inner[nodes]]))
    gone, plain = evidence.spans_with(nodes[shared]), evidence.spans_with(nodes[~shared])
    gone[made_nodes], plain[made_nodes] = True, False
    plain &= is_in(owner, distinct(owner[inner]))
    if evidence.costs.of_running(plain) < evidence.costs.of_running(inner):
        return None
    return both_ways(evidence, gone, join.operator[inner], LEAST_SHARE)


def _again(evidence: Evidence, inner: Mask) -> tuple[Mask, int]:
    """Return nodes that an earlier pass of the step has run, in passes that repeat it.

    Args:
        inner: the nodes of passes that are differentiated.

    Returns:
        The nodes, and how many passes repeat another one.
    """
    join, spans = evidence.ownership.join, evidence.spans
    passes = evidence.ownership.passes
    step = evidence.ownership.steps.of_pass
    own_nodes = np.flatnonzero(inner & spans.is_node & (join.sequence >= 0))
    own_nodes = own_nodes[np.argsort(spans.start[own_nodes], kind="stable")]
    length = spans.end - spans.start
    run = passes.of_span[own_nodes]
    again = np.zeros(len(spans.start), bool)
    earlier: dict[int, list[set[tuple[int, int]]]] = {}  # the nodes of each pass, by step
    times = 0
    for run_index in merged(run).tolist():
        nodes = own_nodes[run == run_index]
        keys = [*zip(join.builder[nodes].tolist(), join.sequence[nodes].tolist(), strict=True)]
        earlier_runs = earlier.setdefault(int(step[run_index]), [])
        shared = [np.array([key in before for key in keys], bool) for before in earlier_runs]
        best = max(shared, key=lambda is_shared: int(length[nodes[is_shared]].sum()), default=None)
        if best is not None and length[nodes[best]].sum() >= _REPEATS * length[nodes].sum():
            again[nodes[best]] = True
            times += 1
        earlier_runs.append(set(keys))
    return again, times


@rule(
    "unused-parameter-search",
    devices=("cpu", "cuda"),
    title="DistributedDataParallel searches for unused parameters",
    remedy=(
        "Leave out find_unused_parameters=True: if every parameter takes part in each step, "
        "nothing else changes, and else the next step raises an error. Where the same "
        "parameters are unused in every step, static_graph=True searches once."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
)
def unused_parameter_search(evidence: Evidence) -> Finding | None:
    """DDP searches for unused parameters.

    **Cause.** `DistributedDataParallel(find_unused_parameters=True)` walks through the graph before
    each backward, and the ranks exchange which parameters are used.

    **Found by** the reducer's own mark, at the cost of the time from the last operator of the
    forward to the end of DDP's, in which a GPU has nothing to do.

    **Fix.** Leave the option out: a parameter without a gradient then raises an error in the next
    step. `static_graph=True` searches once. On a CPU, 200 small layers took 6% less.
    """
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    marks = events.prefixed(Category.OPERATOR, names.DDP_SEARCH)
    if not len(marks):
        return None
    calls = events.prefixed(Category.ANNOTATION, names.DDP_FORWARD)
    around = enclosing(events, calls, events.thread[marks], events.start[marks])
    marks, around = marks[around >= 0], around[around >= 0]
    # It begins with a search for tensors in the outputs, and ends with a node of its own.
    ends = np.sort(events.end[events.prefixed(Category.OPERATOR, names.ATEN)])
    before = np.append(0, ends)[np.searchsorted(ends, events.start[marks], side="right")]
    start, end = np.maximum(events.start[around], before), events.end[around]
    passed = costs.elapsed(start, end)
    ns = costs.idle_within(start, end) if evidence.report.has_gpu else passed
    # Hardly anything is recorded in it, so it takes as long as it was recorded.
    ns = (ns * ((end - start) / np.maximum(passed, 1))).astype(np.int64)
    span = evidence.spans.of(events, marks)
    placed = costs.places_at(take(evidence.ownership.owner, span), start, ns)
    return finding(
        placed,
        seen=(
            f"{say.per_step(len(marks), 'search', 'searches')} of the whole graph, "
            f"{say.ms(placed.wall_ns)}, before the backward starts. The ranks also exchange which "
            "parameters are used."
        ),
    )
