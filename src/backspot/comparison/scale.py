"""Scale a report of another machine, so that it can be compared with one of this machine.

Two machines differ in all modules at once, by what is the *common shift* on one machine. The times
before are multiplied by it. What is left is how the modules differ from each other: their shares.
With too few modules for a common shift, the time of the whole backward decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backspot.comparison.noise import common_shift
from backspot.results.report import Report

__all__ = ["scaled_to"]


def scaled_to(after: Report, before: Report) -> tuple[Report, str]:
    """Return ``before`` with its times on the scale of ``after``, and a note about that.

    Args:
        after: the report of this machine.
        before: the report of another one.
    """
    wall, gpu = _factor(before, after, "wall_ns"), _factor(before, after, "gpu_ns")

    def scaled(costs: Any, times: Sequence[str], factor: float) -> Any:
        changes: dict[str, Any] = {name: round(getattr(costs, name) * factor) for name in times}
        for name in times:
            by_step = f"{name}_by_step"
            changes[by_step] = tuple(round(time * factor) for time in getattr(costs, by_step))
        return replace(costs, **changes)

    made: Report = scaled(scaled(before, ("step_ns", "wall_ns"), wall), ("gpu_ns",), gpu)
    made = replace(
        made,
        modules=tuple(
            scaled(scaled(row, ("wall_ns",), wall), ("gpu_ns",), gpu) for row in before.modules
        ),
        phases=tuple(scaled(phase, ("wall_ns",), wall) for phase in before.phases),
    )
    both = before.has_gpu and after.has_gpu
    times = f"{wall:.2f} (GPU times: by {gpu:.2f})" if both else f"{wall:.2f}"
    return made, (
        f"The report before may be of another machine: its times are multiplied by {times}, which "
        "is what all modules have in common."
    )


def _factor(before: Report, after: Report, time: str) -> float:
    old = {row.path: getattr(row, time) for row in before.modules if row.is_module}
    new = {row.path: getattr(row, time) for row in after.modules if row.is_module}
    wholes = getattr(before, time), getattr(after, time)
    shift = common_shift([(old[path], new[path]) for path in old if path in new], wholes)
    if shift is not None:
        return math.exp(shift.common)
    return wholes[1] / wholes[0] if all(wholes) else 1.0
