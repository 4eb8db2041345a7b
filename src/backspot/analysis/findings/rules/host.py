"""Rules about a device that waits for the host, for data or for other ranks."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from backspot.analysis.accounting.activity import NAMES
from backspot.analysis.accounting.batches import Batches
from backspot.analysis.accounting.waits import HostWaits
from backspot.analysis.attribution.launches import Precedence
from backspot.analysis.attribution.updates import forms_of
from backspot.analysis.findings.costs import LEAST_SHARE, Placed, Removable
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import (
    LEAST_LAUNCHING,
    UPDATED_BY_HAND,
    Stretches,
    anomaly_checks,
    at_once,
    both_ways,
    compiled,
    forward_operators,
    graph_breaks,
    host_operators,
    launching,
    nodes_of,
    of_doubles,
    of_synchronized,
    only_read,
)
from backspot.analysis.findings.registry import Found, fallback_rule, finding, rule
from backspot.analysis.timeline import (
    FAR,
    NOTHING,
    distinct,
    enclosing,
    grouped,
    is_in,
    merged,
    numbered,
    quantile,
    take,
)
from backspot.formatting import percent
from backspot.results.costs import WITHOUT_GRADIENTS, Launches
from backspot.results.findings import Finding, Place, Saving
from backspot.results.report import lines_of
from backspot.trace import Category, names, operations
from backspot.trace.events import Ints, Mask

_LAUNCHED = (
    "Launch fewer, larger kernels with torch.compile: torch.compile(model, mode='reduce-overhead') "
    "replays CUDA graphs. A larger batch or one wide layer in place of many narrow ones helps, too."
)
_REPLAYED = (
    "Use fewer, longer CUDA graphs (no graph breaks, one torch.compile around the whole model), or "
    "a larger batch: the step replays graphs already, and the GPU waits between them."
)
_COMPILED = (
    "Compile with mode='reduce-overhead', which replays CUDA graphs: the backward is compiled "
    "already, but launches its kernels one by one. Fewer graph breaks and a larger batch help, too."
)
_COMPILE = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
_LAUNCHING_PHASES = {"forward", "loss", "clipping", "optimizer", "averaging", *WITHOUT_GRADIENTS}


@fallback_rule(
    "launch-bound",
    tier="stable",
    common=True,
    sources=(
        "IBM/pytorch-seq2seq#32",
        "jingyaogong/minimind#837",
        "timm",
    ),
    devices=("cuda",),
    title="The GPU waits for the host to launch kernels",
)
def launch_bound(evidence: Evidence, others: Sequence[Finding]) -> Finding | None:
    """The GPU waits for the host to launch kernels.

    **Cause.** The GPU idles while Python and autograd prepare the next kernel.

    **Found by** moments in which the GPU has nothing to run while the host is in a node, from 15%
    of the backward. If that is little, by launches of another phase that is as long and finds the
    GPU without work (`report.launches`). Calls and nodes that another finding would remove do not
    count. Without the profiler, the share is somewhat lower.

    **Fix.** Launch fewer and larger kernels: `torch.compile` (`mode="reduce-overhead"` replays CUDA
    graphs), a larger batch, fused layers, one wide layer instead of many. For a compiled backward,
    the remedy names lines at which graphs break.
    """
    # Of the backward these are the nodes that the host executes meanwhile, of others what is
    # launched too late. Time in which the host waits or computes by itself belongs to other rules,
    # and so do a phase that another finding is about, and the calls and nodes that are its cause.
    costs, say, report = evidence.costs, evidence.wording, evidence.report
    claimed, looped = np.zeros(len(evidence.spans.start), bool), set[str]()
    for other in others:
        if isinstance(other, Found) and other.removable and other.removable.with_host:
            claimed |= other.removable.spans
            if other.removable.stretches.size:
                looped |= {place.path for place in other.places}
    launching_spans = launching(evidence) & ~claimed
    cost = costs.of_host(launching_spans)
    if cost < LEAST_LAUNCHING * report.wall_ns:
        launching_spans, cost = launching_spans & False, 0
    calls = merged(evidence.ownership.owner[claimed & (evidence.spans.module >= 0)])
    paths = {evidence.ownership.owners.path(owner) for owner in calls.tolist()}
    phases = {place.path for other in others for place in other.places if place.path[:1] == "("}
    late = _late_phases(evidence, paths | phases | looped)
    idle = {
        "backward": cost,
        **{name: sum(launch.idle_ns for launch in launches) for name, launches in late.items()},
    }
    name = max(idle, key=lambda phase: idle[phase])
    if not idle[name]:
        return None
    if name == "backward":
        kernels = int(evidence.backward.sum())
        length = int(costs.device_ns[evidence.backward].sum()) / max(kernels, 1) / 1e3
        evidence_text = (
            f"For {percent(cost / report.wall_ns)} of the backward, {say.ms(cost)}, the "
            "GPU has nothing queued while the host executes nodes. The backward has "
            f"{say.per_step(kernels, 'kernel')} of {length:.1f} µs on average."
        )
    else:
        number, after = (
            sum(getattr(launch, field) for launch in late[name]) for field in ("count", "late")
        )
        phase = evidence.phase(name)
        evidence_text = (
            f"For {percent(idle[name] / (phase.wall_ns if phase else 1))} of the {name}, "
            f"{say.ms(idle[name])}, the GPU has nothing queued while the host launches: it waits "
            f"for {after:,} of {number:,} kernels and copies per {report.per}."
        )
    more = [f"{say.ms(ns)} in the {phase}" for phase, ns in idle.items() if ns and phase != name]
    evidence_text += f" Also {', '.join(more)}." if more else ""
    replaying = launching_spans & evidence.spans_of_work(evidence.work.replays & evidence.backward)
    replayed = cost and 2 * costs.of_host(replaying) >= cost
    is_compiled = cost and 2 * costs.of_host(launching_spans & compiled(evidence)) >= cost
    remedy = _REPLAYED if replayed else _COMPILED if is_compiled else _LAUNCHED
    if (replayed or is_compiled) and (breaks := graph_breaks(evidence)):
        remedy += f" The graphs break at {', '.join(breaks)}."
    busy = percent(costs.busy_ns / max(1, evidence.step_ns))
    remark = f"Without the profiler, the GPU is busy for {busy} of the step."
    if report.clock == "recorded":
        remark = "(The profiler slows the host: without it the share is lower.)"
    return finding(
        _with_phases(evidence, costs.places_of_spans(launching_spans, with_work=False), late),
        seen=f"{evidence_text} {remark}",
        remedy=_of_update(evidence) if not cost and name == "optimizer" else remedy,
        link=_COMPILE,
        nodes=costs.top_nodes(launching_spans),
        change={"graph": True},
    )


def _of_update(evidence: Evidence) -> str:
    """Return the remedy for updates that are launched too late."""
    steps = evidence.events.prefixed(Category.ANNOTATION, names.OPTIMIZER_STEP)
    return at_once(forms_of(evidence.events, steps)) or UPDATED_BY_HAND


def _late_phases(evidence: Evidence, explained: Container[str]) -> dict[str, list[Launches]]:
    """Return what launches too late in phases with many; not in the backward and ``explained``."""
    report, late = evidence.report, dict[str, list[Launches]]()
    launches = [launch for launch in evidence.recording.launches if launch.path not in explained]
    if evidence.costs.busy_ns > (1 - LEAST_LAUNCHING) * evidence.step_ns:
        return late
    for phase in report.phases:
        of_phase = [launch for launch in launches if launch.phase == phase.name]
        # It must matter as much as the same share of the backward does, or of the step.
        whole_ns = report.wall_ns if phase.name == "forward" else evidence.step_ns
        least = max(1, LEAST_LAUNCHING * max(phase.wall_ns, whole_ns))
        launching_phase = phase.name in _LAUNCHING_PHASES and f"({phase.name})" not in explained
        if launching_phase and sum(launch.idle_ns for launch in of_phase) >= least:
            late[phase.name] = of_phase
    return late


def _with_phases(evidence: Evidence, placed: Placed, late: dict[str, list[Launches]]) -> Placed:
    """Return the places together with those at which phases launch too late."""
    steps = evidence.report.steps
    by_key = {(place.path, place.class_name): place for place in placed.places}
    for launch in (launch for launches in late.values() for launch in launches if launch.idle_ns):
        key = (launch.path if launch.class_name else f"({launch.phase})", launch.class_name)
        before = by_key.get(key, Place(*key, 0, 0))
        count, wall_ns = before.count + launch.count, before.wall_ns + launch.idle_ns
        by_key[key] = replace(before, count=count, wall_ns=wall_ns)
    places = tuple(sorted(by_key.values(), key=lambda place: (-place.wall_ns, place.path)))
    wall_ns = sum(place.wall_ns for place in places)
    base = placed if placed.places else Placed((), 0, steps)  # without, nothing can be removed
    return replace(base, places=places, wall_ns=wall_ns, steps=max(base.steps, steps))


_FULL = 1000  # Events.size of a kernel with one thread block for each multiprocessor
_USED = 0.2
"""A device is mostly unused below this share, over time and multiprocessors."""
_OTHERWISE = {
    False: "use CUDA graphs or torch.compile, which save launches.",
    True: "compile with mode='reduce-overhead', which replays CUDA graphs.",
}
"""What saves launches, by whether the backward is compiled already."""


@fallback_rule(
    "small-batch",
    sources=("timm",),
    devices=("cuda",),
    needs=("blocks",),
    title="The batch is too small for the GPU",
    link="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
)
def small_batch(evidence: Evidence, others: Sequence[Finding]) -> Finding | None:
    """The GPU is often idle, and mostly empty when it runs.

    **Cause.** The step is launch-bound, and less than a fifth of the GPU's multiprocessors is in
    use: a larger batch takes hardly more time.

    **Found by** the thread blocks per multiprocessor of each kernel, weighted by time.

    **Fix.** Raise the batch size until memory or the learning rate limits it. Where it can't grow,
    use CUDA graphs or `torch.compile`.
    """
    # It stands for the idle time that no other cause claims, and is silent where others claim most.
    costs = evidence.costs
    size = evidence.events.size[evidence.work.event]
    is_known = (evidence.work.precedence == Precedence.COMPUTE) & (size >= 0)
    length = costs.device_ns[is_known]
    if not length.sum():
        return None
    used = float((np.minimum(size[is_known], _FULL) * length).sum() / length.sum() / _FULL)
    if used * costs.busy_ns > _USED * evidence.step_ns:
        return None
    launching_spans = launching(evidence)
    launch_bound = costs.of_host(launching_spans)
    if not launch_bound:
        return None
    is_compiled = 2 * costs.of_host(launching_spans & compiled(evidence)) >= launch_bound
    # A larger batch does not load faster, so waiting for data is not counted.
    before = [evidence.phase("data"), evidence.phase("host")]
    waited = sum(phase.wall_ns - phase.busy_ns for phase in before if phase)
    idle = np.maximum(launch_bound, costs.step_ns - costs.busy_ns - waited)
    # Launches of small kernels are the same cause, seen from the host.
    claimed = sum(
        _idle_claimed(evidence, other) for other in others if other.rule != "launch-bound"
    )
    left = 1 - claimed / max(1, evidence.typical.value(idle))
    if left <= 0.5:
        return None
    idle = np.round(idle * left).astype(np.int64)
    rows = [row for row in evidence.report.modules if row.is_module and row.path == row.root]
    root = max(rows, key=lambda row: row.total_wall_ns, default=None)
    path, class_name = (root.path, root.class_name) if root else ("(outside model)", "")
    busy = percent(costs.busy_ns / evidence.step_ns)
    return finding(
        costs.place(path, idle, evidence.report.steps, class_name),
        seen=(
            f"The GPU is busy for {busy} of the step, and "
            f"its kernels then have thread blocks for {percent(used)} of the multiprocessors."
        ),
        remedy=(
            "Raise the batch size until memory or the learning rate limits it: a larger batch "
            f"takes hardly more time here. If the batch can't grow, {_OTHERWISE[is_compiled]}"
        ),
        changes_training=True,
    )


def _idle_claimed(evidence: Evidence, cause: Finding) -> int:
    """Return how much of the time that a finding claims no device works for its cause."""
    work = cause.removable.work if isinstance(cause, Found) and cause.removable else None
    busy = 0 if work is None else evidence.costs.of_device(work)
    return max(0, cause.wall_ns - busy)


_CELLS_MANY = 8
"""Calls in a step: with fewer, a whole layer saves little."""


@rule(
    "recurrent-cells",
    least=0.1,
    devices=("cpu",),
    title="A loop calls an LSTM cell for each time step",
    remedy=(
        "If no input depends on an earlier output, call torch.nn.LSTM once for the whole "
        "sequence. In fp32 it computes the products of all time steps together and runs as a "
        "single operator on a CPU; in fp64 it takes as long as the loop."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html",
)
def recurrent_cells(evidence: Evidence) -> Finding | None:
    """A loop calls an LSTM cell for each time step.

    **Cause.** Python calls an `LSTMCell` for each time step: small products and a dozen small
    operators.

    **Found by** at least eight calls of `aten::lstm_cell` by a module in each step, from 10% of the
    step, with the Python between them. Cells of a GRU, and all cells in fp64, are no finding: their
    whole layers run the same operators. A whole `torch.nn.GRU` can still gain, by one product for
    the inputs of all time steps and less Python.

    **Fix.** If no input depends on an earlier output, call `torch.nn.LSTM` once with the whole
    sequence: on a CPU, steps of 52 to 168 ms took 10 to 87 ms.
    """
    # GRU and plain cells are left out, because their whole layers run the same operators. The same
    # holds for all of them in fp64, which shapes or a label of the parameters say.
    spans, costs, say = evidence.spans, evidence.costs, evidence.wording
    cells = evidence.events.named(Category.OPERATOR, "aten::lstm_cell")
    double = np.array(
        ["double" in signature.types for signature in evidence.events.signatures] + [False]
    )
    cells = cells[~double[evidence.events.signature[cells]]]
    span = spans.of(evidence.events, cells)
    owner = evidence.ownership.owner[span[(span >= 0) & ~evidence.in_pass[span]]]
    calls = np.bincount(owner, minlength=len(evidence.ownership.owners))
    looped = (calls >= _CELLS_MANY * evidence.report.steps) & ~of_doubles(evidence)
    in_loop = (span >= 0) & take(~evidence.in_pass, span, False)
    in_loop &= looped[take(evidence.ownership.owner, span, 0)]
    cells, span = cells[in_loop], span[in_loop]
    nodes = nodes_of(evidence, cells)
    # The call of a cell is nothing but the cell. A module with a loop of its own does more.
    cell = evidence.ownership.owners.mask(lambda owner: owner.class_name == "LSTMCell")
    is_whole = cell[evidence.ownership.owner[span]]
    start, end = (
        np.where(is_whole, of_call[span], of_cell[cells])
        for of_call, of_cell in (
            (spans.start, evidence.events.start),
            (spans.end, evidence.events.end),
        )
    )
    outer = np.where(is_whole, spans.parent[span], span)
    stretches = _with_python(evidence, Stretches(start, end, span), outer)
    placed = both_ways(evidence, nodes, cells, LEAST_SHARE, whole=True, stretches=stretches)
    return finding(
        placed,
        seen=(
            f"{say.per_step(int(calls[looped].sum()), 'call')} take "
            f"{say.ms(placed.wall_ns)}, forward and backward."
        ),
        nodes=costs.top_nodes(nodes),
        operators=("aten::lstm_cell",),
        at_best=True,
    )


def _with_python(evidence: Evidence, turns: Stretches, outer: Ints) -> Stretches:
    """Return the turns of loops, those as one between which only Python runs, or a view.

    Args:
        outer: the call that loops, for each turn.
    """
    events = evidence.events
    order = np.argsort(turns.start, kind="stable")
    start, end, span = (column[order] for column in (turns.start, turns.end, turns.span))
    index, _ = forward_operators(evidence)
    works = ~events.names_where(operations.is_view)[events.name[index]]
    times = np.sort(events.start[index[works]])
    alone = np.searchsorted(times, end[:-1]) == np.searchsorted(times, start[1:])
    begins = np.append(True, ~alone | (np.diff(outer[order]) != 0))[: len(order)]
    return Stretches(start[begins], end[np.append(begins[1:], True)[: len(order)]], span[begins])


@rule(
    "cpu-operators",
    sources=("sdatkinson/neural-amp-modeler#164",),
    devices=("cuda",),
    title="Operators of a GPU model run on the CPU",
    remedy=(
        "Create tensors on the device (torch.arange(…, device=x.device)), register constants "
        "as buffers so that .to() moves them, and keep NumPy out of forward and backward."
    ),
    link="https://docs.pytorch.org/docs/stable/notes/cuda.html#best-practices",
)
def cpu_operators(evidence: Evidence) -> Finding | None:
    """Operators of a GPU model run on the CPU.

    **Cause.** A GPU model computes something on the CPU while the GPU waits: a tensor without
    `device=`, a constant that is no buffer, a detour through NumPy.

    **Found by** operators of more than 0.2 ms without the driver, while the GPU idles, in every
    step, with the time right behind each, in which its memory is given back. The same takes its
    time on the GPU, too.

    **Fix.** `torch.arange(..., device=x.device)`, and `register_buffer` so that `.to()` moves
    constants. Keep sampling and sorting on the device.
    """
    costs, say = evidence.costs, evidence.wording
    index = host_operators(evidence)
    span = evidence.spans.of(evidence.events, index)
    index, span = index[span >= 0], span[span >= 0]
    cost = evidence.costs.idle_within(evidence.events.start[index], evidence.events.end[index])
    costly = (cost > 0) & _in_every_step(evidence, index, span)
    index, span, cost = index[costly], span[costly], cost[costly]
    if not len(index):
        return None
    operators = costs.top_operators(evidence.names_of(index), cost)
    none = np.zeros(len(evidence.spans.start), bool)
    start, end = evidence.events.start[index], _freed(evidence, index)
    stretches = Stretches(start, end, span)
    placed = both_ways(evidence, none, index, LEAST_SHARE, whole=True, stretches=stretches)
    return finding(
        placed,
        seen=(
            f"{say.per_step(len(index), 'operator')} on the CPU ({', '.join(operators)}), "
            f"{say.ms(placed.wall_ns)} in which the GPU is idle. The time behind them counts, "
            "too, in which their memory is given back."
        ),
        operators=operators,
        at_best=True,
        change={"free": placed.removable},
    )


def _freed(evidence: Evidence, index: Ints) -> Ints:
    """Return when the program goes on behind each of these operators.

    That is at its next operator or call of the driver on the thread, or at the end of the span; at
    most as long after the operator as that has taken.
    """
    events, spans = evidence.events, evidence.spans
    others = np.concatenate(
        [
            events.chosen(~events.is_label, Category.OPERATOR, Category.ANNOTATION),
            events.of(Category.RUNTIME),
        ]
    )
    of_thread = dict(grouped(events.thread, others))
    end = events.end[index]
    freed = end + events.duration[index]
    for thread, members in grouped(events.thread[index]):
        starts = np.append(np.sort(events.start[of_thread.get(thread, others[:0])]), FAR)
        freed[members] = np.minimum(freed[members], starts[np.searchsorted(starts, end[members])])
    ends: Ints = np.minimum(freed, spans.end[spans.of(events, index)])
    return np.maximum(ends, end)


def _in_every_step(evidence: Evidence, index: Ints, span: Ints) -> Mask:
    """Whether each operator takes long in every step, in the same module.

    An operator that takes long only once was interrupted: another process had the CPU.
    """
    owner = evidence.ownership.owner[span]
    _, kind_of = numbered(owner * len(evidence.events.names) + evidence.events.name[index])
    often: Mask = np.bincount(kind_of)[kind_of] >= evidence.report.steps
    return often


_SIZES = (
    "aten::nonzero",
    "aten::index",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique",
    "aten::repeat_interleave",
    "aten::bincount",
)
"""Operators whose result has a size that only the device knows."""
_VALUES = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
"""Operators that return a value of the device to Python."""
_COPIES = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::cpu")
_SEARCHES = ("aten::conv", "aten::cudnn_conv", "aten::miopen_conv")
"""Operators that wait for nothing but the kernels that they try."""
_KEEP = {
    _SEARCHES: (
        "With torch.backends.cudnn.benchmark = True, a convolution tries all its kernels whenever "
        "its inputs have a size that it has not seen: give them a few sizes (pad, or group by "
        "size), or turn it off."
    ),
    _VALUES: (
        "Keep values on the GPU: add them up there, and read them with one .item() in some steps, "
        "not with float(), .item(), print or an if in each."
    ),
    _SIZES: (
        "Use torch.where, a product with the mask, or a fixed size: a boolean mask, nonzero() or "
        "unique() has a result whose size the host must wait for. repeat_interleave takes "
        "output_size."
    ),
    _COPIES: (
        "Copy with non_blocking=True, from pinned memory or into it, and use the copy a step later."
    ),
}
_BATCH_NORM = (
    "SyncBatchNorm waits for its statistics in each forward. Where a rank has enough samples for "
    "its own, some 16, torch.nn.BatchNorm does; else normalize without a batch, as GroupNorm does."
)
_NO_SYNCHRONIZE = "Leave torch.cuda.synchronize() and event.synchronize() out of the step."


@rule(
    "host-waits",
    tier="stable",
    sources=(
        "Project-MONAI/MONAI#6163",
        "huggingface/transformers#11764",
        "timm",
    ),
    devices=("cuda",),
    title="The host waits for the GPU, and the GPU then for the host",
    link=(
        "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
        "#avoid-unnecessary-cpu-gpu-synchronization"
    ),
)
def host_waits(evidence: Evidence) -> Finding | None:
    """The host waits for the GPU, which then waits for the host.

    **Cause.** The host waits for the GPU, in any phase: `.item()`, `float()`, `print`, `nonzero()`
    (also in `x[mask]`), a copy that blocks, a synchronization. Then no kernels are queued, and the
    GPU idles.

    **Found by** waiting calls of the driver, at the cost of the idle time. Where the GPU is busy
    anyway, a wait costs nothing. What a step saves includes operators from `detach()` to `.item()`
    in a forward, which compute a value only to be read. `report.waits` has each place. Waits of
    [anomaly mode](#anomaly-mode) and of [`cudaFree`](#allocator-calls) belong to their own
    findings.

    **Fix.** Keep values on the GPU: add metrics up there and read them in some steps; `torch.where`
    for `x[mask]`; `clip_grad_norm_` to clip; copies with `non_blocking=True` from pinned memory.
    Within a convolution, `torch.backends.cudnn.benchmark` waits for each new size: give it a few.
    SyncBatchNorm waits by itself: use `BatchNorm` where a rank's batch is large enough, or
    `GroupNorm`.
    """
    # After a wait the host has no kernels queued. Until it is ahead again, the GPU idles between
    # kernels. Without the wait, the GPU would be spared at most the wait's own length of that.
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    # Copies to the device are found by the rule pageable-copy.
    to_device = events.correlation[events.prefixed(Category.MEMCPY, names.CUDA_TO_DEVICE)]
    waits = evidence.recording.waits
    waits = waits.where(~is_in(events.correlation[waits.event], to_device))
    # An allocator's waits are the subject of the rule allocator-calls.
    waits = waits.where(~events.names_where(names.is_release)[events.name[waits.event]])
    # Those of anomaly mode have a rule of their own, which says more.
    checks = anomaly_checks(evidence)
    inside = enclosing(events, checks, events.thread[waits.event], waits.start) >= 0
    more = int((waits.first & inside).sum())
    elsewhere = say.per_step(more, "more wait")
    waits = waits.where(~inside)
    if not len(waits.event):
        return None
    placed = costs.places_at(waits.owner, waits.start, waits.idle, waits.first.astype(np.int64))
    long, idle = (
        evidence.typical.value(costs.times_by_step(waits.start, ns))
        for ns in (waits.ns, waits.idle)
    )
    callers = events.name[np.where(waits.caller >= 0, waits.caller, waits.event)]
    spent = np.where(waits.idle > 0, waits.idle, 1)
    operators = costs.top_operators(callers, spent)
    phases = sorted({NAMES[phase] for phase in waits.phase.tolist()})
    synchronized = take(of_synchronized(evidence), waits.owner, False).mean() >= 0.5
    return finding(
        placed,
        seen=(
            f"{say.per_step(int(waits.first.sum()), 'wait')} in {', '.join(operators)} "
            f"({', '.join(phases)}). The host waits for {say.ms(long)}, and the GPU is then idle "
            f"for {say.ms(idle)}."
            f"{f' {elsewhere} are of another finding.' if more else ''}"
        ),
        remedy=_BATCH_NORM if synchronized else _without_waits(operators),
        nodes=costs.top_nodes(evidence.spans_with(evidence.spans.of(events, waits.event))),
        operators=operators,
        change={"free": _waiting(evidence, waits)},
    )


def _waiting(evidence: Evidence, waits: HostWaits) -> Removable:
    """Return the waits, with the operators that read a value, or whose result has any size.

    Of the latter, the nodes of the backward go too: an operator on all rows has neither. With what
    reads a value goes what computes it for nothing else.
    """
    events, makers = evidence.events, evidence.ownership.join.operator
    callers = merged(waits.caller[waits.caller >= 0])
    sized, read = (
        callers[events.names_where(lambda name: name.startswith(kind))[events.name[callers]]]  # noqa: B023
        for kind in (_SIZES, _VALUES)
    )
    made_nodes = np.flatnonzero((makers >= 0) & evidence.in_pass & evidence.spans.is_node)
    operator = makers[made_nodes]
    inside = enclosing(events, sized, events.thread[operator], events.start[operator])
    nodes = np.zeros(len(makers), bool)
    nodes[made_nodes[inside >= 0]] = True
    return evidence.costs.removable(
        nodes,
        evidence.work_of(nodes),
        waits.event,
        np.concatenate([sized, read, only_read(evidence, read)]),
    )


def _without_waits(operators: tuple[str, ...]) -> str:
    """Return what helps against waits in these operators."""
    remedies = [
        remedy for kind, remedy in _KEEP.items() if any(name.startswith(kind) for name in operators)
    ]
    return " ".join(remedies) or _NO_SYNCHRONIZE


_LESS = (
    "Do less for each batch: decode once and keep the result, load by whole batches, hand over "
    "uint8 and convert it on the device."
)
_WORKERS = (
    f"{_LESS} Where cores are free beside the training's, use DataLoader(num_workers=…, "
    "persistent_workers=True)."
)
_WORKERS_AND_GPU = (
    "Use DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…, pin_memory=True), "
    "and move decoding and augmentation into the workers or onto the GPU."
)
_DATA_WHOLE = (
    "If the data is in memory, index it by whole batches: DataLoader(data, batch_size=None, "
    "sampler=loader.batch_sampler), which draws as this loader does, and for which data[indices] "
    "returns a batch. A worker process costs more than this wait."
)
_DATA_LOOK = (
    "Find out what the program does before it copies the batch. If it loads data, prepare the "
    "next batch in other processes while the GPU computes."
)
_DATA_LEAST = 500_000
_LEAST_FOR_WORKERS = 5_000_000
"""Nanoseconds of a wait. Handing a batch from one process to another takes a few milliseconds of
their processors (measured: 0.1 to 1 ms of loading became 3.5 to 5.5 ms with a worker)."""
_LEAST_HANDOVER = 0.05
"""Of the step. Where workers and training share few cores, one tensor takes 2%."""
_LOADING = "https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading"


@rule(
    "waiting-for-data",
    tier="stable",
    sources=("shenweichen/DeepCTR-Torch#70", "open-edge-platform/geti#1694"),
)
def waiting_for_data(evidence: Evidence) -> Finding | None:
    """The step waits for its batch.

    **Cause.** The step waits for its next batch. A faster backward does not help.

    **Found by** the `data` phase: the step stands still for 0.5 ms or more while the DataLoader
    works. Of a loader with workers, only the time until the batch has arrived is a wait
    ([how](how-it-works.md#batches-of-workers)), and where they decide how long a step takes, both
    paces are said: "the workers deliver 21 batches a second, the model takes 33". Without marks of
    a loader, the finding is that the GPU is idle before a batch is copied (the `host` phase),
    whatever the host does; where stacks say that, it is left to [python-code](#python-code) and
    [code-around-model](#code-around-model).

    **Fix.** For a GPU: workers (`num_workers`, `persistent_workers=True`, `prefetch_factor`),
    pinned memory, and decoding on the GPU or once beforehand. Where workers are late already, or on
    a CPU: less work for each batch, then more workers, as these need free cores. Below 5 ms, as
    workers cost some milliseconds themselves: index data in memory by whole batches,
    `DataLoader(data, batch_size=None, sampler=loader.batch_sampler)`.
    """
    # Without the marks of a loader, it looks at the host before the first operator, where nothing
    # is recorded. On a GPU, a copy follows, which may be that of a batch. Without a GPU, nothing
    # shows what the time is spent on. With several workers, the step may wait for one of them in
    # every second step, say, and find the batches of the others ready.
    fetches = evidence.events.names_where(names.is_fetch_mark)
    loading = evidence.events.chosen(fetches, Category.ANNOTATION)
    marked = len(loading) > 0
    name = "data" if marked else "host"
    phase = evidence.phase(name)
    if phase is None or not (marked or evidence.report.has_gpu):
        return None
    known_ns = sum(line.wall_ns for line in lines_of(evidence.report) if line.phase == name)
    if not marked and 2 * known_ns >= phase.wall_ns:
        return None  # stacks say what the host does, and rules about lines whether it matters
    say, costs, batches = evidence.wording, evidence.costs, evidence.batches
    handed_over = evidence.by_step(batches.start, _handed_over(evidence))
    waits = np.maximum(np.array(phase.wall_ns_by_step) - handed_over, 0)
    waits[waits < LEAST_SHARE * costs.step_ns] = 0
    in_turn = ""
    if marked and 2 * (often := int(np.count_nonzero(waits))) <= len(waits):
        # Several workers deliver in turn: one wait is for the batches of several steps.
        waits[:] = evidence.typical.value(waits)
        in_turn = f" It is a mean: the step waits {say.in_steps(often)}."
    spent = evidence.typical.value(waits)
    if marked and spent < _DATA_LEAST:
        return None
    time = f"{say.ms(spent)} of each step, {say.share(spent)},"
    saves = None
    if marked:
        title = "The step waits for its data"
        evidence_text = (
            f"{time} pass before the next batch is ready. The model does not run in this time."
            f"{in_turn}{_paces(evidence, spent)}"
        )
        workers = _WORKERS_AND_GPU if evidence.device == "cuda" else _WORKERS
        remedy = _DATA_WHOLE
        if len(batches.event) or spent >= _LEAST_FOR_WORKERS:
            remedy = _more_than(batches) or workers
        if (batches.waited < 0).any():
            saves = Saving(spent, 0, spent, at_best=True)  # it may have been unpickled meanwhile
    else:
        title = "The GPU is idle before the batch is copied"
        evidence_text = (
            f"{time} pass before the batch is copied. The trace has nothing of what the host does "
            "in this time. It may load data."
        )
        remedy = _DATA_LOOK
    # A batch of a worker is still unpickled where it is never waited for.
    thread = evidence.events.thread[batches.event]
    around = enclosing(evidence.events, loading, thread, batches.start)
    own = loading[~is_in(loading, merged(batches.event, around))]
    removable = costs.removable(None, None, batches.event[batches.waited != 0], own)
    return finding(
        costs.place(f"({name})", waits, evidence.report.steps),
        title=title,
        seen=evidence_text,
        remedy=remedy,
        link=_LOADING,
        change={"free": removable} if marked and saves is None else {},
        saves=saves,
    )


def _tensors_of(evidence: Evidence) -> tuple[Ints, Ints]:
    """Return how many tensors each batch has, and the time from the first of them to the last.

    Each that comes from a worker's memory is set to this memory once.
    """
    batches, events = evidence.batches, evidence.events
    index = events.named(Category.OPERATOR, "aten::set_")
    count, length = np.zeros((2, len(batches.event)), np.int64)
    for thread, members in grouped(events.thread[batches.event]):
        times = np.sort(events.start[index[events.thread[index] == thread]])
        first = np.searchsorted(times, batches.arrived[members])
        last = np.searchsorted(times, batches.end[members])
        count[members] = last - first
        several = members[last - first > 1]
        begin, end = (times[place[last - first > 1]] for place in (first, last - 1))
        length[several] = evidence.costs.elapsed(begin, end)
    return count, length


def _handed_over(evidence: Evidence) -> Ints:
    """Return for how long each batch is taken over from a worker after it has arrived."""
    batches = evidence.batches
    takes = evidence.costs.elapsed(batches.arrived, batches.end)
    return np.where(batches.waited < 0, 0, takes)


def _more_than(batches: Batches) -> str:
    """Return what helps where there are workers, ``""`` if it is not known how many."""
    workers = int(batches.workers.max(initial=0))
    if not workers:
        return ""
    more = "more than this one worker" if workers == 1 else f"more than these {workers} workers"
    return (
        f"{_LESS} Where cores are free, use {more}: DataLoader(num_workers=…, "
        "persistent_workers=True)."
    )


def _paces(evidence: Evidence, spent: int) -> str:
    """Return how many batches the workers deliver, and the model could take, in a second."""
    batches = evidence.batches
    late = np.flatnonzero(batches.waited > 0)
    if len(late) < 2 or len(distinct(batches.loader[late])) > 1:
        return ""
    of_loader = np.flatnonzero(batches.loader == batches.loader[late[0]])
    count = int(np.searchsorted(of_loader, late[-1]) - np.searchsorted(of_loader, late[0]))
    period = float(batches.arrived[late[-1]] - batches.arrived[late[0]]) / count
    takes = evidence.step_ns - spent
    if takes <= 0 or period <= takes:
        return ""
    return (
        f" Data limits the step: the workers deliver {1e9 / period:,.3g} batches a second, the "
        f"model takes {1e9 / takes:,.3g}."
    )


@rule(
    "batch-handover",
    sources=("roboflow/rf-detr#1399",),
    title="Batches that are ready take long to take over from the workers",
    remedy=(
        "Hand over a few large tensors: have the workers collate a batch into one tensor, and "
        "not into many or into lists, as uint8 where that is enough. Where it goes to a GPU, "
        "pin_memory=True has a thread unpickle it beside the training."
    ),
)
def batch_handover(evidence: Evidence) -> Finding | None:
    """Batches that are ready take long to unpickle.

    **Cause.** The program takes long to take over batches that its workers had ready. More workers
    do not help.

    **Found by** the time from a batch's arrival to the end of its fetch, from 5% of the step and
    0.5 ms, where most batches were ready. It goes into unpickling, and into asking the worker for
    its memory, once for each tensor. Counted is the time from the first tensor to the last, and of
    the rest what is longer than the 5 ms that one tensor may take, also in the fastest quarter of
    the fetches: that goes into Python objects.

    **Fix.** Let the workers collate a batch into one tensor instead of many or of lists, and hand
    over uint8 where that is enough. For a GPU, `pin_memory=True`: a thread unpickles beside the
    training.
    """
    say, costs, batches = evidence.wording, evidence.costs, evidence.batches
    is_known = batches.waited >= 0
    if not is_known.any():
        return None
    tensors, between = _tensors_of(evidence)
    ns = _handed_over(evidence)
    usual = int(np.sort(tensors)[len(tensors) // 2])
    objects = ns
    if tensors.any():
        # A fetch takes over what other workers have sent, too: the time between two batches is not
        # the time between the tensors of one.
        of_a_batch = 1 - min(1.0, len(tensors) / int(tensors.sum()))
        within = np.minimum(1.0, of_a_batch * tensors / np.maximum(1, tensors - 1))
        between = (between * within).astype(np.int64)
        # A worker can be slow to answer: what nearly all fetches take is of the objects.
        rest = np.maximum(ns - between - _LEAST_FOR_WORKERS, 0)
        objects = np.minimum(rest, int(quantile(rest[is_known], 0.25)))
    start = batches.start[is_known]
    whole, of_objects, spent = (
        evidence.by_step(start, column[is_known]) for column in (ns, objects, between + objects)
    )
    ready = int((batches.waited == 0).sum())
    typical = evidence.typical.value(spent)
    least = max(_DATA_LEAST, _LEAST_HANDOVER * evidence.step_ns)
    if typical < least or 2 * ready <= len(batches.event):
        return None
    of_tensors = f"a batch of {usual:,} tensors" if usual > 1 else "a batch"
    if 2 * evidence.typical.value(of_objects) > typical:
        of_tensors = "the Python objects of a batch"
    return finding(
        costs.place("(data)", spent, evidence.report.steps),
        seen=(
            f"For {say.ms(typical)} of each step, {say.share(typical)}, the program unpickles "
            f"{of_tensors} that has arrived. {ready:,} of {len(batches.event):,} batches were "
            "ready when they were asked for: more workers do not shorten this."
        ),
        link=_LOADING,
        change={"handover": 1 - typical / max(1, evidence.typical.value(whole))},
    )


@rule(
    "exposed-communication",
    title="Communication between ranks is not hidden",
    remedy=(
        "If one rank is late, the others wait for it here: backspot ranks says which. "
        "Otherwise use larger or earlier buckets (bucket_cap_mb of DistributedDataParallel), "
        "FSDP's prefetching, gradients in bf16, or no_sync() while gradients accumulate."
    ),
    link="https://docs.pytorch.org/docs/stable/notes/ddp.html",
)
def exposed_communication(evidence: Evidence) -> Finding | None:
    """Ranks communicate while nothing is computed.

    **Cause.** Collectives run while this rank computes nothing.

    **Found by** kernels of NCCL and RCCL beside which nothing runs, and exchanges of gloo and MPI
    while the host runs no node. The time is in rows such as `(gradient exchange)`.

    **Fix.** Ask [`backspot ranks`](ranks.md) first which rank is late. If none is: with
    DistributedDataParallel, other sizes of `bucket_cap_mb`, or gradients in bf16
    (`bf16_compress_hook`); with FSDP2, prefetch (`set_modules_to_backward_prefetch`) or keep
    parameters (`reshard_after_forward=False`). While gradients accumulate: `no_sync()`, or
    `set_requires_gradient_sync(False)` of FSDP2.
    """
    costs, say = evidence.costs, evidence.wording
    work = (evidence.work.precedence == Precedence.COMMUNICATION) & evidence.recorded
    cost = costs.of_work(work)
    if not cost:
        return None
    owners = evidence.ownership.owners
    owner = np.where(work, evidence.ownership.work_owner, NOTHING)
    spent = costs.places_by_step(costs.work_by_step(owner, len(owners))).places
    exchanges = ", ".join(
        f"{say.ms(phase.wall_ns)} in {phase.path}" for phase in spent if phase.wall_ns
    )
    return finding(
        replace(costs.places_of_work(work), removable=costs.removable(None, work)),
        seen=(
            f"{say.per_step(int(work.sum()), 'collective')}, "
            f"{say.ms(costs.of_device(work))} in all. For {say.ms(cost)} this rank "
            f"computes nothing and waits for other ranks: {exchanges}."
        ),
        nodes=costs.top_nodes(evidence.spans_of_work(work)),
        kernels=costs.top_kernels(work),
    )


@rule(
    "collector-pauses",
    tier="stable",
    sources=("huggingface/peft#2894", "karpathy/nanochat#477", "Nerogar/OneTrainer#1459"),
    seldom=True,
    title="Python's garbage collector stops the training",
    remedy=(
        "Call gc.collect() and then gc.freeze() once before the first step, and keep fewer "
        "Python objects (arrays in place of lists); or gc.disable() with a gc.collect() every "
        "so many steps, on all ranks in the same step."
    ),
    link="https://docs.python.org/3/library/gc.html#gc.freeze",
)
def collector_pauses(evidence: Evidence) -> Finding | None:
    """Python's garbage collector stops the training.

    **Cause.** Python's garbage collector looks at all objects of the program now and then; with
    many (a data set as lists) that takes long. Of many ranks, all wait for the one that collects.

    **Found by** marks around full collections, which `backspot run`, `profile` and the callbacks
    write, at the cost of their mean over all recorded steps. At least two of these must have one: a
    single one may be due to the recording.

    **Fix.** `gc.collect()` and then `gc.freeze()` once before the first step; arrays in place of
    lists; or `gc.disable()` and a collection every so many steps, on all ranks in the same step.
    """
    # A pause holds up the step as long as no device has work. Recording allocates, too, so that one
    # collection may be its own.
    events, costs, steps = evidence.events, evidence.costs, evidence.report.steps
    marks = events.prefixed(Category.ANNOTATION, names.COLLECTION)
    start, end = events.start[marks], events.end[marks]
    held_ns = costs.idle_within(start, end) if evidence.report.has_gpu else end - start
    pauses = costs.times_by_step(start, end - start)
    saved = int(costs.times_by_step(start, held_ns).sum()) // steps
    held_up = int(np.count_nonzero(pauses))
    if held_up < 2:  # what came once says nothing about how often it comes
        return None
    cost = int(pauses.sum()) // steps
    say = evidence.wording
    return finding(
        Placed((Place("(garbage collector)", "", 1, cost),), cost, held_up),
        seen=(
            f"It looks at all objects {say.in_steps(held_up)}, for {say.ms(int(pauses.max()))} "
            f"at most: {say.ms(cost)} a step on average, while nothing is launched."
        ),
        saves=Saving(saved, saved // 2, min(2 * saved, cost)),
    )
