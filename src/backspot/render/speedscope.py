"""A report as flame graphs for https://www.speedscope.app: one each for wall, GPU and CPU time."""

from __future__ import annotations

from typing import Any

import msgspec

from backspot._version import __version__
from backspot.render._stacks import Stack, stacks
from backspot.report import Report
from backspot.words import visible

__all__ = ["to_speedscope"]

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def to_speedscope(report: Report) -> bytes:
    """A file in speedscope's own format; times in nanoseconds over all steps.

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
