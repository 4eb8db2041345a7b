"""What sample reports are made of: rows, nodes, phases, and a report that fits its rows.

Costs are given over all of the steps, three by default, which are all alike unless a row has a
``pace``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from backspot.results.costs import (
    Coverage,
    DeviceCost,
    Hiccup,
    KernelCost,
    LineCost,
    NodeCost,
    OperatorCost,
    Pass,
    Phase,
    PhaseName,
    Row,
    WallKinds,
)
from backspot.results.findings import Finding
from backspot.results.grouping import add_totals
from backspot.results.report import Report

_KINDS = ("wall", "gpu", "cpu")


def typical(by_step: Sequence[int], held_up: Collection[int] = ()) -> int:
    """The mean over the steps that nothing held up, rounded down; 0 of no steps."""
    count = [time for step, time in enumerate(by_step) if step not in held_up]
    return sum(count) // len(count) if count else 0


def row(
    path: str,
    class_name: str = "Linear",
    *,
    wall: int = 0,
    gpu: int | None = None,
    cpu: int | None = None,
    forward: int = 0,
    recompute: int = 0,
    calls: int = 3,
    root: str = "",
    is_module: bool = True,
    nodes: tuple[NodeCost, ...] = (),
    lines: tuple[LineCost, ...] = (),
    kernels: tuple[KernelCost, ...] = (),
    steps: int = 3,
    pace: Sequence[float] = (),
    held_up: Collection[int] = (),
) -> Row:
    """A row whose totals are its own costs; ``add_totals`` sets them right.

    Args:
        pace: for each recorded step, how many times as long as the mean of ``steps`` steps it is.
        held_up: the steps that do not count.
    """
    gpu = wall if gpu is None else gpu
    cpu = wall // 10 if cpu is None else cpu
    by_step = [
        tuple(int(cost // steps * times) for times in pace or (1,) * steps)
        for cost in (wall, gpu, cpu, forward)
    ]
    wall, gpu, cpu, forward = (typical(times, held_up) for times in by_step)
    recompute //= steps
    running = min(wall, gpu)
    return Row(
        path=path,
        class_name=class_name,
        root=root,
        is_module=is_module,
        calls=calls / steps if is_module else 0.0,
        wall_ns=wall,
        recorded_wall_ns=wall,
        gpu_ns=gpu,
        cpu_ns=cpu,
        forward_ns=forward,
        recompute_ns=recompute,
        total_wall_ns=wall,
        total_gpu_ns=gpu,
        total_cpu_ns=cpu,
        total_forward_ns=forward,
        total_recompute_ns=recompute,
        nodes=nodes,
        lines=lines,
        wall_ns_by_step=by_step[0],
        gpu_ns_by_step=by_step[1],
        cpu_ns_by_step=by_step[2],
        forward_ns_by_step=by_step[3],
        kernels=kernels,
        wall_on=WallKinds(gpu_ns=running, host_ns=wall - running),
    )


def node(
    name: str, wall: int, *, gpu: int | None = None, count: int = 3, steps: int = 3
) -> NodeCost:
    wall = wall // steps
    return NodeCost(name, count // steps, wall, wall if gpu is None else gpu // steps, wall // 10)


def line(
    made: NodeCost,
    file: str,
    number: int,
    text: str = "",
    *,
    function: str = "forward",
    exact: bool = True,
) -> LineCost:
    """The line that made all nodes of a kind."""
    cost = (made.count, made.wall_ns, made.gpu_ns, made.cpu_ns)
    return LineCost(file, number, function, text, made.name, exact, *cost)


def phases(
    by_step: Mapping[PhaseName, Sequence[int]],
    *,
    busy: float = 0.9,
    idle: PhaseName = "idle",
    held_up: Collection[int] = (),
) -> tuple[Phase, ...]:
    """Phases that take these times in each step."""
    means = {name: typical(times, held_up) for name, times in by_step.items()}
    return tuple(
        Phase(
            name,
            means[name],
            int(means[name] * (name != idle) * busy),
            tuple(times),
            recorded_wall_ns=means[name],
        )
        for name, times in by_step.items()
    )


def report(
    rows: list[Row],
    *,
    step_ns: tuple[int, ...] = (45_700_000, 45_900_000, 45_500_000),
    source: str = "backspot",
    has_gpu: bool = True,
    warnings: tuple[str, ...] = (),
    trace: str = "trace.json.gz",
    phases: tuple[Phase, ...] = (),
    findings: tuple[Finding, ...] = (),
    rules: dict[str, str] | None = None,
    hiccups: tuple[Hiccup, ...] = (),
) -> Report:
    """A report of these rows: ranked, with totals, operators, passes and coverage that fit them."""
    if phases:
        step_ns = tuple(map(sum, zip(*(phase.wall_ns_by_step for phase in phases), strict=True)))
    steps = len(step_ns)
    whole = [
        tuple(
            sum(getattr(one, f"{kind}_ns_by_step")[step] for one in rows) for step in range(steps)
        )
        for kind in _KINDS
    ]
    wall, gpu, cpu = (sum(getattr(one, f"{kind}_ns") for one in rows) for kind in _KINDS)
    rows = sorted(add_totals(rows), key=lambda one: (-one.wall_ns, one.path))

    def owned(kind: str, by_step: tuple[int, ...]) -> float:
        own = sum(sum(getattr(one, f"{kind}_ns_by_step")) for one in rows if one.is_module)
        return own / sum(by_step) if sum(by_step) else 1.0

    operators: dict[str, list[int]] = {}
    payers: dict[str, tuple[int, str]] = {}
    for one in rows:
        for spent in one.nodes:
            sums = operators.setdefault(spent.name, [0, 0, 0, 0])
            for index, value in enumerate((spent.count, spent.wall_ns, spent.gpu_ns, spent.cpu_ns)):
                sums[index] += value
            payers[spent.name] = max(payers.get(spent.name, (-1, "")), (spent.wall_ns, one.path))
    passes = tuple(
        Pass(
            start_ns=step * 50_000_000,
            duration_ns=whole[0][step],
            wall_ns=whole[0][step],
            forward_ns=0,
            other_ns=0,
            gpu_ns=whole[1][step],
            cpu_ns=whole[2][step],
            nodes=490,
            step=step,
        )
        for step in range(steps)
    )
    device = DeviceCost(
        0,
        {one.path: one.wall_ns for one in rows},
        {one.path: one.gpu_ns for one in rows},
    )
    whole_step = (
        sum(phase.wall_ns for phase in phases)
        if phases
        else typical(step_ns, [hiccup.step for hiccup in hiccups])
    )
    return Report(
        modules=tuple(rows),
        operators=tuple(
            sorted(
                (OperatorCost(name, *sums, payers[name][1]) for name, sums in operators.items()),
                key=lambda operator: (-operator.wall_ns, operator.name),
            )
        ),
        passes=passes,
        devices=(device,) if has_gpu else (),
        step_unit="profiler step",
        clock="recorded",
        step_ns=whole_step,
        recorded_step_ns=whole_step,
        wall_ns=wall,
        recorded_wall_ns=wall,
        gpu_ns=gpu,
        cpu_ns=cpu,
        step_ns_by_step=step_ns,
        wall_ns_by_step=whole[0],
        gpu_ns_by_step=whole[1],
        cpu_ns_by_step=whole[2],
        coverage=Coverage(*map(owned, _KINDS, whole)),
        source=source,
        has_gpu=has_gpu,
        warnings=warnings,
        trace=trace,
        phases=phases,
        findings=findings,
        rules=rules or {},
        hiccups=hiccups,
    )
