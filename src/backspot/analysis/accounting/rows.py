"""What each owner costs: from ownership to nanoseconds, none lost and none counted twice.

In each step, the rows sum to the backward to the nanosecond. The pieces of a typical step are those
of the steps that count, each with its part of the mean. So they sum to its backward, too: by row,
by node, by line and by device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from backspot.analysis.accounting.clock import Clock, WallKind
from backspot.analysis.accounting.payers import Payers
from backspot.analysis.accounting.phases import PhaseTimes, choose_steps
from backspot.analysis.accounting.pieces import (
    Pieces,
    joined,
    line_costs,
    node_costs,
    operators_inside,
    summed,
    summed_by_step,
)
from backspot.analysis.accounting.steps import StepWindows
from backspot.analysis.attribution.launches import Windows
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.timeline import (
    NOTHING,
    Timeline,
    first_started,
    grouped,
    layered,
    merged,
    numbered,
    take,
)
from backspot.analysis.typical import TypicalStep
from backspot.results.costs import (
    Coverage,
    DeviceCost,
    KernelCost,
    LineCost,
    NodeCost,
    OperatorCost,
    Pass,
    Row,
    WallKinds,
)
from backspot.results.grouping import (
    add_totals,
    ranked_kernels,
    ranked_lines,
    ranked_nodes,
    ranked_rows,
)
from backspot.trace import Events
from backspot.trace.events import Ints, Mask

__all__ = ["BackwardCosts", "account"]

# Listed among the nodes, although they are none.
_RECOMPUTE = "(recompute)"
_REPLAY = "(before a graph's replay)"
_ADDED = (_RECOMPUTE, _REPLAY)  # then the collectives


@dataclass(frozen=True, slots=True)
class BackwardCosts:
    """What the backward of a trace costs; each field as in ``Report``, and the steps that count."""

    typical: TypicalStep
    noise: float
    modules: tuple[Row, ...]
    operators: tuple[OperatorCost, ...]
    passes: tuple[Pass, ...]
    devices: tuple[DeviceCost, ...]
    wall_ns: int
    gpu_ns: int
    cpu_ns: int
    wall_ns_by_step: tuple[int, ...]
    gpu_ns_by_step: tuple[int, ...]
    cpu_ns_by_step: tuple[int, ...]
    coverage: Coverage


def account(
    events: Events,
    ownership: Ownership,
    clock: Clock,
    windows: StepWindows | Windows,
    phases: PhaseTimes | None = None,
) -> BackwardCosts:
    """Turn ownership into costs.

    ``cpu`` is the host's time in an owner's spans, without other spans nested in these. ``gpu`` is
    the sum of the durations of the owner's device work. ``wall`` is clock time. Each moment
    goes to the device work that runs then: compute before copies before communication, then what
    started first. While the device idles before work that is already launched, the moment goes to
    that work. While nothing is queued, it goes to what the host executes, or to the engine.

    Args:
        windows: the clock time of its steps, or of its passes where the trace has nothing else.
        phases: the clock time of their phases, if the steps have any.
    """
    return _Accountant(events, ownership, clock, windows, phases).costs()


@dataclass(frozen=True, slots=True)
class _Holders:
    """All that can hold the clock; arrays with one entry a payer, as in ``Payers``.

    Attributes:
        is_backward: whether the time of this holder is time of the backward.
        is_optimizer: whether an optimizer launched this device work.
        node: as in ``Pieces``.
        span: the span, or the one around the launch; ``NOTHING`` for none.
        launch: when device work was launched, ``NOTHING`` where that is not known.
    """

    is_backward: Mask
    is_optimizer: Mask
    node: Ints
    span: Ints
    launch: Ints


class _Dealt(NamedTuple):
    """The clock time of passes.

    Attributes:
        backward: the backward's time in pieces.
        forward_tail: for each pass, the time of forward work that still ran in it.
        other: for each pass, the time of all other work.
    """

    backward: Pieces
    forward_tail: Ints
    other: Ints


class _Accountant:
    def __init__(
        self,
        events: Events,
        ownership: Ownership,
        clock: Clock,
        windows: StepWindows | Windows,
        phases: PhaseTimes | None,
    ) -> None:
        self.events = events
        self.o, self.clock, self.steps = ownership, clock, ownership.steps
        self.step_ends = windows.end
        self.spans, self.work, self.passes = ownership.spans, ownership.work, ownership.passes
        self.in_pass = self.passes.of_span >= 0
        recompute = self.in_pass & ~self.spans.is_node
        self.recompute_node = len(self.spans.node_names)
        self.replay_node = self.recompute_node + 1
        self.node = np.where(recompute, self.recompute_node, self.spans.node)
        communication = ownership.communication
        collectives = [f"({name})" for name in communication.names]
        self.names = (*self.spans.node_names, *_ADDED, *collectives)
        collective = communication.collective
        communicates = collective >= 0
        self.work_node = np.where(
            communicates,
            collective + len(self.spans.node_names) + len(_ADDED),
            take(self.node, self.work.span),
        )
        host = Shares.one_each(ownership.owner, ownership.line)
        self.payers = Payers(ownership, host, ownership.work_shares, Special.ENGINE)
        self.holders = self._table()
        self.dealt = self._wall()
        wall = self.dealt.backward
        by_owner = self._by_step(wall, wall.owner, len(ownership.owners))
        self.typical = choose_steps(events, ownership, windows, by_owner, phases)
        self.noise = self.typical.noise(by_owner)

    def _table(self) -> _Holders:
        """Tabulate what can hold the clock."""
        work, spans = self.work, len(self.spans.start)
        no_work, nothing = np.full(spans, NOTHING), [NOTHING]
        started = work.run >= 0
        launched = work.launch >= 0
        of_node = take(self.in_pass, work.span, False)
        compiled = self.o.compiled.span
        no_launch = np.full(len(compiled), NOTHING)
        node = np.where(self.in_pass, self.node, NOTHING)
        return _Holders(
            is_backward=np.concatenate(
                [
                    np.ones(spans, bool),
                    of_node | ~launched | (started & (work.span < 0)),
                    np.ones(len(compiled), bool),
                    [True],
                ]
            ),
            is_optimizer=np.concatenate([no_work >= 0, work.optimizer, no_launch >= 0, [False]]),
            node=np.concatenate([node, self.work_node, take(node, compiled), nothing]),
            span=np.concatenate([np.arange(spans), work.span, compiled, nothing]),
            launch=np.concatenate([no_work, work.launch, no_launch, nothing]),
        )

    # Pieces of time ------------------------------------------------------------------------------

    def _deal(self, clock: Timeline, chosen: Ints, device: int) -> _Dealt:
        """Deal out the clock time of some passes.

        Args:
            clock: who holds each moment.
            device: the device that they wait for, ``NOTHING`` for none.
        """
        windows, holders = self.o.windows, self.holders
        in_window = first_started(windows.start[chosen], windows.end[chosen], chosen)
        clock = clock.cut(merged(in_window.edges, self.payers.edges))
        run = in_window.over(clock.edges[:-1])
        inside = run >= 0
        run = run[inside]
        holder = clock.values[:-1][inside]
        is_host = holder < len(self.spans.start)
        holder = self.payers.of_holders(holder, clock.edges[:-1][inside])
        amount = np.diff(clock.edges)[inside]
        kind = self.clock.kinds(clock, device).values[:-1][inside]
        # Where the device idles before a captured graph: the span that launches the replay.
        replay = self.clock.replays(device).over(clock.edges[:-1])[inside]
        span = holders.span[holder]

        backward = holders.is_backward[holder]
        before_backward = (span >= 0) | (holders.launch[holder] < self.passes.start[run])
        forward_tail = ~backward & before_backward & ~holders.is_optimizer[holder]
        other = ~backward & ~forward_tail

        before_replay = (replay >= 0) & (span == replay)
        node = np.where(before_replay, self.replay_node, holders.node[holder])
        # Outside of a pass, the host executes nothing for it: a forward call on another thread.
        elsewhere = is_host & ~take(self.in_pass, span, True)
        payer = np.where(elsewhere, self.payers.nothing, holder)
        piece, _ = self._paid(
            run[backward], payer[backward], amount[backward], node[backward], kind[backward]
        )
        count = len(self.passes.start)
        return _Dealt(
            piece,
            summed(run[forward_tail], amount[forward_tail], count),
            summed(run[other], amount[other], count),
        )

    def _wall(self) -> _Dealt:
        """Deal out the clock time of all passes."""
        parts = [
            self._deal(self.clock.of_passes(device), chosen, device)
            for device, chosen in grouped(self.o.windows.device)
        ]
        none = np.zeros(len(self.passes.start), np.int64)
        return _Dealt(
            joined([part.backward for part in parts]),
            sum((part.forward_tail for part in parts), none),
            sum((part.other for part in parts), none),
        )

    def _cpu(self) -> Pieces:
        amount = np.zeros(len(self.holders.span), np.int64)
        for indices, nesting in self.spans.nesting.values():
            timeline = nesting.timeline.cut(self.payers.edges)
            if len(timeline.edges):
                length = np.diff(timeline.edges)
                top = take(indices, timeline.values[:-1])
                payer = self.payers.of_holders(top, timeline.edges[:-1])
                np.add.at(amount, payer[top >= 0], length[top >= 0])
        return self._of_spans(amount)

    def _gpu(self) -> tuple[Pieces, Ints]:
        """Device work by owner; and which work each piece is."""
        work = self.work
        mine = np.flatnonzero((work.run >= 0) & (work.device >= 0))
        piece, place = self._of_work(mine, work.end[mine] - work.start[mine])
        return piece, mine[place]

    def _of_work(self, mine: Ints, amount: Ints) -> tuple[Pieces, Ints]:
        """Amounts of some device work as pieces; and the place in ``mine`` of each piece."""
        payer = self.payers.of_work(mine)
        return self._paid(self.work.run[mine], payer, amount, self.holders.node[payer])

    def _of_spans(self, amount: Ints) -> Pieces:
        """Amounts of spans, or of all payers, as pieces, of those in spans that run in a pass."""
        run = take(self.passes.of_span, self.holders.span[: len(amount)])
        payer = np.flatnonzero(run >= 0)
        return self._paid(run[payer], payer, amount[payer], self.holders.node[payer])[0]

    def _paid(
        self, run: Ints, payer: Ints, amount: Ints, node: Ints, kind: Ints | None = None
    ) -> tuple[Pieces, Ints]:
        """Split amounts among the owners of payers; and return of which amount each piece is."""
        shares = self.payers.shares
        place, share, part = shares.split(payer, amount)
        node = node[place]
        replay = node == self.replay_node
        piece = Pieces(
            run=run[place],
            owner=shares.owner[share],
            node=np.where(shares.again[share] & ~replay, self.recompute_node, node),
            line=np.where(replay, NOTHING, shares.line[share]),
            amount=part,
            kind=np.empty(0, np.int64) if kind is None else kind[place],
            is_split=self.payers.is_split[payer][place],
        )
        return piece, place

    def _serving(self, *, by_line: bool) -> Pieces:
        """The nodes of compiled regions, once for each other owner, and line, that they work for.

        Args:
            by_line: count a node once for each line of an owner.
        """
        payer = np.concatenate(
            [
                self.payers.of_work(np.flatnonzero(self.o.compiled.of_work >= 0)),
                self.payers.of_launches(np.arange(len(self.o.compiled.event))),
            ]
        )
        payer = payer[take(self.in_pass, self.holders.span[payer], False)]
        piece, place = self._paid(
            self.passes.of_span[self.holders.span[payer]],
            payer,
            np.ones(len(payer), np.int64),
            self.holders.node[payer],
        )
        span = self.holders.span[payer][place]
        line = piece.line if by_line else np.full(len(span), NOTHING)
        other = (piece.owner != self.o.owner[span]) | (piece.node != self.node[span])
        if by_line:
            other |= line != self.o.line[span]
        columns = np.stack([span, piece.owner, piece.node, line])[:, other]
        span, owner, node, line = np.unique(columns, axis=1)
        run = self.passes.of_span[span]
        one = np.ones(len(span), np.int64)
        return Pieces(run, owner, node, line, one, is_split=np.zeros(len(span), bool))

    def _by_step(self, piece: Pieces, key: Ints, count: int) -> Ints:
        """Sum pieces, with one row a key and one column a step."""
        step = self.steps.of_pass[piece.run]
        return summed_by_step(key, step, piece.amount, count, self.steps.count)

    def _forward(self, owners: int) -> Ints:
        """Each owner's forward time in each step, by the same rule as wall."""
        devices = [device.timeline for device in self.clock.devices.values()]
        clock = layered(*devices) if devices else self.clock.host
        if not len(clock.edges):
            return np.zeros((owners, self.steps.count), np.int64)
        clock = clock.cut(self.payers.edges)
        holder, amount = clock.values[:-1], np.diff(clock.edges)
        is_work = holder >= len(self.spans.start)
        payer = self.payers.of_holders(holder, clock.edges[:-1])
        span = self.holders.span[payer]
        windows = self.o.windows
        every = np.arange(len(windows.start))
        in_window = first_started(windows.start, windows.end, every).over(clock.edges[:-1]) >= 0
        forward = (span >= 0) & ~take(self.in_pass, span, True)
        forward &= is_work | ~in_window  # in a window, the host's time is the pass's
        # A forward belongs to the step that ends next.
        step = np.searchsorted(self.step_ends, clock.edges[:-1][forward], side="right")
        step = np.minimum(step, self.steps.count - 1)
        place, share, part = self.payers.shares.split(payer[forward], amount[forward])
        owner = self.payers.shares.owner[share]
        return summed_by_step(owner, step[place], part, owners, self.steps.count)

    # Costs ---------------------------------------------------------------------------------------

    def costs(self) -> BackwardCosts:
        """Sum up all pieces."""
        dealt, cpu = self.dealt, self._cpu()
        wall, (gpu, launched) = dealt.backward, self._gpu()
        exchanges = np.flatnonzero((self.work.run >= 0) & (self.o.communication.collective >= 0))
        executed = joined(
            [
                self._of_spans(np.ones(len(self.spans.start), np.int64)),
                self._of_work(exchanges, np.ones(len(exchanges), np.int64))[0],
            ]
        )
        recorded = (wall, gpu, cpu)
        usual = tuple(map(self._usual, recorded))
        wall, gpu, cpu = usual
        serving = [joined([executed, self._serving(by_line=by_line)]) for by_line in (False, True)]
        nodes = node_costs(serving[0], usual, self.names, self.steps, self.typical)
        lines = line_costs(
            serving[1],
            usual,
            self.names,
            self.o.lines,
            self.steps,
            self.typical,
            exact=self.o.exact_lines,
        )
        kernels = self._kernels(gpu, launched) if self.clock.devices else self._operators_inside()
        rows = add_totals(self._rows(recorded, usual, nodes, kernels, lines))
        whole = [self._by_step(piece, np.zeros_like(piece.run), 1)[0] for piece in recorded]
        is_module = self.o.owners.is_module
        totals = [int(piece.amount.sum()) for piece in usual]
        parts = [int(piece.amount[is_module[piece.owner]].sum()) for piece in usual]
        shares = [part / total if total else 1.0 for part, total in zip(parts, totals, strict=True)]
        return BackwardCosts(
            typical=self.typical,
            noise=self.noise,
            modules=ranked_rows(rows),
            operators=self._operators(executed, usual, nodes),
            passes=self._passes(dealt, recorded[1], recorded[2]),
            devices=self._devices(wall, gpu, self.work.device[launched]),
            wall_ns=totals[0],
            gpu_ns=totals[1],
            cpu_ns=totals[2],
            wall_ns_by_step=tuple(whole[0].tolist()),
            gpu_ns_by_step=tuple(whole[1].tolist()),
            cpu_ns_by_step=tuple(whole[2].tolist()),
            coverage=Coverage(*shares),
        )

    def _usual(self, piece: Pieces) -> Pieces:
        """Return pieces with what a typical step has of each."""
        step = self.steps.of_pass[piece.run]
        keys = (piece.owner, piece.node, piece.line)
        return replace(piece, amount=self.typical.apportioned(piece.amount, step, *keys))

    def _passes(self, dealt: _Dealt, gpu: Pieces, cpu: Pieces) -> tuple[Pass, ...]:
        windows, count = self.o.windows, len(self.passes.start)
        nodes = self.passes.of_span[self.spans.is_node & self.in_pass]
        duration = windows.end - windows.start
        columns = (
            windows.start,
            duration,
            duration - dealt.forward_tail - dealt.other,
            dealt.forward_tail,
            dealt.other,
            summed(gpu.run, gpu.amount, count),
            summed(cpu.run, cpu.amount, count),
            np.bincount(nodes, minlength=count),
            self.o.steps.of_pass,
        )
        return tuple(map(Pass, *(column.tolist() for column in columns)))

    def _rows(
        self,
        recorded: tuple[Pieces, ...],
        usual: tuple[Pieces, ...],
        nodes: dict[int, list[NodeCost]],
        kernels: dict[int, list[KernelCost]],
        lines: dict[int, list[LineCost]],
    ) -> list[Row]:
        spans, steps = self.spans, self.steps.count
        owners, is_module = len(self.o.owners), self.o.owners.is_module
        by_step = [self._by_step(piece, piece.owner, owners) for piece in recorded]
        by_step.append(self._forward(owners))
        costs = [summed(piece.owner, piece.amount, owners).tolist() for piece in usual]
        costs.append(self.typical.mean(by_step[3]).tolist())
        wall = usual[0]
        again = wall.where(wall.node == self.recompute_node)
        recompute = summed(again.owner, again.amount, owners).tolist()
        part = wall.where(wall.is_split)
        split = summed(part.owner, part.amount, owners).tolist()
        kinds = len(WallKind)
        spent_on = summed(wall.owner * kinds + wall.kind, wall.amount, owners * kinds)
        spent_on = spent_on.reshape(owners, kinds)
        compiled = self.o.compiled
        in_forward = ~take(self.in_pass, compiled.caller, False)
        called = np.concatenate(
            [spans.module[(spans.module >= 0) & ~self.in_pass], compiled.called[in_forward]]
        )
        calls = np.bincount(self.o.owners.of_modules(called), minlength=owners) / steps
        rows = []
        for owner in range(owners):
            module, named = self.o.owners.module(owner), bool(is_module[owner])
            runs = any(each[owner].any() for each in by_step[:3])
            if not named and not runs and not nodes[owner]:
                continue
            own = [column[owner] for column in costs]
            path, class_name = self.o.owners.named(owner)
            rows.append(
                Row(
                    path=path,
                    class_name=class_name,
                    root=module.root if module and named else "",
                    is_module=named,
                    calls=float(calls[owner]),
                    wall_ns=own[0],
                    gpu_ns=own[1],
                    cpu_ns=own[2],
                    forward_ns=own[3],
                    recompute_ns=recompute[owner],
                    split_ns=split[owner],
                    total_wall_ns=0,
                    total_gpu_ns=0,
                    total_cpu_ns=0,
                    total_forward_ns=0,
                    total_recompute_ns=0,
                    nodes=ranked_nodes(nodes[owner]),
                    kernels=ranked_kernels(kernels[owner]),
                    lines=ranked_lines(lines[owner]),
                    wall_on=WallKinds(*spent_on[owner].tolist()),
                    wall_ns_by_step=tuple(by_step[0][owner].tolist()),
                    gpu_ns_by_step=tuple(by_step[1][owner].tolist()),
                    cpu_ns_by_step=tuple(by_step[2][owner].tolist()),
                    forward_ns_by_step=tuple(by_step[3][owner].tolist()),
                )
            )
        return rows

    def _kernels(self, gpu: Pieces, launched: Ints) -> dict[int, list[KernelCost]]:
        """Each owner's device work by name."""
        return self._by_name(gpu, self.work.name[launched].astype(np.int64), self.events.names)

    def _operators_inside(self) -> dict[int, list[KernelCost]]:
        """Each owner's outermost operators in nodes by name."""
        events = self.events
        index, span = operators_inside(events, self.o)
        launch = np.full(len(events.start), NOTHING)
        launch[self.o.compiled.event] = np.arange(len(self.o.compiled.event))
        launch = launch[index]
        payer = np.where(launch >= 0, self.payers.of_launches(launch), span)
        none = np.full(len(index), NOTHING)
        piece, place = self._paid(self.passes.of_span[span], payer, events.duration[index], none)
        name = events.name[index][place].astype(np.int64)
        step = self.steps.of_pass[piece.run]
        amount = self.typical.apportioned(piece.amount, step, piece.owner, name)
        return self._by_name(replace(piece, amount=amount), name, events.names)

    def _by_name(
        self, piece: Pieces, name: Ints, names: Sequence[str]
    ) -> dict[int, list[KernelCost]]:
        width = len(names)
        keys, inverse = numbered(piece.owner * width + name)
        step, steps = self.steps.of_pass[piece.run], self.steps.count
        ones = np.ones(len(inverse), np.int64)
        spent = summed(inverse, piece.amount, len(keys))
        count = self.typical.count(summed_by_step(inverse, step, ones, len(keys), steps))
        kernels: dict[int, list[KernelCost]] = defaultdict(list)
        for key, times, total in zip(keys.tolist(), count.tolist(), spent.tolist(), strict=True):
            if times:
                kernels[key // width].append(KernelCost(names[key % width], times, total))
        return kernels

    def _operators(
        self, executed: Pieces, usual: tuple[Pieces, ...], nodes_of: dict[int, list[NodeCost]]
    ) -> tuple[OperatorCost, ...]:
        payers: dict[str, tuple[int, int, int, int]] = {}
        for owner, nodes in nodes_of.items():
            for node in nodes:
                key = (node.wall_ns, node.gpu_ns, node.cpu_ns, owner)
                payers[node.name] = max(payers.get(node.name, key), key)
        count, *everywhere = (
            replace(piece, owner=np.zeros_like(piece.owner)) for piece in (executed, *usual)
        )
        operators = [
            OperatorCost(
                name=node.name,
                count=node.count,
                wall_ns=node.wall_ns,
                gpu_ns=node.gpu_ns,
                cpu_ns=node.cpu_ns,
                path=self.o.owners.path(payers[node.name][3]) if node.name in payers else "",
            )
            for node in node_costs(count, everywhere, self.names, self.steps, self.typical)[0]
        ]
        return tuple(sorted(operators, key=lambda o: (-o.wall_ns, -o.gpu_ns, -o.cpu_ns, o.name)))

    def _devices(self, wall: Pieces, gpu: Pieces, device: Ints) -> tuple[DeviceCost, ...]:
        """Each device's own table: the passes as if they waited for this device alone."""
        every = np.arange(len(self.passes.start))
        costs = []
        for number, clock in self.clock.devices.items():
            mine = device == number
            if len(self.clock.devices) > 1:
                wall = self._usual(self._deal(clock.timeline, every, number).backward)
            costs.append(
                DeviceCost(
                    device=number,
                    wall_ns=self._by_path(wall),
                    gpu_ns=self._by_path(gpu.where(mine)),
                )
            )
        return tuple(costs)

    def _by_path(self, piece: Pieces) -> dict[str, int]:
        costs = summed(piece.owner, piece.amount, len(self.o.owners))
        held = np.flatnonzero(costs)
        ranked = held[np.argsort(-costs[held], kind="stable")]
        return {self.o.owners.path(index): int(costs[index]) for index in ranked.tolist()}
