"""Reports as flame graphs of wall, GPU and CPU time, for https://www.speedscope.app."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import msgspec

from backspot._version import __version__
from backspot.formatting import visible
from backspot.render.formats import Format
from backspot.results.report import Report, Row

__all__ = ["FORMATS", "Stack", "stacks", "to_folded", "to_speedscope"]


class Stack(NamedTuple):
    """The cost of one stack of frames, in nanoseconds."""

    frames: tuple[str, ...]
    wall: int
    gpu: int
    cpu: int


def stacks(report: Report) -> list[Stack]:
    """The report's costs by stack, in the order of its rows; each stack occurs once.

    A module's frames are the parts of its path, below the class of its root. A leaf is an autograd
    node; time without a node belongs to the row itself. A row without a module is one frame.
    Invisible characters are written as escapes.
    """
    classes = {row.path: row.name for row in report.modules if row.is_module}
    sums: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(frames: tuple[str, ...], *costs: int) -> None:
        if any(costs):
            known = sums[tuple(map(visible, frames))]
            known[:] = [a + b for a, b in zip(known, costs, strict=True)]

    for row in report.modules:
        frames = _frames(row, classes)
        # Typical times can leave over less than nothing.
        rest = [max(0, cost) for cost in (row.wall_ns, row.gpu_ns, row.cpu_ns)]
        for node in row.nodes:
            # No more than the row has: a report written by hand may not add up.
            costs = list(map(min, (node.wall_ns, node.gpu_ns, node.cpu_ns), rest))
            add((*frames, node.name), *costs)
            rest = [left - cost for left, cost in zip(rest, costs, strict=True)]
        add(frames, *rest)
    return [Stack(frames, *costs) for frames, costs in sums.items()]


def _frames(row: Row, classes: dict[str, str]) -> tuple[str, ...]:
    if not row.is_module:
        return (row.name,)
    if row.root:  # instrumented under a name of its own, which its path starts with
        return tuple(row.path.split("."))
    below = row.path.split(".") if row.path else []
    return (classes.get("", "(root)"), *below)


_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def to_speedscope(report: Report) -> bytes:
    """A file in speedscope's own format; times in nanoseconds of a typical step.

    A trace without device work has no GPU profile.
    """
    every = stacks(report)
    names = {frame: None for stack in every for frame in stack.frames}
    frames = {name: index for index, name in enumerate(names)}
    columns = [("wall", [stack.wall for stack in every]), ("cpu", [stack.cpu for stack in every])]
    if report.has_gpu:
        columns.insert(1, ("gpu", [stack.gpu for stack in every]))
    return msgspec.json.encode(
        {
            "$schema": _SCHEMA,
            "name": visible(report.trace),
            "exporter": f"backspot@{__version__}",
            "activeProfileIndex": 0,
            "shared": {"frames": [{"name": name} for name in frames]},
            "profiles": [_profile(name, every, costs, frames) for name, costs in columns],
        }
    )


def _profile(
    name: str, every: list[Stack], costs: list[int], frames: dict[str, int]
) -> dict[str, Any]:
    kept = [(stack, cost) for stack, cost in zip(every, costs, strict=True) if cost]
    return {
        "type": "sampled",
        "name": name,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": sum(costs),
        "samples": [[frames[frame] for frame in stack.frames] for stack, _ in kept],
        "weights": [cost for _, cost in kept],
    }


def to_folded(report: Report) -> bytes:
    r"""Wall time in nanoseconds of a typical step, in UTF-8.

    A semicolon in a name is written ``\x3b``, because it separates frames.
    """
    return "".join(
        f"{';'.join(frame.replace(';', _SEMICOLON) for frame in stack.frames)} {stack.wall}\n"
        for stack in stacks(report)
        if stack.wall
    ).encode()


_SEMICOLON = "\\x3b"

FORMATS = (
    Format(".folded", {Report: to_folded}),
    Format(".speedscope.json", {Report: to_speedscope}),
)
