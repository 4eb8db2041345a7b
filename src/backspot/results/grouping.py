"""Rows added up: into their ancestors, into groups of a kind, and into totals."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from backspot.results.costs import KernelCost, LineCost, NodeCost, Row, WallKinds, parts

__all__ = [
    "add_totals",
    "fold",
    "group",
    "names_in_order",
    "parents_of",
    "pattern_of",
    "ranked_kernels",
    "ranked_lines",
    "ranked_nodes",
]

_COSTS = ("wall_ns", "gpu_ns", "cpu_ns", "forward_ns", "recompute_ns")


def fold(rows: Sequence[Row], depth: int) -> tuple[Row, ...]:
    """Fold every row deeper than ``depth`` into its ancestor at that depth."""
    known = {row.path: row for row in rows if row.is_module}
    groups: dict[str, list[Row]] = defaultdict(list)
    others: list[Row] = []
    for row in rows:
        if not row.is_module:
            others.append(row)
        elif row.depth <= depth:
            groups[row.path].append(row)
        else:
            groups[".".join(row.path.split(".")[: parts(row.root) + depth])].append(row)
    folded = [
        _merge(
            members,
            path=path,
            class_name=known[path].class_name if path in known else "",
            calls=known[path].calls if path in known else max(row.calls for row in members),
            members=1,
        )
        for path, members in groups.items()
    ]
    return (*folded, *others)


def group(rows: Sequence[Row], name_of: Callable[[Row], str]) -> tuple[Row, ...]:
    """Add up modules of one class that ``name_of`` calls the same; no other row changes."""
    groups: dict[tuple[bool, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        name = name_of(row) if row.is_module else row.path
        groups[row.is_module, row.class_name, name].append(row)
    return tuple(
        members[0]
        if len(members) == 1 and members[0].path == name
        else _merge(
            members,
            path=name,
            class_name=class_name,
            calls=sum(row.calls for row in members),
            members=len(members),
        )
        for (_, class_name, name), members in groups.items()
    )


def pattern_of(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Names paths by their pattern, but leaves alone what has no like among the rows.

    What a ``Sequential`` holds bears numbers too: layers repeat only where their class does.
    """
    count = Counter((_pattern(row.path), row.class_name) for row in rows if row.is_module)

    def name(row: Row) -> str:
        pattern = _pattern(row.path)
        return pattern if count[pattern, row.class_name] > 1 else row.path

    return name


@lru_cache(maxsize=1 << 16)
def _pattern(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def _merge(rows: Sequence[Row], *, path: str, class_name: str, calls: int, members: int) -> Row:
    # A total holds what is inside already: only the outermost of the group count.
    parents = parents_of(rows)
    outer = [row for row in rows if parents[row.path] is None]
    nodes: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows:
        for node in row.nodes:
            sums = nodes[node.name]
            sums[0] += node.count
            sums[1] += node.wall_ns
            sums[2] += node.gpu_ns
            sums[3] += node.cpu_ns
    first = rows[0]
    return replace(
        first,
        path=path,
        class_name=class_name,
        calls=calls,
        members=members,
        wall_ns=sum(row.wall_ns for row in rows),
        gpu_ns=sum(row.gpu_ns for row in rows),
        cpu_ns=sum(row.cpu_ns for row in rows),
        forward_ns=sum(row.forward_ns for row in rows),
        recompute_ns=sum(row.recompute_ns for row in rows),
        total_wall_ns=sum(row.total_wall_ns for row in outer),
        total_gpu_ns=sum(row.total_gpu_ns for row in outer),
        total_cpu_ns=sum(row.total_cpu_ns for row in outer),
        total_forward_ns=sum(row.total_forward_ns for row in outer),
        total_recompute_ns=sum(row.total_recompute_ns for row in outer),
        nodes=ranked_nodes(NodeCost(name, *sums) for name, sums in nodes.items()),
        lines=ranked_lines(line for row in rows for line in row.lines),
        kernels=ranked_kernels(kernel for row in rows for kernel in row.kernels),
        wall_on=sum((row.wall_on for row in rows), WallKinds()),
        wall_ns_by_step=tuple(
            sum(column) for column in zip(*(row.wall_ns_by_step for row in rows), strict=True)
        ),
    )


def ranked_nodes(nodes: Iterable[NodeCost]) -> tuple[NodeCost, ...]:
    """The heaviest first; by wall time, then by device and host time."""
    return tuple(
        sorted(nodes, key=lambda node: (-node.wall_ns, -node.gpu_ns, -node.cpu_ns, node.name))
    )


def ranked_lines(lines: Iterable[LineCost]) -> tuple[LineCost, ...]:
    """What one line made of one kind of node added up, the heaviest first."""
    sums: dict[tuple[str, int, str, str, str, bool], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for line in lines:
        key = (line.file, line.line, line.function, line.text, line.node, line.exact)
        cost = (line.count, line.wall_ns, line.gpu_ns, line.cpu_ns)
        sums[key] = [a + b for a, b in zip(sums[key], cost, strict=True)]
    added = (LineCost(*key, *cost) for key, cost in sums.items())
    return tuple(
        sorted(
            added,
            key=lambda it: (-it.wall_ns, -it.gpu_ns, -it.cpu_ns, it.file, it.line, it.node),
        )
    )


def ranked_kernels(kernels: Iterable[KernelCost]) -> tuple[KernelCost, ...]:
    """Kernels of one name added up, the most device time first."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for kernel in kernels:
        sums[kernel.name][0] += kernel.count
        sums[kernel.name][1] += kernel.gpu_ns
    added = (KernelCost(name, count, spent) for name, (count, spent) in sums.items())
    return tuple(sorted(added, key=lambda kernel: (-kernel.gpu_ns, kernel.name)))


class _Placed(Protocol):
    """A row of a report, or a module of a trace."""

    @property
    def path(self) -> str: ...
    @property
    def root(self) -> str: ...


def parents_of(modules: Iterable[_Placed]) -> dict[str, str | None]:
    """For each module's path the nearest of the others' that contains it; ``""`` contains all.

    Only modules of one root contain each other: "loss" of an instrumented loss does not lie in the
    model, whose path is "". The paths come with those around before those inside.
    """
    by_root: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        by_root[module.root].append(module.path)
    parents: dict[str, str | None] = {}
    for paths in by_root.values():
        around: list[str] = []
        # Sorted this way, what a path contains follows it at once: no path is taken apart.
        for path in sorted(paths, key=names_in_order):
            while around and not _contains(around[-1], path):
                around.pop()
            parents[path] = around[-1] if around else None
            around.append(path)
    return parents


def names_in_order(path: str) -> str:
    """The path as a key by which it sorts name by name: the dot comes before all characters."""
    return path.translate(_DOT_FIRST) if "\0" in path or "\1" in path else path.replace(".", "\0")


_DOT_FIRST = str.maketrans({".": "\0", "\0": "\1\1", "\1": "\1\2"})


def _contains(outer: str, path: str) -> bool:
    if not outer:
        return bool(path)
    return path.startswith(outer) and path[len(outer) : len(outer) + 1] == "."


def add_totals(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Set each row's ``total_*`` from its own costs and those of the modules inside it."""
    own = {row.path: row for row in rows if row.is_module}
    totals = {path: [getattr(row, field) for field in _COSTS] for path, row in own.items()}
    for path, parent in reversed(parents_of(own.values()).items()):
        if parent is not None:
            totals[parent] = [a + b for a, b in zip(totals[parent], totals[path], strict=True)]
    result = []
    for row in rows:
        own_costs = [getattr(row, field) for field in _COSTS]
        wall, gpu, cpu, forward, recompute = totals[row.path] if row.is_module else own_costs
        result.append(
            replace(
                row,
                total_wall_ns=wall,
                total_gpu_ns=gpu,
                total_cpu_ns=cpu,
                total_forward_ns=forward,
                total_recompute_ns=recompute,
            )
        )
    return tuple(result)
