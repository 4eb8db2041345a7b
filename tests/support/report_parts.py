"""What sample reports are made of: rows, nodes, and a report that fits its rows.

Costs are given over all of the steps, three by default, which are all alike.
"""

from __future__ import annotations

from statistics import median

from backspot.results.report import (
    Coverage,
    DeviceCost,
    Finding,
    KernelCost,
    LineCost,
    NodeCost,
    OperatorCost,
    Pass,
    Phase,
    Report,
    Row,
    WallKinds,
    add_totals,
)


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
) -> Row:
    """A row whose totals are its own costs; ``add_totals`` sets them right."""
    gpu = wall if gpu is None else gpu
    cpu = wall // 10 if cpu is None else cpu
    wall, gpu, cpu, forward, recompute = (
        cost // steps for cost in (wall, gpu, cpu, forward, recompute)
    )
    running = min(wall, gpu)
    return Row(
        path=path,
        class_name=class_name,
        root=root,
        is_module=is_module,
        calls=calls / steps if is_module else 0.0,
        wall_ns=wall,
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
        wall_ns_by_step=(wall,) * steps,
        gpu_ns_by_step=(gpu,) * steps,
        cpu_ns_by_step=(cpu,) * steps,
        forward_ns_by_step=(forward,) * steps,
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
) -> Report:
    """A report of these rows: ranked, with totals, operators, passes and coverage that fit them."""
    rows = sorted(add_totals(rows), key=lambda one: (-one.wall_ns, one.path))
    wall, gpu, cpu = (
        sum(getattr(one, f"{kind}_ns") for one in rows) for kind in ("wall", "gpu", "cpu")
    )

    def owned(kind: str, whole: int) -> float:
        own = sum(getattr(one, f"{kind}_ns") for one in rows if one.is_module)
        return own / whole if whole else 1.0

    operators: dict[str, list[int]] = {}
    payers: dict[str, tuple[int, str]] = {}
    for one in rows:
        for spent in one.nodes:
            sums = operators.setdefault(spent.name, [0, 0, 0, 0])
            for index, value in enumerate((spent.count, spent.wall_ns, spent.gpu_ns, spent.cpu_ns)):
                sums[index] += value
            payers[spent.name] = max(payers.get(spent.name, (-1, "")), (spent.wall_ns, one.path))
    steps = len(step_ns)
    passes = tuple(
        Pass(
            start_ns=step * 50_000_000,
            duration_ns=sum(one.wall_ns_by_step[step] for one in rows),
            wall_ns=sum(one.wall_ns_by_step[step] for one in rows),
            forward_ns=0,
            other_ns=0,
            gpu_ns=gpu,
            cpu_ns=cpu,
            nodes=490,
            step=step,
        )
        for step in range(steps)
    )
    device = DeviceCost(
        0, {one.path: one.wall_ns for one in rows}, {one.path: one.gpu_ns for one in rows}
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
        step_ns=int(median(step_ns)) if step_ns else 0,
        wall_ns=wall,
        gpu_ns=gpu,
        cpu_ns=cpu,
        step_ns_by_step=step_ns,
        wall_ns_by_step=(wall,) * steps,
        gpu_ns_by_step=(gpu,) * steps,
        cpu_ns_by_step=(cpu,) * steps,
        coverage=Coverage(owned("wall", wall), owned("gpu", gpu), owned("cpu", cpu)),
        source=source,
        has_gpu=has_gpu,
        warnings=warnings,
        trace=trace,
        phases=phases,
        findings=findings,
    )
