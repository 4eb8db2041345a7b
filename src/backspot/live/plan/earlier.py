"""The plan of an earlier report of the same recording."""

from __future__ import annotations

from backspot.results.report import Report, changed


def with_earlier_plan(report: Report, earlier: Report) -> Report:
    """Return a report with the plan that was made for an earlier one of the same recording."""
    return report if earlier.plan is None else changed(report, plan=earlier.plan)
