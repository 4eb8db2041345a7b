"""Two reports on one clock: real times cannot be compared with recorded ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backspot.results.report import Report

_AS_RECORDED = (
    "Only the report {} has times without the profiler, so both are compared as they were recorded."
)


def on_one_clock(before: Report, after: Report) -> tuple[Report, Report, str]:
    """Return both reports with times of one clock, and a note if one of them was changed."""
    if before.clock == after.clock:
        return before, after, ""
    if before.clock == "real":
        return as_recorded(before), after, _AS_RECORDED.format("before")
    return before, as_recorded(after), _AS_RECORDED.format("after")


def as_recorded(report: Report) -> Report:
    """Return a report with its clock times as they were recorded.

    Those by step are brought to the recorded ones by what all steps together have in common, and so
    are those of nodes. The host's own times stay: nothing compares them.
    """
    if report.clock == "recorded":
        return report
    slower = report.recorded_wall_ns / max(1, report.wall_ns)
    made: Report = _recorded(report, "wall_ns")
    made = _recorded(made, "step_ns")
    return replace(
        made,
        clock="recorded",
        modules=tuple(_recorded(row, "wall_ns") for row in report.modules),
        phases=tuple(_recorded(phase, "wall_ns") for phase in report.phases),
        operators=tuple(
            replace(one, wall_ns=int(one.wall_ns * slower)) for one in report.operators
        ),
    )


def _recorded(cost: Any, time: str) -> Any:
    real, recorded = getattr(cost, time), getattr(cost, f"recorded_{time}")
    slower = recorded / max(1, real)
    by_step = tuple(round(ns * slower) for ns in getattr(cost, f"{time}_by_step"))
    return replace(cost, **{time: recorded, f"{time}_by_step": by_step})
