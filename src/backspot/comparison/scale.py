"""Scale a report of another machine, so that it can be compared with one of this machine.

Two machines differ in all modules at once. So the times before are multiplied by the median, over
the modules, of how many times as long they take now. What is left is how the modules differ from
each other. Only modules that did the same work on both sides count: of the same class, and called
as often. New modules and more calls say nothing about a machine, and stay a slowdown.

A slowdown of everything at once looks like another machine, and nothing here tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from backspot.comparison.compare import same_work
from backspot.results.costs import Row
from backspot.results.report import Report

_FEWEST = 3
"""Modules with the same work from which a machine is known: one that got slower is outvoted."""
_SHARE = 0.003
"""Share of the backward from which a module counts."""


def scaled_to(after: Report, before: Report) -> tuple[Report, str]:
    """Return ``before`` with its times on the scale of ``after``, and a note about that."""
    pairs = same_work(before, after)
    wall, modules = _factor(before, after, "wall_ns", pairs)
    gpu, _ = _factor(before, after, "gpu_ns", pairs)
    if modules < _FEWEST:
        return before, (
            "The report before may be of another machine, and fewer than three modules do the same "
            "work in both reports, so the speed of the machine is not known: the times are "
            "compared as they are."
        )

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
        f"is what {modules} modules with the same work have in common. A slowdown of everything at "
        "once would look the same."
    )


def _factor(
    before: Report, after: Report, time: str, pairs: Sequence[tuple[Row, Row]]
) -> tuple[float, int]:
    """Return how many times as long the pairs typically take after, and how many say so."""
    least_before, least_after = (_SHARE * getattr(one, time) for one in (before, after))
    ratios = [
        new / old
        for old, new in ((getattr(was, time), getattr(now, time)) for was, now in pairs)
        if old > 0 and new > 0 and (old >= least_before or new >= least_after)
    ]
    return (median(ratios) if len(ratios) >= _FEWEST else 1.0), len(ratios)
