"""What each owner costs: from the clock to nanoseconds, none lost and none counted twice.

In each step, the rows sum to the backward to the nanosecond. The amounts of a typical step are
those of the steps that count, each with its part of the mean. So they sum to its backward, too: by
row, by node, by line and by device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from backspot.analysis.accounting.amounts import (
    Amounts,
    costs_by,
    joined,
    operators_inside,
    summed,
    summed_by_step,
)
from backspot.analysis.accounting.clock import WallKind
from backspot.analysis.accounting.ledger import Ledger, Spent
from backspot.analysis.accounting.phases import PhaseTimes, choose_steps
from backspot.analysis.accounting.steps import StepWindows
from backspot.analysis.accounting.unrecorded import Recorded
from backspot.analysis.timeline import NOTHING, take
from backspot.analysis.typical import RareSteps, TypicalStep
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
from backspot.trace.events import Ints

_BACKWARD, _FORWARD_TAIL, _OTHER = range(3)
"""What the clock time of a pass can belong to."""
_PARTS = 3


class RecordedCosts(msgspec.Struct, frozen=True):
    """The clock time of the backward as it was recorded, and the steps that count.

    Attributes:
        typical: the steps that count.
        noise: as in ``Report``.
        wall: the clock time.
        of_owners: that of a typical step, by owner.
    """

    typical: TypicalStep
    noise: float
    wall: Amounts
    of_owners: Recorded


class BackwardCosts(msgspec.Struct, frozen=True):
    """What the backward of a trace costs; each field as in ``Report``."""

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


def recorded_costs(
    events: Events,
    ledger: Ledger,
    phases: PhaseTimes | None = None,
    rare: Sequence[RareSteps] = (),
) -> RecordedCosts:
    """Return the backward as it was recorded, from which it follows which steps count.

    Args:
        ledger: the clock time of the trace.
        phases: that of the phases, if the steps have any.
        rare: the steps of which it is known how often the training has such steps.
    """
    wall = _wall_of(ledger)
    by_step = _by_owner(ledger, wall)
    typical = choose_steps(events, ledger, by_step, phases, rare)
    usual, count = wall.in_typical_step(typical), len(ledger.ownership.owners)
    of_host = usual.where((usual.kind == WallKind.SYNC) | (usual.kind == WallKind.HOST))
    sums = Recorded(*(summed(amounts.owner, amounts.amount, count) for amounts in (usual, of_host)))
    return RecordedCosts(typical, typical.noise(by_step), wall, sums)


def account(events: Events, ledger: Ledger, recorded: RecordedCosts) -> BackwardCosts:
    """Turn clock time, device work and the host's time into costs of owners.

    ``cpu`` is the host's time in an owner's spans, without other spans nested in these. ``gpu`` is
    the sum of the durations of the owner's device work. ``wall`` is clock time. Each moment
    goes to the device work that runs then: compute before copies before communication, then what
    started first. While the device idles before work that is already launched, the moment goes to
    that work. While nothing is queued, it goes to what the host executes, or to the engine.

    Args:
        ledger: the clock time of the trace.
        recorded: the backward as it was recorded.
    """
    ownership, typical = ledger.ownership, recorded.typical
    wall = recorded.wall if ledger.pace is None else _wall_of(ledger)
    executed, spent = _executed(ledger), (wall, _gpu(ledger), _cpu(ledger))
    by_step = [_by_owner(ledger, amounts) for amounts in spent]
    usual = [amounts.in_typical_step(typical) for amounts in spent]
    nodes = _nodes(ledger, executed, usual, typical)
    lines = _lines(ledger, executed, usual, typical)
    if ledger.clock.devices:
        kernels = _by_name(usual[1], events.names, typical)
    else:
        kernels = _operators_inside(events, ledger, typical)
    by_step.append(_forward(ledger))
    rows = _rows(ledger, recorded, usual, by_step, nodes, kernels, lines)
    totals = [int(amounts.amount.sum()) for amounts in usual]
    is_module = ownership.owners.is_module
    module_totals = [int(amounts.amount[is_module[amounts.owner]].sum()) for amounts in usual]
    shares = [
        module_total / total if total else 1.0
        for module_total, total in zip(module_totals, totals, strict=True)
    ]
    totals_by_step = [tuple(table.sum(axis=0).tolist()) for table in by_step]
    return BackwardCosts(
        modules=ranked_rows(add_totals(rows)),
        operators=_operators(ledger, executed, usual, nodes, typical),
        passes=_passes(ledger, *spent[1:]),
        devices=_devices(ledger, usual[0], usual[1], typical),
        wall_ns=totals[0],
        gpu_ns=totals[1],
        cpu_ns=totals[2],
        wall_ns_by_step=totals_by_step[0],
        gpu_ns_by_step=totals_by_step[1],
        cpu_ns_by_step=totals_by_step[2],
        coverage=Coverage(*shares),
    )


# Time ----------------------------------------------------------------------------------------


def _belongs(ledger: Ledger, spent: Spent) -> Ints:
    """Return what each interval belongs to; ``NOTHING`` outside of passes.

    Work that a pass launched is its own, and so is work of which nothing says who launched it.
    """
    holders, work, passes = ledger.holders, ledger.ownership.work, ledger.ownership.passes
    span, launch = holders.span, take(work.launch, holders.work)
    of_engine = (take(work.run, holders.work) >= 0) & (span < 0)
    unlaunched = launch < 0  # the host's own work, and work whose launch is not recorded
    backward = (holders.in_pass | of_engine | unlaunched)[spent.holder]
    before = (span >= 0)[spent.holder] | (launch[spent.holder] < take(passes.start, spent.run))
    forward = before & ~take(work.optimizer, holders.work, False)[spent.holder]
    kinds = np.where(backward, _BACKWARD, np.where(forward, _FORWARD_TAIL, _OTHER))
    return np.where(spent.run >= 0, kinds, NOTHING)


def _wall_of(ledger: Ledger) -> Amounts:
    """Return the clock time of the backward."""
    return joined([_wall(ledger, *of_device) for of_device in ledger.by_device.items()])


def _wall(ledger: Ledger, device: int, spent: Spent) -> Amounts:
    """Return the clock time of the backward in the passes that wait for a device."""
    spent = spent.where(_belongs(ledger, spent) == _BACKWARD)
    holders, span = ledger.holders, ledger.holders.span[spent.holder]
    # Where the device idles before a captured graph: the span that launches the replay.
    replay = ledger.clock.replays(device).over(spent.start)
    node = np.where((span >= 0) & (span == replay), holders.replay, holders.node[spent.holder])
    holder = holders.of_rows(spent.holder)
    return holders.deal(holder, spent.length, run=spent.run, node=node, kind=spent.kind)


def _gpu(ledger: Ledger) -> Amounts:
    """Return how long the passes' work on devices runs."""
    holders, work = ledger.holders, ledger.ownership.work
    on_device = take(work.device, holders.work) >= 0
    on_devices = np.flatnonzero(on_device & (holders.run >= 0))
    piece = holders.work[on_devices]
    return holders.deal(
        on_devices, (work.end - work.start)[piece], kind=work.name[piece].astype(np.int64)
    )


def _cpu(ledger: Ledger) -> Amounts:
    """Return the host's time in the spans of passes, without other spans nested in these.

    It passes as the clock does.
    """
    holders = ledger.holders
    spent = np.zeros(len(holders.span), np.int64)
    for indices, nesting in ledger.ownership.spans.nesting.values():
        line = nesting.timeline.cut(holders.edges)
        holder = holders.at(take(indices, line.values[:-1]), line.edges[:-1])
        np.add.at(spent, holder, ledger.elapsed(line.edges[:-1], line.edges[1:]))
    host_spans = np.flatnonzero((holders.work < 0) & (holders.run >= 0))
    return holders.deal(host_spans, spent[host_spans])


def _forward(ledger: Ledger) -> Ints:
    """Return each owner's forward time in each step, by the same rule as wall."""
    holders, spent, steps = ledger.holders, ledger.whole, ledger.ownership.steps.count
    forward = (holders.span >= 0) & ~holders.in_pass
    # In a pass's window, the host's time is the pass's.
    host = ledger.passes.over(spent.start) < 0
    spent = spent.where(forward[spent.holder] & ((holders.work >= 0)[spent.holder] | host))
    if isinstance(ledger.windows, StepWindows):
        spent = spent.where(spent.step >= 0)
        step = spent.step
    else:  # a forward belongs to the pass that ends next
        spent = spent.where(spent.start < ledger.windows.end[-1])
        step = np.searchsorted(ledger.windows.end, spent.start, side="right")
    place, share, divided = holders.shares.split(spent.holder, spent.length)
    owner = holders.shares.owner[share]
    return summed_by_step(owner, step[place], divided, len(ledger.ownership.owners), steps)


# Counts --------------------------------------------------------------------------------------


def _executed(ledger: Ledger) -> Amounts:
    """Return the nodes, the recomputations and the collectives of passes, each counted as one."""
    holders, communication = ledger.holders, ledger.ownership.communication
    counts = take(communication.collective, holders.work) >= 0
    counts[: len(ledger.ownership.owner)] = True
    executed = np.flatnonzero(counts & (holders.run >= 0))
    return holders.deal(executed, np.ones_like(executed))


def _serving(ledger: Ledger, *, by_line: bool) -> Amounts:
    """Return the nodes of compiled regions, once for each other owner, and line, that they serve.

    Args:
        by_line: count a node once for each line of an owner.
    """
    ownership, holders = ledger.ownership, ledger.holders
    compiled = ownership.compiled
    works = holders.of_work(np.flatnonzero(compiled.of_work >= 0))
    holder = np.append(works, holders.of_launches(np.arange(len(compiled.event))))
    holder = holder[holders.in_pass[holder]]
    served = holders.deal(holder, np.ones_like(holder))
    if not by_line:
        served = served._replace(line=np.full_like(served.line, NOTHING))
    span = holders.span[served.holder]
    own = [span, ownership.owner[span], holders.node[span]]
    own.append(ownership.line[span] if by_line else served.line)
    columns = np.stack([span, served.owner, served.node, served.line])
    columns = columns[:, (columns != own).any(axis=0)]
    # With an index, NumPy sorts. Without one it hashes, and imports numpy.ma.
    (span, owner, node, line), _ = np.unique(columns, axis=1, return_index=True)
    step = ownership.steps.of_pass[holders.run[span]]
    return Amounts(step, owner, node, line, np.zeros_like(span), span, np.ones_like(span))


# Sums ----------------------------------------------------------------------------------------


def _by_owner(ledger: Ledger, amounts: Amounts) -> Ints:
    """Sum amounts, with one row an owner and one column a step."""
    owners, steps = len(ledger.ownership.owners), ledger.ownership.steps.count
    return summed_by_step(amounts.owner, amounts.step, amounts.amount, owners, steps)


def _passes(ledger: Ledger, gpu: Amounts, cpu: Amounts) -> tuple[Pass, ...]:
    ownership, run_of = ledger.ownership, ledger.holders.run
    windows, passes, spans = ownership.windows, ownership.passes, ownership.spans
    count = len(passes.start)
    left = np.zeros((_PARTS, count), np.int64)
    for spent in ledger.by_device.values():
        in_passes = spent.where(spent.run >= 0)
        left += summed_by_step(
            _belongs(ledger, in_passes), in_passes.run, in_passes.length, _PARTS, count
        )
    nodes = passes.of_span[spans.is_node & (passes.of_span >= 0)]
    columns = (
        windows.start,
        left.sum(axis=0),
        left[_BACKWARD],
        left[_FORWARD_TAIL],
        left[_OTHER],
        *(summed(run_of[amounts.holder], amounts.amount, count) for amounts in (gpu, cpu)),
        np.bincount(nodes, minlength=count),
        ownership.steps.of_pass,
    )
    return tuple(map(Pass, *(column.tolist() for column in columns)))


def _rows(
    ledger: Ledger,
    recorded: RecordedCosts,
    usual: Sequence[Amounts],
    by_step: Sequence[Ints],
    nodes: dict[int, list[NodeCost]],
    kernels: dict[int, list[KernelCost]],
    lines: dict[int, list[LineCost]],
) -> list[Row]:
    """Return the rows of all owners that have a cost, and of all modules."""
    owners, wall = ledger.ownership.owners, usual[0]
    count, kinds = len(owners), len(WallKind)
    own = [summed(amounts.owner, amounts.amount, count).tolist() for amounts in usual]
    again = wall.where(wall.node == ledger.holders.recompute)
    split = wall.where(ledger.holders.is_split[wall.holder])
    recomputes, splits = (
        summed(amounts.owner, amounts.amount, count).tolist() for amounts in (again, split)
    )
    spent_on = summed_by_step(wall.owner, wall.kind, wall.amount, count, kinds).tolist()
    forward = recorded.typical.mean(by_step[3]).tolist()
    recorded_wall = recorded.of_owners.wall.tolist()
    calls, is_module = _calls(ledger).tolist(), owners.is_module.tolist()
    each_step = [[tuple(steps) for steps in table.tolist()] for table in by_step]
    runs = np.any([table.any(axis=1) for table in by_step[:3]], axis=0)
    runs |= recorded.of_owners.wall > 0
    rows = []
    for owner in range(count):
        if not is_module[owner] and not runs[owner] and not nodes[owner]:
            continue
        module, (path, class_name) = owners.module(owner), owners.named(owner)
        rows.append(
            Row(
                path=path,
                class_name=class_name,
                root=module.root if module and is_module[owner] else "",
                is_module=is_module[owner],
                calls=calls[owner],
                wall_ns=own[0][owner],
                recorded_wall_ns=recorded_wall[owner],
                gpu_ns=own[1][owner],
                cpu_ns=own[2][owner],
                forward_ns=forward[owner],
                recompute_ns=recomputes[owner],
                split_ns=splits[owner],
                total_wall_ns=0,
                total_gpu_ns=0,
                total_cpu_ns=0,
                total_forward_ns=0,
                total_recompute_ns=0,
                nodes=ranked_nodes(nodes[owner]),
                kernels=ranked_kernels(kernels[owner]),
                lines=ranked_lines(lines[owner]),
                wall_on=WallKinds(*spent_on[owner]),
                wall_ns_by_step=each_step[0][owner],
                gpu_ns_by_step=each_step[1][owner],
                cpu_ns_by_step=each_step[2][owner],
                forward_ns_by_step=each_step[3][owner],
            )
        )
    return rows


def _calls(ledger: Ledger) -> np.ndarray:
    """Return how often the forward of a step calls each owner."""
    ownership, in_pass = ledger.ownership, ledger.ownership.passes.of_span >= 0
    module, compiled = ownership.spans.module, ownership.compiled
    inside = compiled.called[~take(in_pass, compiled.caller, False)]
    called = np.concatenate([module[(module >= 0) & ~in_pass], inside])
    owner = ownership.owners.of_modules(called)
    return np.bincount(owner, minlength=len(ownership.owners)) / ownership.steps.count


def _operators_inside(
    events: Events, ledger: Ledger, typical: TypicalStep
) -> dict[int, list[KernelCost]]:
    """Return each owner's outermost operators in nodes by name."""
    ownership, holders = ledger.ownership, ledger.holders
    index, span = operators_inside(events, ownership)
    launch = np.full(len(events.start), NOTHING)
    launch[ownership.compiled.event] = np.arange(len(ownership.compiled.event))
    holder = np.where(launch[index] >= 0, holders.of_launches(launch[index]), span)
    name = events.name[index].astype(np.int64)
    ns = ledger.elapsed(events.start[index], events.end[index])
    amounts = holders.deal(holder, ns, kind=name)
    amount = typical.apportioned(amounts.amount, amounts.step, amounts.owner, amounts.kind)
    return _by_name(amounts._replace(amount=amount), events.names, typical)


def _by_name(
    amounts: Amounts, names: Sequence[str], typical: TypicalStep
) -> dict[int, list[KernelCost]]:
    """Return how often, and how long, each owner runs what has a name, in a typical step."""
    executed = amounts._replace(amount=np.ones_like(amounts.amount))
    kernels: dict[int, list[KernelCost]] = defaultdict(list)
    for owner, name, count, ns in costs_by(("owner", "kind"), executed, [amounts], typical):
        if count:
            kernels[owner].append(KernelCost(names[name], count, ns))
    return kernels


def _nodes(
    ledger: Ledger, executed: Amounts, usual: Sequence[Amounts], typical: TypicalStep
) -> dict[int, list[NodeCost]]:
    """Return what each owner's nodes cost, by name."""
    executed = joined([executed, _serving(ledger, by_line=False)])
    nodes: dict[int, list[NodeCost]] = defaultdict(list)
    for owner, node, *cost in costs_by(("owner", "node"), executed, usual, typical):
        nodes[owner].append(NodeCost(ledger.holders.names[node], *cost))
    return nodes


def _lines(
    ledger: Ledger, executed: Amounts, usual: Sequence[Amounts], typical: TypicalStep
) -> dict[int, list[LineCost]]:
    """Return what each owner's source lines cost, by the nodes that they made."""
    ownership, names = ledger.ownership, ledger.holders.names
    lines: dict[int, list[LineCost]] = defaultdict(list)
    if not ownership.lines:
        return lines
    executed = joined([executed, _serving(ledger, by_line=True)])
    for owner, node, line, *cost in costs_by(("owner", "node", "line"), executed, usual, typical):
        source_line = ownership.lines[line]
        location = (source_line.file, source_line.line, source_line.function, source_line.text)
        lines[owner].append(LineCost(*location, names[node], ownership.exact_lines, *cost))
    return lines


def _operators(
    ledger: Ledger,
    executed: Amounts,
    usual: Sequence[Amounts],
    nodes_of: dict[int, list[NodeCost]],
    typical: TypicalStep,
) -> tuple[OperatorCost, ...]:
    """Return what the nodes of each name cost, and the owner that pays most for them."""
    most: dict[str, tuple[int, int, int, int]] = {}
    for owner, nodes in nodes_of.items():
        for node in nodes:
            key = (node.wall_ns, node.gpu_ns, node.cpu_ns, owner)
            most[node.name] = max(most.get(node.name, key), key)
    operators = []
    for one, count, wall, gpu, cpu in costs_by(("node",), executed, usual, typical):
        name = ledger.holders.names[one]
        path = ledger.ownership.owners.path(most[name][3]) if name in most else ""
        operators.append(OperatorCost(name, count, wall, gpu, cpu, path))
    return tuple(sorted(operators, key=lambda o: (-o.wall_ns, -o.gpu_ns, -o.cpu_ns, o.name)))


def _devices(
    ledger: Ledger, wall: Amounts, gpu: Amounts, typical: TypicalStep
) -> tuple[DeviceCost, ...]:
    """Return each device's own table: the passes as if they waited for this device alone."""
    clocks = ledger.clock.devices
    device = take(ledger.ownership.work.device, ledger.holders.work[gpu.holder])
    all_passes = np.arange(len(ledger.ownership.passes.start))
    costs = []
    for number, clock in clocks.items():
        if len(clocks) > 1:
            spent = ledger.spent(clock.timeline, number, all_passes)
            wall = _wall(ledger, number, spent).in_typical_step(typical)
        own = (_by_path(ledger, amounts) for amounts in (wall, gpu.where(device == number)))
        costs.append(DeviceCost(number, *own))
    return tuple(costs)


def _by_path(ledger: Ledger, amounts: Amounts) -> dict[str, int]:
    owners = ledger.ownership.owners
    costs = summed(amounts.owner, amounts.amount, len(owners))
    paying = np.flatnonzero(costs)
    ranked = paying[np.argsort(-costs[paying], kind="stable")]
    return {owners.path(index): int(costs[index]) for index in ranked.tolist()}
