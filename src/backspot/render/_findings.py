"""The findings in words: their order, what each costs and where, and how many rules looked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from backspot.formatting import counted, duration, percent
from backspot.render._answer import answered
from backspot.render._phases import PHASES
from backspot.render.parts import needs_of_parts
from backspot.render.view import DEFAULT_VIEW, View
from backspot.results.costs import Row
from backspot.results.findings import Finding, Place, alike, helps, other_cost, stable
from backspot.results.report import Report

HEADING = "Why, and what to do"

_ON_A_SCREEN = 3
"""Of how many findings the one about the answer alone is listed first."""
_SAME = 0.25
"""The share of the shorter of two times that must be the same, because times of kernels and of the
clock differ a little."""
_SAME_IDLE = {"launch-bound", "small-batch"}
"""Rules that count the time in which the GPU idles as the host launches little work."""

_PLURAL = {"step": "steps", "pass": "passes"}
_PHASE_PLACES = {
    **{f"({name})": text for name, text in PHASES.items()},
    "(data)": "the loading of data",
    "(optimizer)": "the optimizer",
    "(loss)": "the loss",
    "(other)": "work outside the model",
    "(idle)": "Python between operators",
    "(allocator)": "the allocator",
}
"""Places of findings that have no row, in words."""


def listed(report: Report, view: View = DEFAULT_VIEW) -> list[Finding]:
    """The findings in the order in which to read them.

    The most expensive come first, and before them, of the first few, the one that is about the
    answer alone: its remedy is the next thing to do. Where memory is the question, findings about
    memory come first. Those of preview rules are at the end, where the view asks for them.
    """
    all_findings, stable_findings = list(report.findings), list(stable(report.findings))
    preview = [finding for finding in all_findings if finding.tier == "preview" and view.preview]
    return [*_in_order(report, stable_findings, view), *preview]


def unlisted(report: Report, view: View = DEFAULT_VIEW) -> list[str]:
    """What is true of the step as of nearly every one, and how many preview findings there are."""
    lines = [
        f"{finding.title}: {', '.join(cost_of(report, finding))}; no remedy is known to pay "
        f"(backspot explain {finding.rule})."
        for finding in report.findings
        if finding.tier == "account"
    ]
    count = sum(finding.tier == "preview" for finding in report.findings)
    if count and not view.preview:
        lines.append(
            f"{counted(count, 'finding')} of preview rules: --preview, or report.findings."
        )
    return lines


def _in_order(report: Report, findings: list[Finding], view: View) -> list[Finding]:
    if not view.is_of_time:
        return sorted(findings, key=lambda finding: other_cost(finding) is None)
    row = answered(report, replace(view, order=None))
    subjects = [report.answer.path if view.sort == "wall" else "", row.path if row else ""]
    rule = report.answer.rule if view.sort == "wall" else ""
    for subject in filter(None, subjects):
        for index, finding in enumerate(findings[:_ON_A_SCREEN]):
            about = [place.path for place in finding.places] == [subject] or finding.rule == rule
            if about and has_advice(finding):
                return [finding, *findings[:index], *findings[index + 1 :]]
    return findings


def has_advice(finding: Finding) -> bool:
    """Whether the remedy is worth saying: not where it is known that it does not help here."""
    return helps(finding) is not False


def advice_of(finding: Finding) -> str:
    """The remedy, and whether something else is trained with it; ``""`` as ``has_advice``."""
    if not has_advice(finding):
        return ""
    return f"{finding.remedy}{' This changes what is trained.' * finding.changes_training}"


def cost_of(report: Report, finding: Finding) -> tuple[str, str]:
    """A finding's cost per step and its share: ``5.0 ms`` and ``11% of the step``."""
    if (other := other_cost(finding)) is not None:
        return other.said, other.share(report)
    whole_ns = report.whole_ns
    # Where a pass counts as a step, the step has its forward too, if that is recorded.
    step = report.per if whole_ns > report.wall_ns or report.per == "step" else "backward"
    share = percent(finding.wall_ns / whole_ns if whole_ns else 0.0)
    of_steps = f"{finding.steps} of {counted(report.steps, report.per, _PLURAL[report.per])}"
    often = "" if finding.steps == report.steps else f" (in {of_steps})"
    saves = ""
    as_much = finding.saves is None or alike(finding.saves, finding.wall_ns)
    # What was measured is said beside the remedy alone.
    if finding.saves and not as_much and helps(finding) is None:
        less = f"{'at least ' * finding.saves.at_least}{duration(finding.saves.ns)} less"
        saves = f" ({less} {'at best' if finding.saves.at_best else 'without it'})"
    return duration(finding.wall_ns), f"{share} of the {step}{often}{saves}"


def cost_of_place(place: Place) -> str:
    """What a finding costs in one place: a time, or something else."""
    other = other_cost(place)
    return duration(place.wall_ns) if other is None else other.said


def worth(finding: Finding, limit: int) -> tuple[tuple[Place, ...], str]:
    """The first places to name, and how many more there are.

    A place that has no row is named only among others: alone, the title of the finding says it.
    """
    if len(finding.places) == 1 and finding.path in _PHASE_PLACES:
        return (), ""
    named, rest = finding.places[:limit], len(finding.places) - limit
    return named, counted(rest, "more place") if rest > 0 else ""


def place_name(place: Place) -> str:
    """What a place is called: path and class of a module, or words."""
    return _PHASE_PLACES.get(place.path, place.label)


def overlap(report: Report, finding: Finding, before: Sequence[Finding]) -> str:
    """That findings listed before this one may count some of the same time; ``""`` if none does.

    That is so where both together say of a module more than it takes, where they name the same
    kernels in one module, and of two rules about the same idle time.
    """
    rows = {row.path: row for row in report.modules}
    own_times = {place.path: place.wall_ns for place in finding.places if place.wall_ns}

    def shares(other: Finding) -> bool:
        if {finding.rule, other.rule} == _SAME_IDLE:
            return True
        shared = [place for place in other.places if place.wall_ns and place.path in own_times]
        if set(finding.kernels) & set(other.kernels):
            return bool(shared)
        with_forward = _counts_forward(finding, rows) or _counts_forward(other, rows)
        for place in shared:
            if (row := rows.get(place.path)) is not None:
                takes = row.wall_ns + with_forward * row.forward_ns
                less, more = sorted((own_times[place.path], place.wall_ns))
                if more <= takes < less + more - _SAME * less:
                    return True
        return False

    same = " and ".join(f"“{other.title}”" for other in before if shares(other))
    return f"Can be partly the same time as {same}: do not add them up." if same else ""


def _counts_forward(finding: Finding, rows: Mapping[str, Row]) -> bool:
    """Whether a finding says of a module more than its backward takes."""
    return any(
        place.wall_ns > rows[place.path].wall_ns for place in finding.places if place.path in rows
    )


_LACKING = {
    "needs stacks": "lines of Python (--stacks)",
    "needs shapes": "the inputs of operators (--shapes)",
    "needs labels": "labels of Backspot",
    "needs blocks": "the blocks of kernels",
}
"""What rules need, for people, with the option that records it."""


def _lacking(state: str) -> str:
    """What a rule lacks, in words."""
    need = state.removeprefix("needs ")
    return _LACKING.get(state) or needs_of_parts().get(need, need)


def searched(report: Report) -> str:
    """How many rules looked for causes and how many could not, or ``""`` if that says nothing."""
    looked = sum(state in ("found", "nothing") for state in report.rules.values())
    lacks = Counter(state for state in report.rules.values() if state.startswith("needs "))
    if not looked + lacks.total():
        return ""
    need = ", ".join(
        f"{count:,} {'needs' if count == 1 else 'need'} {_lacking(state)}"
        for state, count in lacks.items()
    )
    if stable(report.findings):
        return f"Of {counted(looked + lacks.total(), 'rule')}, {need}." if need else ""
    looked -= len({finding.rule for finding in report.findings})
    others = f"; of others, {need}" if need else ""
    return f"No cause found by {counted(looked, 'rule')}{others}."


def asked_for(report: Report) -> str:
    """What to record for more rules about time to look, ``""`` for nothing."""
    lacks = [s for s in report.rules.values() if s in ("needs stacks", "needs shapes")]
    options = " ".join(sorted({f"--{state.removeprefix('needs ')}" for state in lacks}))
    return f"record with {options} for {counted(len(lacks), 'more rule')}" if lacks else ""
