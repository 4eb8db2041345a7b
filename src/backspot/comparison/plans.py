"""Whether what a plan said before came true: each of its rungs beside the step after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from backspot.results.comparison import Comparison
from backspot.results.plan import PlannedStep, PlanOutcome
from backspot.results.report import Report

_TRUE = 0.05
"""Share of a said step by which the real one can differ from it and still be what was said."""


def _planned_steps(before: Sequence[Report], after: Sequence[Report]) -> tuple[PlannedStep, ...]:
    """Return what the first plan of a side said, in its order, beside the steps after.

    Only settings that were said to help, and none where no step after was timed without the
    profiler: a plan speaks of such steps. Another batch is another step, and is left out.
    """
    plan = next((report.plan for report in before if report.plan is not None), None)
    real = [report.unprofiled_step_ns for report in after]
    steps = [ns for ns in real if ns is not None]
    if plan is None or not steps:
        return ()
    after_ns = fmean(steps)
    return tuple(
        PlannedStep(
            rung.setting,
            rung.on,
            plan.step_ns / 1e6,
            rung.step_ns / 1e6,
            rung.low_ns / 1e6,
            rung.high_ns / 1e6,
            after_ns / 1e6,
            _outcome(rung.low_ns, rung.step_ns, rung.high_ns, after_ns),
        )
        for rung in plan.rungs
        if rung.step_ns and rung.verdict == "helps" and rung.axis != "batch"
    )


def _outcome(low_ns: int, said_ns: int, high_ns: int, after_ns: float) -> PlanOutcome:
    allowed = _TRUE * said_ns
    if after_ns > max(high_ns, said_ns + allowed):
        return "not reached"
    return "faster than said" if after_ns < min(low_ns, said_ns - allowed) else "came true"


def with_planned_steps(
    comparison: Comparison, before: Sequence[Report], after: Sequence[Report]
) -> Comparison:
    """Add what the plan before said, and a note where that cannot be judged."""
    has_plan = any(report.plan is not None and report.plan.ladder for report in before)
    is_timed = any(report.unprofiled_step_ns is not None for report in after)
    notes = comparison.notes if is_timed or not has_plan else (*comparison.notes, _UNJUDGED)
    return replace(comparison, planned=_planned_steps(before, after), notes=notes)


_UNJUDGED = (
    "Whether the plan before came true is not known: no step after was timed without the profiler."
)
ADDING = (with_planned_steps,)
