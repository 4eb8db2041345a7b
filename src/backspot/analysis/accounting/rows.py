"""What each owner costs: ownership becomes nanoseconds, none lost and none counted twice."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from backspot.analysis.accounting.clock import Clock, WallKind
from backspot.analysis.accounting.pieces import Piece, joined, line_costs, node_costs, summed
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.timeline import (
    NOTHING,
    Timeline,
    first_started,
    grouped,
    layered,
    numbered,
    pieces,
    take,
)
from backspot.results.report import (
    Coverage,
    DeviceCost,
    KernelCost,
    LineCost,
    NodeCost,
    OperatorCost,
    Pass,
    Report,
    Row,
    WallKinds,
    add_totals,
    fold,
    ranked_kernels,
    ranked_lines,
    ranked_nodes,
)
from backspot.trace.events import Ints

__all__ = ["account"]

# Listed among the nodes, though no node.
_RECOMPUTE = "(recompute)"
_REPLAY = "(before a graph's replay)"


def account(
    ownership: Ownership, clock: Clock, *, depth: int | None, warnings: tuple[str, ...]
) -> Report:
    """Turn ownership into the report.

    ``cpu`` is the host's time in an owner's spans less what is nested in others; ``gpu`` the summed
    durations of what they launched; ``wall`` the clock time, dealt out moment by moment: to the
    device work that runs (compute before copies before communication, then what started first);
    where the device idles before work that is already launched, to that work; where nothing is
    queued, to what the host executes; else to the engine.

    Args:
        ownership: a trace with owners.
        clock: its clock.
        depth: fold deeper modules into their ancestors.
        warnings: what a reader must know.
    """
    return _Accountant(ownership, clock).report(depth, warnings)


class _Accountant:
    def __init__(self, ownership: Ownership, clock: Clock) -> None:
        self.o, self.clock = ownership, clock
        spans = ownership.spans
        self.spans, self.work, self.passes = spans, ownership.work, ownership.passes
        self.span_count = len(spans.start)
        self.in_pass = ownership.passes.of_span >= 0
        self.recompute = self.in_pass & ~spans.is_node
        self.node = np.where(self.recompute, len(spans.node_names), spans.node)

    # Costs ---------------------------------------------------------------------------------------

    def _deal(
        self, value: Ints, run: Ints, amount: Ints, kind: Ints, replay: Ints
    ) -> tuple[Piece, Ints, Ints]:
        """Pieces of the clock by owner; and what in each pass was forward's or another's.

        ``replay`` is the span that launches a captured graph, where a device idles before that.
        """
        work, of_span = self.work, np.full(self.span_count, NOTHING)
        # Of each that can hold: spans, work, and in the end nothing.
        span = np.concatenate([np.arange(self.span_count), work.span, [NOTHING]])
        launch = np.concatenate([of_span, work.launch, [NOTHING]])
        started = np.concatenate([of_span, work.run, [NOTHING]]) >= 0
        optimizer = np.concatenate([of_span >= 0, work.optimizer, [False]]).astype(bool)
        is_work = np.arange(len(span)) >= self.span_count
        is_work[NOTHING] = False
        owner = take(self.o.owner, span, Special.ENGINE)
        node, line = take(self.node, span), take(self.o.line, span)
        backward = take(self.in_pass, span, False)
        lost = is_work & (launch < 0)
        owner[lost], node[lost] = Special.NO_LAUNCH, NOTHING
        of_engine = is_work & ~lost & (span < 0) & started
        idle = ~is_work & ~backward  # nothing at all, or a forward on another thread
        owner[idle | of_engine], node[idle | of_engine] = Special.ENGINE, NOTHING
        kept = (backward | lost | of_engine | idle)[value]
        mine, rest = value[kept], value[~kept]
        before = (replay[kept] >= 0) & (span[mine] == replay[kept])
        rest_run, rest_amount = run[~kept], amount[~kept]
        early = (span[rest] >= 0) | (launch[rest] < self.passes.start[rest_run])
        early &= ~optimizer[rest]
        count = len(self.passes.start)
        return (
            Piece(
                run=run[kept],
                owner=owner[mine],
                node=np.where(before, len(self.spans.node_names) + 1, node[mine]),
                line=np.where(before, NOTHING, line[mine]),
                amount=amount[kept],
                kind=kind[kept],
            ),
            summed(rest_run[early], rest_amount[early], count),
            summed(rest_run[~early], rest_amount[~early], count),
        )

    def _wall(self, clock: Timeline, chosen: Ints, device: int) -> tuple[Piece, Ints, Ints]:
        windows = self.o.windows
        cut = first_started(windows.start[chosen], windows.end[chosen], chosen)
        line = clock.cut(cut.edges)
        run, value, amount = pieces(line, cut)
        _, kind, _ = pieces(self.clock.kinds(line, device), cut)
        replays = Timeline(line.edges, self.clock.replays(device).over(line.edges))
        _, replay, _ = pieces(replays, cut)
        return self._deal(value, run, amount, kind, replay)

    def _cpu(self) -> Piece:
        amount = np.zeros(self.span_count, np.int64)
        for indices, nesting in self.spans.nesting.values():
            timeline = nesting.timeline
            if len(timeline.edges):
                length = np.append(np.diff(timeline.edges), 0)
                held = timeline.values >= 0
                np.add.at(amount, indices[timeline.values[held]], length[held])
        mine = np.flatnonzero(self.in_pass)
        return self._of_spans(mine, amount[mine])

    def _gpu(self) -> tuple[Piece, Ints]:
        """Device work by owner; and which work each piece is."""
        work = self.work
        mine = np.flatnonzero(work.run >= 0)
        span = work.span[mine]
        owner, node = take(self.o.owner, span, Special.ENGINE), take(self.node, span)
        lost = work.launch[mine] < 0
        owner[lost] = Special.NO_LAUNCH
        amount = work.end[mine] - work.start[mine]
        piece = Piece(work.run[mine], owner, node, take(self.o.line, span), amount)
        return piece, mine

    def _forward(self, owners: int) -> Ints:
        """Each owner's forward time, by the same rule as wall."""
        devices = [device.timeline for device in self.clock.devices.values()]
        clock = layered(*devices) if devices else self.clock.host
        if not len(clock.edges):
            return np.zeros(owners, np.int64)
        value, amount = clock.values[:-1], np.diff(clock.edges)
        is_work = value >= self.span_count
        span = np.where(is_work, take(self.work.span, value - self.span_count), value)
        windows = self.o.windows
        every = np.arange(len(windows.start))
        in_window = first_started(windows.start, windows.end, every).over(clock.edges[:-1]) >= 0
        forward = (span >= 0) & ~take(self.in_pass, span, True)
        forward &= is_work | ~in_window  # on the clock a pass's host time is the pass's
        return summed(self.o.owner[span[forward]], amount[forward], owners)

    # The report ----------------------------------------------------------------------------------

    def report(self, depth: int | None, warnings: tuple[str, ...]) -> Report:
        o = self.o
        begin, end, waits_for = o.windows.start, o.windows.end, o.windows.device
        count = len(begin)
        parts = [
            self._wall(self.clock.of_passes(device), chosen, device)
            for device, chosen in grouped(waits_for)
        ]
        wall = joined([piece for piece, _, _ in parts])
        forward_tail = sum((tail for _, tail, _ in parts), np.zeros(count, np.int64))
        other = sum((rest for _, _, rest in parts), np.zeros(count, np.int64))
        cpu = self._cpu()
        gpu, launched = self._gpu()
        gpu_of, cpu_of = (summed(piece.run, piece.amount, count) for piece in (gpu, cpu))
        executed = self.passes.of_span[self.spans.is_node & self.in_pass]
        nodes_of = np.bincount(executed, minlength=count)
        passes = tuple(
            Pass(
                start_ns=int(begin[run]),
                duration_ns=int(end[run] - begin[run]),
                wall_ns=int(end[run] - begin[run] - forward_tail[run] - other[run]),
                forward_ns=int(forward_tail[run]),
                other_ns=int(other[run]),
                gpu_ns=int(gpu_of[run]),
                cpu_ns=int(cpu_of[run]),
                nodes=int(nodes_of[run]),
                step=int(o.steps.of_pass[run]),
            )
            for run in range(count)
        )
        pieces = (self._executed(), wall, gpu, cpu)
        nodes = node_costs(pieces, (*self.spans.node_names, _RECOMPUTE, _REPLAY))
        lines = line_costs(pieces, self.spans.node_names, o.lines, exact=o.exact_lines)
        kernels = self._kernels(gpu.owner, launched)
        rows = add_totals(self._rows((wall, gpu, cpu), nodes, kernels, lines))
        if depth is not None:
            rows = fold(rows, depth)
        totals = [int(piece.amount.sum()) for piece in (wall, gpu, cpu)]
        is_module = o.owners.is_module
        owned = [int(piece.amount[is_module[piece.owner]].sum()) for piece in (wall, gpu, cpu)]
        shares = [part / whole if whole else 1.0 for part, whole in zip(owned, totals, strict=True)]
        by_step = summed(o.steps.of_pass, np.array([p.duration_ns for p in passes]), self._steps())
        return Report(
            modules=tuple(sorted(rows, key=lambda r: (-r.wall_ns, -r.gpu_ns, -r.cpu_ns, r.path))),
            operators=self._operators(nodes),
            passes=passes,
            devices=self._devices(wall, gpu, self.work.device[launched]),
            step_unit=o.steps.unit,
            step_ns=tuple(by_step.tolist()),
            wall_ns=totals[0],
            gpu_ns=totals[1],
            cpu_ns=totals[2],
            coverage=Coverage(*shares),
            source=self.spans.source,
            has_gpu=bool(self.clock.devices),
            warnings=warnings,
        )

    def _steps(self) -> int:
        return self.o.steps.count

    def _rows(
        self,
        costs_of: tuple[Piece, Piece, Piece],
        nodes: dict[int, list[NodeCost]],
        kernels: dict[int, list[KernelCost]],
        lines: dict[int, list[LineCost]],
    ) -> list[Row]:
        spans, steps = self.spans, self._steps()
        owners, is_module = len(self.o.owners), self.o.owners.is_module
        wall, _, _ = costs_of
        sums = [summed(piece.owner, piece.amount, owners) for piece in costs_of]
        forward = self._forward(owners)
        recomputed = wall.node == len(spans.node_names)
        recompute = summed(wall.owner[recomputed], wall.amount[recomputed], owners)
        kinds = len(WallKind)
        spent_on = summed(wall.owner * kinds + wall.kind, wall.amount, owners * kinds)
        spent_on = spent_on.reshape(owners, kinds)
        step_of = self.o.steps.of_pass[wall.run]
        by_step = summed(wall.owner * steps + step_of, wall.amount, owners * steps)
        by_step = by_step.reshape(owners, steps)
        called = spans.module[(spans.module >= 0) & ~self.in_pass]
        calls = np.bincount(self.o.owners.of_modules(called), minlength=owners)
        rows = []
        for owner in range(owners):
            module, named = self.o.owners.module(owner), bool(is_module[owner])
            costs = [int(column[owner]) for column in sums]
            if not named and not any(costs) and not nodes[owner]:
                continue
            rows.append(
                Row(
                    path=self.o.owners.path(owner),
                    class_name=module.class_name if module else "",
                    root=module.root if module and named else "",
                    is_module=named,
                    calls=int(calls[owner]),
                    wall_ns=costs[0],
                    gpu_ns=costs[1],
                    cpu_ns=costs[2],
                    forward_ns=int(forward[owner]),
                    recompute_ns=int(recompute[owner]),
                    total_wall_ns=0,
                    total_gpu_ns=0,
                    total_cpu_ns=0,
                    total_forward_ns=0,
                    total_recompute_ns=0,
                    nodes=ranked_nodes(nodes[owner]),
                    kernels=ranked_kernels(kernels[owner]),
                    lines=ranked_lines(lines[owner]),
                    wall_on=WallKinds(*spent_on[owner].tolist()),
                    wall_ns_by_step=tuple(by_step[owner].tolist()),
                )
            )
        return rows

    def _kernels(self, owner: Ints, launched: Ints) -> dict[int, list[KernelCost]]:
        """Each owner's device work by name."""
        work = self.work
        width = len(work.names)
        keys, inverse = numbered(owner * width + work.name[launched])
        spent = summed(inverse, work.end[launched] - work.start[launched], len(keys))
        count = np.bincount(inverse, minlength=len(keys))
        kernels: dict[int, list[KernelCost]] = defaultdict(list)
        for key, times, total in zip(keys.tolist(), count.tolist(), spent.tolist(), strict=True):
            kernels[key // width].append(KernelCost(work.names[key % width], times, total))
        return kernels

    def _executed(self) -> Piece:
        """Each span that ran in a pass, counted as one."""
        mine = np.flatnonzero(self.in_pass)
        return self._of_spans(mine, np.ones_like(mine))

    def _of_spans(self, mine: Ints, amount: Ints) -> Piece:
        run, owner = self.passes.of_span[mine], self.o.owner[mine]
        return Piece(run, owner, self.node[mine], self.o.line[mine], amount)

    def _operators(self, nodes_of: dict[int, list[NodeCost]]) -> tuple[OperatorCost, ...]:
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        payers: dict[str, tuple[int, int, int, int]] = {}
        for owner, nodes in nodes_of.items():
            for node in nodes:
                cost = (node.count, node.wall_ns, node.gpu_ns, node.cpu_ns)
                sums[node.name] = [a + b for a, b in zip(sums[node.name], cost, strict=True)]
                key = (node.wall_ns, node.gpu_ns, node.cpu_ns, owner)
                payers[node.name] = max(payers.get(node.name, key), key)
        paths = {name: self.o.owners.path(payer[3]) for name, payer in payers.items()}
        operators = [
            OperatorCost(name, cost[0], cost[1], cost[2], cost[3], paths[name])
            for name, cost in sums.items()
        ]
        return tuple(sorted(operators, key=lambda o: (-o.wall_ns, -o.gpu_ns, -o.cpu_ns, o.name)))

    def _devices(self, wall: Piece, gpu: Piece, device: Ints) -> tuple[DeviceCost, ...]:
        """Each device's own table: the passes as it alone would have them."""
        every = np.arange(len(self.passes.start))
        costs = []
        for number, clock in self.clock.devices.items():
            mine = device == number
            # Where there is but one, its table is the report's.
            alone = len(self.clock.devices) == 1
            wall = wall if alone else self._wall(clock.timeline, every, number)[0]
            costs.append(
                DeviceCost(
                    device=number,
                    wall_ns=self._by_path(wall.owner, wall.amount),
                    gpu_ns=self._by_path(gpu.owner[mine], gpu.amount[mine]),
                )
            )
        return tuple(costs)

    def _by_path(self, owner: Ints, amount: Ints) -> dict[str, int]:
        sums = summed(owner, amount, len(self.o.owners))
        held = np.flatnonzero(sums)
        ranked = held[np.argsort(-sums[held], kind="stable")]
        return {self.o.owners.path(index): int(sums[index]) for index in ranked.tolist()}
