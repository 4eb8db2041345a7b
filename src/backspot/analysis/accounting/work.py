"""How much work each module does: floating point operations and bytes, from recorded shapes.

An operator may call others, and both may have a formula: the outermost one counts. If an operator
calls itself, the inner call counts: autocast casts the inputs in between. What no formula covers is
unknown. Its share is that of the device's time, or without a device of the host's time in
the owner's nodes.

Inside compiled regions, an operator works for the modules of its launch site. What generated
kernels of pointwise work and reductions move is known from their sites; what they compute is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from backspot.analysis.accounting.formulas import (
    Formula,
    Inputs,
    Unknown,
    bytes_formulas,
    flops_formulas,
)
from backspot.analysis.attribution.compiled import Compiled
from backspot.analysis.attribution.launches import in_optimizer
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.timeline import NOTHING, first_started, grouped, merged, numbered, take
from backspot.results.work import WorkOfModule
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask, Signature

_MOST = float(1 << 61)
_SAVING = ("aten::detach", "detach", "PythonDispatchMode")
"""What ``torch.utils.checkpoint`` calls for each tensor that it saves, or that it has saved."""


class Counted(msgspec.Struct, frozen=True):
    """The outermost operators with a formula.

    Attributes:
        index: the events.
        amount: what the formula counts for each, ``NOTHING`` where it cannot.
    """

    index: Ints
    amount: Ints

    def with_more(self, others: Counted) -> Counted:
        """Return these and others."""
        columns = ((self.index, others.index), (self.amount, others.amount))
        return Counted(*map(np.concatenate, columns))


def find_work(events: Events, ownership: Ownership) -> tuple[WorkOfModule, ...] | None:
    """Return the work of each owner; ``None`` if the inputs of operators were not recorded."""
    if not len(events.signatures):
        return None
    inputs = _InputsOf(events.signatures)
    flops, moved = (
        count_work(events, formulas, inputs) for formulas in (flops_formulas(), bytes_formulas())
    )
    moved = moved.with_more(_generated(events, ownership.compiled))
    by_flops, by_bytes = (_by_owner(events, ownership, counted) for counted in (flops, moved))
    share = _unknown_share(events, ownership, flops, moved)
    backward, forward = _by_type(events, ownership, flops, inputs)
    return tuple(
        WorkOfModule(*operations, *sizes, *types, unknown)
        for operations, sizes, types, unknown in zip(
            by_flops, by_bytes, zip(backward, forward, strict=True), share, strict=True
        )
    )


class _InputsOf(dict[int, Inputs | None]):
    """The inputs of each signature, read when first asked for; ``None`` for none that is known."""

    def __init__(self, signatures: Sequence[Signature]) -> None:
        super().__init__({NOTHING: None})
        self._signatures = signatures

    def __missing__(self, signature: int) -> Inputs | None:
        try:
            inputs: Inputs | None = Inputs.of(self._signatures[signature])
        except Unknown:
            inputs = None
        self[signature] = inputs
        return inputs


def count_work(
    events: Events,
    formulas: Mapping[str, Formula],
    inputs: Mapping[int, Inputs | None] | None = None,
) -> Counted:
    """Return the work of the operators of a trace, each piece of work once.

    Args:
        formulas: the formula of each operator that has one.
        inputs: the inputs of each signature; read from the trace where they are left out.
    """
    inputs = _InputsOf(events.signatures) if inputs is None else inputs
    has_one = events.names_where(formulas.__contains__)
    index = events.chosen(has_one, Category.OPERATOR)
    index = index[~_call_themselves(events, index)]
    outermost = [
        operators[
            first_started(events.start[operators], events.end[operators], operators).at(
                events.start[operators]
            )
            == operators
        ]
        for _, operators in grouped(events.thread, index)
    ]
    index = np.sort(np.concatenate([index[:0], *outermost]))
    index = index[_ran(events, index)]
    first, kind = _alike(events, index)
    amounts = [
        _amount(formulas[events.names[name]], inputs[signature])
        for name, signature in zip(
            events.name[first].tolist(), events.signature[first].tolist(), strict=True
        )
    ]
    amount = np.array(amounts, np.int64)[kind]
    if amount.sum(dtype=np.float64) > _MOST:  # no recording: the sums would not fit 64 bits
        amount[:] = NOTHING
    return Counted(index, amount)


def _generated(events: Events, compiled: Compiled) -> Counted:
    """Return the generated kernels, and the bytes that their sites say."""
    loops = events.names_where(names.is_generated_loop)[events.name[compiled.event]]
    chosen = loops & (compiled.moved >= 0)
    return Counted(compiled.event[chosen], compiled.moved[chosen])


def _call_themselves(events: Events, index: Ints) -> Mask:
    """Whether each of these operators calls an operator of the same name."""
    repeated = np.zeros(len(index), bool)
    columns = (-events.end, events.start, events.name, events.thread)
    order = np.lexsort([column[index] for column in columns])
    ordered = index[order]
    inside = events.start[ordered[1:]] < events.end[ordered[:-1]]
    for column in (events.thread, events.name):
        inside &= column[ordered[1:]] == column[ordered[:-1]]
    repeated[order[:-1]] = inside
    return repeated


def _ran(events: Events, index: Ints) -> Mask:
    """Whether each of these operators did its work.

    Activation checkpointing stops the forward that runs again when it has what it needs, which is
    within an operator that has saved its inputs and not begun. Selective checkpointing hands out
    what it has saved. Such an operator calls nothing but what saves tensors or hands them out, and
    launches nothing, while others with the same inputs do.
    """
    called = np.zeros(len(index), np.int64)
    does = events.names_where(lambda name: name not in _SAVING)
    on_host = events.chosen(does, Category.OPERATOR, Category.RUNTIME)
    of_thread = dict(grouped(events.thread[index]))
    for thread, others in grouped(events.thread, on_host):
        operators = of_thread.get(thread)
        if operators is not None:
            starts = np.sort(events.start[others], kind="stable")
            begin, end = events.start[index[operators]], events.end[index[operators]]
            called[operators] = np.searchsorted(starts, end) - np.searchsorted(
                starts, begin, "right"
            )
    first, alike = _alike(events, index)
    most = np.zeros(len(first), np.int64)
    np.maximum.at(most, alike, called)
    ran: Mask = (called > 0) | (most[alike] <= 0)
    return ran


def _alike(events: Events, index: Ints) -> tuple[Ints, Ints]:
    """Return one operator of each name and signature, and for each of these its place there."""
    name, signature = events.name[index].astype(np.int64), events.signature[index]
    _, kind = numbered(name * (len(events.signatures) + 1) + signature + 1)
    first = np.empty(int(kind.max(initial=-1)) + 1, np.int64)
    first[kind] = index
    return first, kind


def _amount(formula: Formula, inputs: Inputs | None) -> int:
    if inputs is None:
        return NOTHING
    try:
        amount = formula(inputs)
    except (Unknown, TypeError, ValueError, IndexError, ArithmeticError, AttributeError):
        return NOTHING  # the trace may hold anything
    return amount if 0 <= amount < 1 << 53 else NOTHING


def _by_owner(
    events: Events, ownership: Ownership, counted: Counted
) -> list[tuple[int | None, int | None, int | None]]:
    """Return what each owner does in forward, when it runs again, and in backward."""
    spans, steps, owners = ownership.spans, ownership.steps, len(ownership.owners)
    countable = counted.amount >= 0
    index, amount = counted.index[countable], counted.amount[countable]
    span = spans.of(events, index)
    run = take(ownership.passes.of_span, span)
    node = take(spans.is_node, span, False)
    owner = take(ownership.owner, span, Special.OUTSIDE)
    # In compiled code, each launch has owners of its own.
    shares = ownership.launch_shares
    launch = ownership.compiled.around(events, index)
    launched = np.flatnonzero(launch >= 0)
    place, share, divided = shares.split(launch[launched], amount[launched])
    rest, place = np.flatnonzero(launch < 0), launched[place]
    piece_order = np.concatenate([rest, place])
    index, run, node = index[piece_order], run[piece_order], node[piece_order]
    owner = np.concatenate([owner[rest], shares.owner[share]])
    amount = np.concatenate([amount[rest], divided])
    again = np.concatenate([np.zeros(len(rest), bool), shares.again[share]])
    # A forward belongs to the pass that comes next.
    coming = np.searchsorted(ownership.passes.start, events.start[index], side="right")
    step = np.append(steps.of_pass, NOTHING)[np.where(run >= 0, run, coming)]
    node &= ~again
    # What an optimizer computes is no forward of the model.
    start, thread = events.start[index], events.thread[index]
    updates = in_optimizer(events, ownership.passes, start, thread)
    when: tuple[Mask, ...] = ((run < 0) & ~updates, (run >= 0) & ~node, (run >= 0) & node)
    columns: list[list[int | None]] = []
    for chosen in when:
        chosen = chosen & (step >= 0)
        sums = np.zeros((owners, steps.count), np.int64)
        np.add.at(sums, (owner[chosen], step[chosen]), amount[chosen])
        any_work, mean = np.count_nonzero(sums, axis=1) > 0, sums.sum(axis=1) // steps.count
        columns.append(
            [
                value if is_known else None
                for value, is_known in zip(mean.tolist(), any_work.tolist(), strict=True)
            ]
        )
    return list(zip(*columns, strict=True))


def _by_type(
    events: Events, ownership: Ownership, flops: Counted, inputs: Mapping[int, Inputs | None]
) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Return the operations of each owner by type: of the backward, and of the forward."""
    signatures, kind_of = np.unique(events.signature[flops.index], return_inverse=True)
    types = [_type_of(inputs[signature]) for signature in signatures.tolist()]
    kinds = sorted({*types, _TF32})
    kind = np.array([kinds.index(type_name) for type_name in types], np.int64)[kind_of]
    on_tensor_cores = (kind == kinds.index("fp32")) if "fp32" in kinds else kind < 0
    on_tensor_cores &= _launches(events, ownership, flops.index, names.is_tf32)
    kind[on_tensor_cores] = kinds.index(_TF32)
    by_type: tuple[list[dict[str, int]], ...] = tuple(
        [{} for _ in range(len(ownership.owners))] for _ in range(2)
    )
    for number in merged(kind).tolist():
        is_type = kind == number
        of_type = Counted(flops.index[is_type], flops.amount[is_type])
        for owner, (first, again, back) in enumerate(_by_owner(events, ownership, of_type)):
            for table, count in zip(by_type, ((again or 0) + (back or 0), first or 0), strict=True):
                if count:
                    table[owner][kinds[number]] = count
    return by_type[0], by_type[1]


_TF32 = "tf32"
_TYPES = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "float": "fp32",
    "double": "fp64",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
}


def _type_of(inputs: Inputs | None) -> str:
    """Return the type of the last tensor of two or three: of a factor, not of what is added."""
    if inputs is None:
        return "other"
    place = inputs.tensors[1:2] or inputs.tensors[:1]
    return _TYPES.get(inputs.types[place[0]], "other") if place else "other"


def _launches(
    events: Events, ownership: Ownership, index: Ints, matches: Callable[[str], bool]
) -> Mask:
    """Whether each of these operators launched device work with a name that matches."""
    work = ownership.work
    good = events.names_where(matches)
    chosen = np.flatnonzero(good[work.name] & (work.launch >= 0))
    place = np.full(len(events.start), NOTHING, np.int64)
    place[index] = np.arange(len(index))
    launches = np.zeros(len(index), bool)
    of_thread = dict(grouped(events.thread[index]))
    for thread, pieces in grouped(work.thread, chosen):
        if thread in of_thread:
            operators = index[of_thread[thread]]
            line = first_started(events.start[operators], events.end[operators], operators)
            around = line.at(work.launch[pieces])
            launches[place[around[around >= 0]]] = True
    return launches


def _unknown_share(
    events: Events, ownership: Ownership, flops: Counted, moved: Counted
) -> list[float]:
    """Return the share of each owner's time in backward that no formula covers."""
    index = np.concatenate([counted.index[counted.amount >= 0] for counted in (flops, moved)])
    covers = {
        thread: first_started(events.start[operators], events.end[operators], operators)
        for thread, operators in grouped(events.thread, index)
    }
    work, spans, owners = ownership.work, ownership.spans, len(ownership.owners)
    total, known_time = np.zeros(owners), np.zeros(owners)
    in_pass = ownership.passes.of_span >= 0
    launched = np.flatnonzero(take(in_pass, work.span, False))
    if len(launched):
        length = work.end[launched] - work.start[launched]
        covered = np.zeros(len(launched), bool)
        for thread, pieces in grouped(work.thread[launched]):
            if thread in covers:
                covered[pieces] = covers[thread].at(work.launch[launched[pieces]]) >= 0
        place, share, divided = ownership.work_shares.split(launched, length)
        owner = ownership.work_shares.owner[share]
        np.add.at(total, owner, divided)
        np.add.at(known_time, owner[covered[place]], divided[covered[place]])
    else:
        for thread, (pieces, nesting) in spans.nesting.items():
            line = nesting.timeline
            cover = covers.get(thread)
            if not len(line.edges):
                continue
            cut = line if cover is None else line.cut(merged(cover.edges))
            span = take(pieces, cut.values[:-1])
            length = np.where(take(in_pass, span, False), np.diff(cut.edges), 0)
            owner = take(ownership.owner, span, 0)
            np.add.at(total, owner, length)
            if cover is not None:
                inside = cover.at(cut.edges[:-1]) >= 0
                np.add.at(known_time, owner[inside], length[inside])
    return [
        1.0 - known_ns / all_ if all_ else 0.0
        for known_ns, all_ in zip(known_time.tolist(), total.tolist(), strict=True)
    ]
