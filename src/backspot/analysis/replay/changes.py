"""Changes by name: what people can do about a step, each as the time that its work would take.

A maker is a function of the recording and of what is asked, under ``@named("…")``. It returns a
``Change``, or a ``Refusal`` that says why the change cannot be predicted. ``what_if`` asks for
changes by these names, and findings for their remedies. Several are made together: the factors of
what several of them change are multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from backspot.analysis.accounting.activity import NAMES
from backspot.analysis.accounting.peaks import peaks_of
from backspot.analysis.attribution.launches import Precedence
from backspot.analysis.attribution.ownership import Special
from backspot.analysis.attribution.updates import forms_of
from backspot.analysis.findings import Removable
from backspot.analysis.replay.host import Floats
from backspot.analysis.replay.replayable import Refusal, Replayable
from backspot.analysis.replay.saving import (
    Change,
    change_of,
    change_of_paths,
    owners_within,
)
from backspot.analysis.replay.waits import HostWait
from backspot.analysis.timeline import (
    NOTHING,
    distinct,
    enclosing,
    first_started,
    grouped,
    is_in,
    median,
    merged,
    quantile,
    take,
)
from backspot.formatting import counted
from backspot.trace import Category, names, operations
from backspot.trace.events import Ints, Mask
from backspot.trace.operations import FUSED, FusedForm, Kind, optimizer_of

Maker: TypeAlias = Callable[[Replayable, Any], Change | Refusal]
Made = TypeVar("Made", bound=Maker)


class Named(msgspec.Struct, frozen=True):
    """A change with a name.

    Attributes:
        make: makes the change.
        at_best: whether more than this cannot be saved, but less can.
    """

    make: Maker
    at_best: bool


CHANGES: dict[str, Named] = {}
"""The changes by name."""


def named(name: str, *, at_best: bool = False) -> Callable[[Made], Made]:
    """Register a maker."""

    def register(maker: Made) -> Made:
        CHANGES[name] = Named(maker, at_best)
        return maker

    return register


def change_by_names(recording: Replayable, requests: Mapping[str, Any]) -> Change | Refusal:
    """Return the change that makes all of these changes, each with what it is asked for."""
    changes = []
    for name, request in requests.items():
        if name == "graph" and "no_waits" not in requests and (waits := _captured_waits(recording)):
            return Refusal(
                f"graph: the host waits for the device {counted(waits, 'time')} within what a "
                "graph would capture: ask for no_waits too."
            )
        change = CHANGES[name].make(recording, request)
        if isinstance(change, Refusal):
            return Refusal(f"{name}: {change.reason}")
        changes.append(change)
    return changes[0] if len(changes) == 1 else _together(recording, changes)


def said(request: tuple[str, Any]) -> str:
    """Return a change as people ask for it."""
    name, value = request
    if name == "factors":
        listed = [f"{path or '(root)'}={factor:g}" for path, factor in sorted(value.items())]
        return ", ".join(listed) if len(listed) < 4 else f"{len(listed)} modules"
    if name == "fuse":
        return f"fuse {counted(len(value), 'module')}"
    return name if value is True else f"{name}={value}"


def _together(recording: Replayable, changes: Iterable[Change]) -> Change:
    host, work = np.ones(len(recording.part)), np.ones(len(recording.ownership.work.start))
    waits = [np.empty(0, np.int64)]
    updating = recording.intervals(np.array([recording.forward_outside + 1]))[0]
    for change in changes:
        host[change.host] *= change.host_factors
        work[change.work] *= change.work_factors
        host[updating] *= 1 - change.update[0]
        work[recording.update] *= 1 - change.update[1]
        waits.append(change.waits)
    return _of_factors(host, work, merged(*waits))


def _of_factors(host: Floats, work: Floats, waits: Ints | None = None) -> Change:
    """Return the change with a factor for each interval of the host and each piece of work."""
    on_host, on_device = np.flatnonzero(host != 1), np.flatnonzero(work != 1)
    none = np.empty(0, np.int64)
    return Change(
        on_host, host[on_host], on_device, work[on_device], none if waits is None else waits
    )


def _unchanged(recording: Replayable) -> tuple[Floats, Floats]:
    return np.ones(len(recording.part)), np.ones(len(recording.ownership.work.start))


def _between(recording: Replayable, start: Ints, end: Ints) -> list[slice]:
    """Return the intervals of the host from each of these times to another, without waits."""
    edges = recording.line.edges
    first, last = np.searchsorted(edges, start), np.searchsorted(edges, end)
    return [slice(*ends) for ends in zip(first.tolist(), last.tolist(), strict=True)]


def _covered(recording: Replayable, start: Ints, end: Ints) -> Floats:
    """Return which part of each interval of the host lies within these stretches of time.

    A stretch can end within an operator, whose other part stays.
    """
    line = first_started(start, end, np.zeros(len(start), np.int64))
    if not len(line.edges):
        return np.zeros(len(recording.part))
    length = np.diff(line.edges) * (line.values[:-1] >= 0)
    edges = recording.line.edges
    inside = np.diff(np.interp(edges, line.edges, np.append(0.0, np.cumsum(length))))
    covered: Floats = inside / np.diff(edges).clip(1)
    return covered


# Modules, and work that a finding names ----------------------------------------------------------


named("factors")(change_of_paths)


@named("free")
def free(recording: Replayable, work: Removable) -> Change:
    """Work is not done at all: spans, stretches, operators with what they launch, and waits.

    Launches of compiled code in a span go with it.
    """
    host, of_work = _left_of(recording, work)
    return _of_factors(host, of_work, work.waits)


def _left_of(recording: Replayable, work: Removable, left: float = 0.0) -> tuple[Floats, Floats]:
    """Return the factors of the host's intervals and of device work where so much of some is left.

    Args:
        left: 0 for nothing of it.
    """
    host, of_work = _unchanged(recording)
    events, device = recording.events, recording.ownership.work
    launches = take(work.spans, recording.ownership.compiled.span, False)
    host[recording.intervals(np.flatnonzero(np.append(work.spans, launches)))[0]] = left
    start, end = work.stretches
    covered = _covered(
        recording,
        np.concatenate([events.start[work.operators], start]),
        np.concatenate([events.end[work.operators], end]),
    )
    host = np.minimum(host, 1.0 - (1.0 - left) * covered)
    around = enclosing(events, work.operators, device.thread, device.launch)
    of_work[work.work | (around >= 0)] = left
    return host, of_work


@named("parts")
def _parts(recording: Replayable, requests: Sequence[tuple[Removable, float]]) -> Change | Refusal:
    """Of some work, a part is not done. The host launches the rest as before, and waits for it."""
    host, of_work = _unchanged(recording)
    for work, fraction in requests:
        more, of_device = _left_of(recording, work, 1.0 - fraction)
        host *= more
        of_work *= of_device
    return _of_factors(host, of_work)


@named("update")
def _update(recording: Replayable, paths: Sequence[str]) -> Change | Refusal:
    """The parameters of modules are not updated densely: their share of the update is gone."""
    inside = owners_within(recording.ownership, paths).values()
    owners = {owner for numbers in inside for owner in numbers}
    of_host, of_device = recording.of_update[:, sorted(owners)].sum(axis=1).tolist()
    if not of_host + of_device:
        return Refusal("the trace does not say how many parameters the module has.")
    none = np.empty(0, np.int64), np.empty(0)
    return change_of(recording, none, none, update=(of_host, of_device))


@named("phases")
def _phases(recording: Replayable, factors: Mapping[str, float]) -> Change | Refusal:
    """Phases take another time: the host's, and that of what is launched in them.

    The host waits for no device in a phase that is free. It is idle where it is in no phase.
    """
    if recording.activity is None:
        return Refusal("the trace does not say where steps begin.")
    factor = np.array([factors.get(name, 1.0) for name in (*NAMES, "idle")])
    work, waits = recording.ownership.work, _of_device(recording)
    times, passes = recording.line.edges[:-1], recording.ownership.passes
    phase = recording.activity.host.at(times)
    begun = np.searchsorted(passes.start, times, side="right")
    backward = (phase < 0) & (begun > np.searchsorted(passes.end, times, side="right"))
    host = factor[np.where(backward, NAMES.index("backward"), phase)]
    launched = recording.activity.of_launches(work.thread, work.launch)
    of_work = np.where(launched >= 0, factor[launched], 1.0)
    start, event = np.array([(wait.start, wait.event) for wait in waits], np.int64).reshape(-1, 2).T
    free_of = factor[recording.activity.host.at(start)] == 0
    return _of_factors(host, of_work, event[free_of])


# Waits and launches ------------------------------------------------------------------------------


@named("no_waits")
def _no_waits(recording: Replayable, _: object) -> Change | Refusal:
    """The host waits for no device."""
    waits = np.array([wait.event for wait in _of_device(recording)], np.int64)
    if not len(waits):
        return Refusal("the host waits for no device in the recorded steps.")
    return _of_factors(*_unchanged(recording), waits)


@named("handover")
def _handover(recording: Replayable, left: float) -> Change | Refusal:
    """To take over a batch from the workers takes this part of its time once it has arrived."""
    host, of_work = _unchanged(recording)
    batches = recording.batches
    host -= (1.0 - left) * _covered(recording, batches.arrived, batches.end)
    return _of_factors(host, of_work)


def _of_device(recording: Replayable) -> list[HostWait]:
    """Return where the host waits for a device, but for room in a queue."""
    return [wait for wait in recording.waits if wait.causes and not wait.for_room]


@named("graph", at_best=True)
def _graph(recording: Replayable, _: object) -> Change | Refusal:
    """The host launches forward, backward and update at once, as a CUDA graph does."""
    work = recording.ownership.work
    if not (work.device >= 0).any():
        return Refusal("the step runs on no GPU, and a graph saves nothing but launches.")
    if work.replays.any():
        return Refusal("the step replays graphs already.")
    host, of_work = _unchanged(recording)
    host[recording.part >= 0] = 0.0
    return _of_factors(host, of_work)


def _captured_waits(recording: Replayable) -> int:
    """Return in how many calls the host waits within forward, backward and update."""
    ends = np.array([wait.end for wait in _of_device(recording)], np.int64)
    interval = np.searchsorted(recording.line.edges, ends) - 1
    return int((recording.part[interval] >= 0).sum()) if len(interval) else 0


# Chains as one kernel ----------------------------------------------------------------------------

_LIBRARY = re.compile(
    r"gemm|cutlass|cublas|wgmma|xmma|conv|wgrad|dgrad|_ffma|winograd|Cijk_|flash|fmha|attention"
    r"|nvjet|splitK|sort|scan|embedding|index|scatter|gather"
    r"|aten::(lstm|gru|nll_loss|copy_|item)",
    re.IGNORECASE,
)
"""Kernels and operators that a generated kernel does not take in, beside products and ``cat``."""
_A_WHILE = 0.1  # of the median operator of a chain


@named("fuse", at_best=True)
def _fuse(recording: Replayable, chosen: Sequence[str] | Removable) -> Change | Refusal:
    """Chains of operators run as one kernel, which takes as long as the usual one among them.

    It reads each input once and writes each output once, as an operator on few tensors does.
    """
    ownership, events = recording.ownership, recording.events
    operators = np.empty(0, np.int64)
    if isinstance(chosen, Removable):
        spans, operators = chosen.spans, chosen.operators
    else:
        inside = owners_within(ownership, chosen).values()
        owners = {owner for numbers in inside for owner in numbers}
        spans = is_in(ownership.owner, sorted(owners))
    good = ~events.names_where(_stays)
    host, of_work = _unchanged(recording)
    work = ownership.work
    if (work.device >= 0).any():
        in_chain = take(spans, work.span, False)
        in_chain |= enclosing(events, operators, work.thread, work.launch) >= 0
        in_chain &= (work.precedence == Precedence.COMPUTE) & good[work.name]
        order = np.lexsort((work.start, work.queue))
        group = _turns(recording, work.queue, work.launch, work.run >= 0)
        chains = _chains(order, in_chain, group, work.end - work.start)
        for chain, longest, factor in chains:
            of_work[chain] = np.where(chain == longest, factor, 0.0)
            (between,) = _between(recording, work.launch[chain[:1]], work.launch[chain[-1:]])
            host[between] = 0.0
    else:
        index = _outermost(recording)
        span = ownership.spans.of(events, index)
        in_chain = (take(spans, span, False) | is_in(index, operators)) & good[events.name[index]]
        backward = take(ownership.passes.of_span, span, NOTHING) >= 0
        order = np.lexsort((events.start[index], events.thread[index]))
        group = _turns(recording, events.thread[index], events.start[index], backward)
        chains = _chains(order, in_chain, group, events.duration[index])
        for chain, longest, factor in chains:
            first, last, longest_event = index[chain[:1]], index[chain[-1:]], index[[longest]]
            (between,) = _between(recording, events.start[first], events.end[last])
            (fused_interval,) = _between(
                recording, events.start[longest_event], events.end[longest_event]
            )
            host[between], host[fused_interval] = 0.0, factor
    if not chains:
        return Refusal("these modules have no chain of operators that one kernel could do.")
    return _of_factors(host, of_work)


def _stays(name: str) -> bool:
    """Whether a generated kernel does not take in this kernel or operator."""
    kind = operations.kind_of(operations.of_operator(name))
    return kind in (Kind.PRODUCT, Kind.JOIN) or _LIBRARY.search(name) is not None


def _chains(order: Ints, chosen: Mask, group: Ints, length: Ints) -> list[tuple[Ints, int, float]]:
    """Return what is chosen one after the other in an order and of one group; at least 2 each.

    Each chain comes with what takes longest in it, and which part of that time is the median of all
    in it that take a while: views take none.
    """
    in_order, groups = chosen[order], group[order]
    breaks = np.flatnonzero(
        np.append(True, ~(in_order[1:] & in_order[:-1] & (groups[1:] == groups[:-1])))
    )
    chains = []
    for chain in np.split(order, breaks[1:]):
        if len(chain) > 1:
            ns, longest = length[chain], int(chain[np.argmax(length[chain])])
            usual = median(ns[ns >= _A_WHILE * median(ns)])
            chains.append((chain, longest, float(usual) / max(1, int(length[longest]))))
    return chains


def _turns(recording: Replayable, line: Ints, time: Ints, backward: Mask) -> Ints:
    """Number what runs on each thread or queue by the pass that it is in, or that comes next."""
    passes = recording.ownership.passes
    before = np.searchsorted(passes.start, time, side="right")
    turns: Ints = (line.astype(np.int64) * (len(passes.start) + 1) + before) * 2 + backward
    return turns


def _outermost(recording: Replayable) -> Ints:
    """Return the operators that no other one calls, by thread and time."""
    events = recording.events
    index = events.chosen(events.prefix_mask(names.ATEN), Category.OPERATOR)
    outermost = []
    for _, members in grouped(events.thread, index):
        members = members[np.lexsort((-events.end[members], events.start[members]))]
        end = np.maximum.accumulate(events.end[members])
        outermost.append(
            members[np.append(True, events.start[members[1:]] >= end[:-1])[: len(members)]]
        )
    return np.concatenate([np.empty(0, np.int64), *outermost])


# The optimizer -----------------------------------------------------------------------------------

_TRAFFIC = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "sqrt": 2, "neg": 2, "copy": 2, "maximum": 3,
    "lerp": 3, "addcmul": 4, "addcdiv": 4,
}  # fmt: skip
"""How many tensors as large as the parameter an operator reads and writes; of `add`, `sub` and
`mul` in an optimizer, one operand is mostly a number."""
_LAUNCHING = 1_800
"""Nanoseconds for each tensor that the host takes to launch a fused optimizer. (On the host of an
H100: 1.5 to 2.4 µs for 76 to 293 tensors; Python before and after takes as long as for foreach.)"""


@named("optimizer")
def _optimizer(recording: Replayable, kind: str) -> Change | Refusal:
    """Each optimizer updates all of its parameters in one operator."""
    events, work = recording.events, recording.ownership.work
    marks = events.prefixed(Category.ANNOTATION, names.OPTIMIZER_STEP)
    classes = dict(zip(marks.tolist(), forms_of(events, marks), strict=True))
    used = set(classes.values())
    if kind != "fused":
        return Refusal(f"only 'fused' can be predicted, not {kind!r}.")
    if not used or not used <= set(FUSED):
        lack = [mark for mark, form in classes.items() if form not in FUSED]
        optimizers = {optimizer_of(events.names[name]) for name in events.name[lack]}
        without = ", ".join(sorted(optimizers))
        return Refusal(f"{without or 'the optimizer'} has no fused form.")
    index = _outermost(recording)
    inside = enclosing(events, marks, events.thread[index], events.start[index])
    index, inside = index[inside >= 0], inside[inside >= 0]
    done = [re.sub(r"^aten::(_foreach_)?|_$", "", name) for name in events.names]
    if any(done[name].startswith("_fused") for name in distinct(events.name[index])):
        return Refusal("the optimizer is fused already.")
    factors: dict[str, float] = {}
    for optimizer in used:
        of_optimizer = np.array([classes[mark] == optimizer for mark in inside.tolist()], bool)
        factor = _factor_of_fused(
            FUSED[optimizer], [done[name] for name in events.name[index[of_optimizer]]]
        )
        if factor is None:
            return Refusal("the operators of the optimizer are not recorded.")
        factors[optimizer] = factor
    host, of_work = _unchanged(recording)
    length = events.duration[index].astype(np.float64)
    on_host, least = not len(work.start), float(quantile(length, 0.1))
    least = least if on_host else min(least, _LAUNCHING)
    recorded_tensors = (
        sum(parameter.tensors for parameter in events.compiled.parameters) if len(used) == 1 else 0
    )
    launched = enclosing(events, marks, work.thread, work.launch)
    for mark in merged(inside).tolist():
        optimizer = classes[mark]
        of_optimizer = index[inside == mark]
        (all_of_it,) = _between(
            recording, events.start[of_optimizer[:1]], events.end[of_optimizer].max(keepdims=True)
        )
        update_ns = float(np.diff(recording.line.edges)[all_of_it].sum())
        spent = float((events.duration[of_optimizer] - least).clip(0).sum()) * on_host
        base = FUSED[optimizer].base
        tensors = max(
            recorded_tensors, sum(done[name] == base for name in events.name[of_optimizer].tolist())
        )
        needed = factors[optimizer] * spent + least * tensors
        host[all_of_it] = min(1.0, needed / max(update_ns, 1.0))
        of_work[(launched == mark) & (work.precedence == Precedence.COMPUTE)] = factors[optimizer]
    return _of_factors(host, of_work)


def _factor_of_fused(form: FusedForm, done: Sequence[str]) -> float | None:
    """Return which part of its traffic an optimizer has as one operator; ``None`` if not known."""
    parameters = done.count(form.base)
    if not parameters:
        return None
    moves = sum(_TRAFFIC.get(operation, 0) for operation in done) / parameters
    return min(1.0, form.moves / moves)


@named("groups")
def _groups(recording: Replayable, request: tuple[float, float]) -> Change:
    """The optimizer has fewer groups, each with the tensors of several.

    Asked are the part of the host's time that goes with groups, and the part of them that stays.
    """
    of_groups, left_over = request
    events, work = recording.events, recording.ownership.work
    marks = events.prefixed(Category.ANNOTATION, names.OPTIMIZER_STEP)
    host, of_work = _unchanged(recording)
    begin = recording.ownership.passes.after(events.start[marks], events.end[marks])
    for interval in _between(recording, begin, events.end[marks]):
        host[interval] = 1 - (1 - left_over) * of_groups
    updating = enclosing(events, marks, work.thread, work.launch, start=begin) >= 0
    updating &= events.names_where(names.is_fused_optimizer)[work.name]
    if updating.any():  # to start a kernel takes as long as the shortest do, whatever they compute
        length = (work.end - work.start)[updating].clip(1)
        of_work[updating] = 1 - (1 - left_over) * (float(quantile(length, 0.1)) / length).clip(
            max=1.0
        )
    return _of_factors(host, of_work)


# Types of numbers --------------------------------------------------------------------------------


@named("dtype", at_best=True)
def _dtype(recording: Replayable, request: str | tuple[str, Removable]) -> Change | Refusal:
    """Products that run in fp32 run on tensor cores, at the rate of the device: all, or these."""
    events, work = recording.events, recording.ownership.work
    dtype, chosen = (request, None) if isinstance(request, str) else request
    used = {events.device_names.get(device, "") for device in distinct(work.device)}
    peaks = peaks_of(used.pop(), None, None) if len(used) == 1 else None
    if dtype not in ("bf16", "fp16", "tf32"):
        return Refusal(f"only 'bf16', 'fp16' and 'tf32' can be predicted, not {dtype!r}.")
    if peaks is None or not peaks.tflops.get(dtype) or not peaks.tflops.get("fp32"):
        return Refusal("it is not known how fast the device computes in it.")
    slow = events.names_where(names.is_without_tensor_cores)[work.name]
    if chosen is not None:
        slow = slow & chosen.work
    if not slow.any():
        return Refusal("no matrix product runs in fp32 without tensor cores.")
    host, of_work = _unchanged(recording)
    of_work[slow] = min(1.0, peaks.tflops["fp32"] / peaks.tflops[dtype])
    return _of_factors(host, of_work)


# Between ranks -----------------------------------------------------------------------------------


@named("buckets", at_best=True)
def _buckets(recording: Replayable, number: int) -> Change | Refusal:
    """The gradients are exchanged in so many equal buckets, the last one after the backward."""
    work, windows = recording.ownership.work, recording.steps
    exchanged = recording.ownership.work_owner == Special.GRADIENTS
    _, of_work = _unchanged(recording)
    for step in range(len(windows.start)):
        exchanges = np.flatnonzero(exchanged & (windows.of_work == step))
        if len(exchanges) < 2:
            return Refusal("the recording has fewer than two buckets to divide in another way.")
        length = (work.end - work.start)[exchanges].astype(np.float64)
        total_ns = float(length.sum())
        last = min(total_ns / number, total_ns)
        of_work[exchanges[-1]] = last / max(length[-1], 1.0)
        of_work[exchanges[:-1]] = (total_ns - last) / max(float(length[:-1].sum()), 1.0)
    return _of_factors(_unchanged(recording)[0], of_work)
