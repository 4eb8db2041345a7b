"""Reports as flame graphs of wall, GPU and CPU time, for https://www.speedscope.app.

A report has no order in time. So a profile has its stacks in the order of a left-heavy graph: the
frames of one caller side by side, the most expensive first. Then every view of a viewer is true.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from backspot._version import __version__
from backspot.formatting import visible
from backspot.render._words import WITHOUT_PROFILER
from backspot.render.formats import Format
from backspot.render.view import heaviest_line
from backspot.results.costs import LineCost, NodeCost, Row
from backspot.results.grouping import parents_of
from backspot.results.report import Report


class Frame(NamedTuple):
    """A module or an autograd node, and the source line of the forward that made it, if known."""

    name: str
    file: str = ""
    line: int = 0


class Stack(NamedTuple):
    """The cost of one stack of frames, in nanoseconds."""

    frames: tuple[Frame, ...]
    wall: int
    gpu: int
    cpu: int


def stacks(report: Report) -> list[Stack]:
    """The report's costs by stack, in the order of its rows; each stack occurs once.

    The frames of a module are the modules around it and itself, each with its whole path. A leaf is
    an autograd node; time without a node belongs to the row itself. A row without a module is one
    frame. Invisible characters are written as escapes.
    """
    of_modules = _frames_by_path([row for row in report.modules if row.is_module])
    sums: dict[tuple[Frame, ...], list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(frames: tuple[Frame, ...], *costs: int) -> None:
        if any(costs):
            totals = sums[frames]
            totals[:] = [a + b for a, b in zip(totals, costs, strict=True)]

    for row in report.modules:
        frames = of_modules[row.path] if row.is_module else (_frame(row.name),)
        # Typical times can leave over less than nothing.
        rest = [max(0, cost) for cost in (row.wall_ns, row.gpu_ns, row.cpu_ns)]
        for node in row.nodes:
            # No more than the row has: a report written by hand may not add up.
            costs = list(map(min, (node.wall_ns, node.gpu_ns, node.cpu_ns), rest))
            add((*frames, _frame(node.name, _line_of(row, node))), *costs)
            rest = [left - cost for left, cost in zip(rest, costs, strict=True)]
        add(frames, *rest)
    return [Stack(frames, *costs) for frames, costs in sums.items()]


def _frames_by_path(rows: Sequence[Row]) -> dict[str, tuple[Frame, ...]]:
    """For each module the frames of the modules around it and its own."""
    by_path = {row.path: row for row in rows}
    frames: dict[str, tuple[Frame, ...]] = {}
    for path, outer in parents_of(rows).items():
        row = by_path[path]
        around = () if outer is None else frames[outer]
        line = heaviest_line(row, "wall")
        frames[path] = (*around, _frame(row.label, line))
    return frames


def _line_of(row: Row, node: NodeCost) -> LineCost | None:
    """The line that made most of the row's nodes of one name."""
    lines = [line for line in row.lines if line.node == node.name]
    return max(lines, key=lambda line: line.wall_ns, default=None)


def _frame(name: str, line: LineCost | None = None) -> Frame:
    shown = visible(name)
    return Frame(shown) if line is None else Frame(shown, visible(line.file), line.line)


_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def to_speedscope(report: Report) -> bytes:
    """A file in speedscope's own format; times in nanoseconds of a typical step.

    A trace without device work has no GPU profile.
    """
    all_stacks = stacks(report)
    clock = f", {WITHOUT_PROFILER}" if report.clock == "real" else ", as recorded"
    frames = {frame: None for stack in all_stacks for frame in stack.frames}
    numbers = {frame: index for index, frame in enumerate(frames)}
    columns = [
        ("wall", [stack.wall for stack in all_stacks]),
        ("CPU", [stack.cpu for stack in all_stacks]),
    ]
    if report.has_gpu:
        columns.insert(1, ("GPU", [stack.gpu for stack in all_stacks]))
    return msgspec.json.encode(
        {
            "$schema": _SCHEMA,
            "name": visible(report.trace),
            "exporter": f"backspot@{__version__}",
            "activeProfileIndex": 0,
            "shared": {"frames": [_written(frame) for frame in frames]},
            "profiles": [
                _profile(
                    f"{name} time of the backward, per {report.per}"
                    f"{'' if name == 'GPU' else clock}",
                    all_stacks,
                    costs,
                    numbers,
                )
                for name, costs in columns
            ],
        }
    )


def _written(frame: Frame) -> dict[str, str | int]:
    if not frame.file:
        return {"name": frame.name}
    return {"name": frame.name, "file": frame.file, "line": frame.line}


def _profile(
    name: str, all_stacks: Sequence[Stack], costs: Sequence[int], numbers: dict[Frame, int]
) -> dict[str, Any]:
    costly = [
        ([numbers[frame] for frame in stack.frames], cost)
        for stack, cost in zip(all_stacks, costs, strict=True)
        if cost
    ]
    costly = [costly[index] for index in _left_heavy(costly)]
    return {
        "type": "sampled",
        "name": name,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": sum(cost for _, cost in costly),
        "samples": [frames for frames, _ in costly],
        "weights": [cost for _, cost in costly],
    }


def _left_heavy(stacks: Sequence[tuple[Sequence[int], int]]) -> Iterator[int]:
    """Order stacks, each with its cost, as a left-heavy graph has them: a caller, then its callees.

    Yields the index of each stack. The time is linear in the frames of all stacks.
    """
    callees: list[dict[int, int]] = [{}]  # of each caller, by frame
    totals, ends = [0], [-1]
    for index, (frames, cost) in enumerate(stacks):
        caller = 0
        for frame in frames:
            callee = callees[caller].setdefault(frame, len(callees))
            if callee == len(callees):
                callees.append({})
                totals.append(0)
                ends.append(-1)
            totals[callee] += cost
            caller = callee
        ends[caller] = index
    left = [0]
    while left:
        caller = left.pop()
        if ends[caller] >= 0:
            yield ends[caller]
        inside = callees[caller]
        # The most expensive is the next; of equal ones, the first.
        left += sorted(inside.values(), key=totals.__getitem__, reverse=True)[::-1]


FORMATS = (Format(".speedscope.json", {Report: to_speedscope}),)
