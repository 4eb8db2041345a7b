"""What the rungs of a plan say of the findings whose remedies they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from backspot.analysis.findings import weighed
from backspot.formatting import duration
from backspot.live.plan.around import is_of_workers
from backspot.results.findings import Finding
from backspot.results.plan import Plan, Rung
from backspot.results.report import Report, changed
from backspot.results.trials import Tried, Variant, Verdict

_AXES: Mapping[str, tuple[str, ...]] = {
    "attention-math": ("attention",),
    "launch-bound": ("compile",),
    "layout-copies": ("layout",),
    "no-tensor-cores": ("precision",),
    "recompute": ("checkpoint",),
    "small-batch": ("batch",),
    "waiting-for-data": ("loader",),
}
"""The kinds of settings that the remedy of a rule names first. What it names beside them, such as a
larger batch in a step that waits for the host, must not lend its price to these."""


def with_rungs(report: Report) -> Report:
    """Return a report whose findings know what its plan has tried of their remedies.

    A finding whose remedy was tried by itself, on copies of operators, stays as it is.
    """
    plan = report.plan
    if plan is None or not plan.rungs:
        return report
    findings = [_with_rungs(finding, plan) for finding in report.findings]
    return changed(report, findings=weighed(findings, report.replayed_step))


def _with_rungs(finding: Finding, plan: Plan) -> Finding:
    rungs = [
        rung
        for axis in _AXES.get(finding.rule, ())
        for rung in plan.rungs
        if rung.axis == axis and (axis != "loader" or is_of_workers(rung))
    ]
    if not rungs or (finding.tried is not None and finding.tried.variants):
        return finding
    tried = [rung for rung in rungs if rung.step_ns]
    if not tried:
        why_not = ": ".join(filter(None, (rungs[0].setting, rungs[0].note)))
        return replace(finding, tried=finding.tried or Tried(plan.what, why_not=why_not))
    now = Variant("as it is", plan.step_ns, plan.step_ns, plan.step_ns)
    variants = (now, *map(_variant, tried))
    return replace(finding, tried=Tried(plan.what, variants, of_plan=True))


def _variant(rung: Rung) -> Variant:
    """Return what a step takes with a setting, and saves beside the step without it."""
    verdict: Verdict = "undecided" if rung.verdict == "not tried" else rung.verdict
    middle = rung.saves_ns
    low = rung.before_ns - rung.high_ns if rung.high_ns else middle
    high = rung.before_ns - rung.low_ns if rung.low_ns else middle
    below = f"on top of {' and '.join(rung.on)}, from {duration(rung.before_ns)}"
    note = "; ".join(filter(None, (rung.note, below if rung.on else "")))
    takes = rung.step_ns, rung.low_ns or rung.step_ns, rung.high_ns or rung.step_ns
    return Variant(
        *(rung.setting, *takes, middle, low, high, verdict, note),
        changes_training=rung.axis == "batch",
    )
