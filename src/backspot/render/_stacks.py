"""A report as stacks, as the flame formats want it: module names from the root down, then a node.

Every nanosecond of the report stands in one stack, so each form's weights sum to the report's.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from backspot.report import Report, Row
from backspot.words import visible

__all__ = ["Stack", "stacks"]


class Stack(NamedTuple):
    """What one stack of frames costs; nanoseconds."""

    frames: tuple[str, ...]
    wall: int
    gpu: int
    cpu: int


def stacks(report: Report) -> list[Stack]:
    """The report's costs by stack, those of the first rows first; no stack stands there twice.

    A module's frames are the names that its path is made of, below the class of its root. A leaf is
    the autograd node; what a row pays for without a node stands on the row itself. What no module
    owns has a frame of its own name. Characters without a shape are written as escapes.
    """
    classes = {row.path: row.name for row in report.modules if row.is_module}
    sums: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(frames: tuple[str, ...], *costs: int) -> None:
        if any(costs):
            known = sums[tuple(map(visible, frames))]
            known[:] = [a + b for a, b in zip(known, costs, strict=True)]

    for row in report.modules:
        frames = _frames(row, classes)
        rest = [row.wall_ns, row.gpu_ns, row.cpu_ns]
        for node in row.nodes:
            # No more than the row has: a form that someone wrote by hand may not add up.
            costs = list(map(min, (node.wall_ns, node.gpu_ns, node.cpu_ns), rest))
            add((*frames, node.name), *costs)
            rest = [left - cost for left, cost in zip(rest, costs, strict=True)]
        add(frames, *rest)
    return [Stack(frames, *costs) for frames, costs in sums.items()]


def _frames(row: Row, classes: dict[str, str]) -> tuple[str, ...]:
    if not row.is_module:
        return (row.name,)
    if row.root:  # a loss that was instrumented by a name of its own: its path begins with it
        return tuple(row.path.split("."))
    below = row.path.split(".") if row.path else []
    return (classes.get("", "(root)"), *below)
