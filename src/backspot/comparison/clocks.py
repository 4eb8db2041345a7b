"""Reports on one clock: real times cannot be compared with recorded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backspot.results.report import Report

_AS_RECORDED = "times without the profiler, so {} are compared as they were recorded."


def on_one_clock(
    before: Sequence[Report], after: Sequence[Report]
) -> tuple[list[Report], list[Report], str]:
    """Return both sides with times of one clock, and a note if some of them were changed."""
    real = [[report.clock == "real" for report in side] for side in (before, after)]
    if all(map(all, real)) or not any(map(any, real)):
        return list(before), list(after), ""
    if len(before) == len(after) == 1:
        only = "before" if real[0][0] else "after"
        note = f"Only the report {only} has {_AS_RECORDED.format('both')}"
    else:
        note = f"Some recordings have no {_AS_RECORDED.format('all')}"
    recorded = [[as_recorded(report) for report in side] for side in (before, after)]
    return recorded[0], recorded[1], note


def as_recorded(report: Report) -> Report:
    """Return a report with its clock times as they were recorded.

    Those by step are brought to the recorded ones by what all steps together have in common, and so
    are those of nodes. The host's own times stay: nothing compares them.
    """
    if report.clock == "recorded":
        return report
    slower = report.recorded_wall_ns / max(1, report.wall_ns)
    recorded: Report = _recorded(report, "wall_ns")
    recorded = _recorded(recorded, "step_ns")
    return replace(
        recorded,
        clock="recorded",
        modules=tuple(_recorded(row, "wall_ns") for row in report.modules),
        phases=tuple(_recorded(phase, "wall_ns") for phase in report.phases),
        operators=tuple(
            replace(operator, wall_ns=int(operator.wall_ns * slower))
            for operator in report.operators
        ),
    )


def _recorded(cost: Any, time: str) -> Any:
    real, recorded = getattr(cost, time), getattr(cost, f"recorded_{time}")
    slower = recorded / max(1, real)
    by_step = tuple(round(ns * slower) for ns in getattr(cost, f"{time}_by_step"))
    return replace(cost, **{time: recorded, f"{time}_by_step": by_step})
