"""Why a step is slow, and what to do about it.

In comes ``Evidence``: a trace with its owners, its clock and its costs. Out come ``Finding``s.
``find_all`` runs every rule, leaves out what costs too little, and adds the source line of each
place. ``results.findings.in_order`` says which comes first.

The files, from the bottom up:

- ``costs.py``: the clock time of spans and device work, and its sums by step, place and name.
- ``evidence.py``: ``Evidence``, what a rule is a function of. Its methods pick spans and device
  work by name or by launch and return masks, and word times and counts.
- ``observations.py``: masks that several rules share.
- ``registry.py``: the decorator ``rule``, and the list of the rules.
- ``rules/``: one file a subject. The chapter on how to write a rule is in ``rules/__init__.py``.

A *fallback rule* runs after the others and is given the findings of the stable ones. No stable rule
depends on what a preview rule finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from backspot.analysis.findings.costs import LEAST_SHARE, Removable
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import (
    CUT_SHORT,
    FOUND,
    NOTHING_FOUND,
    Found,
    Judged,
    all_rules,
)
from backspot.results.costs import Row, line_of
from backspot.results.findings import (
    Finding,
    Place,
    ReplayedStep,
    counted_gain,
    helps,
    in_order,
    measured,
    stable,
)

__all__ = [
    "CUT_SHORT",
    "FOUND",
    "LEAST_SHARE",
    "NOTHING_FOUND",
    "Evidence",
    "Found",
    "Judged",
    "Removable",
    "all_rules",
    "find_all",
    "weighed",
]


def find_all(evidence: Evidence) -> Judged:
    """Ask every rule that can judge the trace.

    A finding is kept if its typical cost is at least ``LEAST_SHARE`` of the typical step; if more
    than half of the steps have it, unless the rule is about what is seldom; and if it takes the
    rule's own ``least`` in most of these. A rule may ask for more. What a replay says of the
    findings that are kept comes later (``weighed``).
    """
    findings: list[Finding] = []
    states: dict[str, str] = {}
    for rule in all_rules():
        if lacks := evidence.lacks(rule):
            if "cuda" in rule.devices:  # what is for a CPU alone has nothing to say about others
                states[rule.name] = lacks
            continue
        finding = rule.find(evidence, stable(findings))
        states[rule.name] = finding if isinstance(finding, str) else NOTHING_FOUND
        if (
            isinstance(finding, Finding)
            and finding.wall_ns >= LEAST_SHARE * evidence.step_ns
            and (rule.seldom or 2 * finding.steps > evidence.report.steps)
            and _takes(finding, rule.least, evidence)
        ):
            if isinstance(finding, Found):
                finding = replace(finding, taken_ns=_taken(finding, evidence))
            findings.append(rule.named(finding))
            states[rule.name] = FOUND
    rows = {row.path: row for row in evidence.report.modules}
    with_lines = (_with_lines(finding, rows) for finding in findings)
    return Judged(in_order(with_lines, None), states)


_PAYS = 0.1
"""Share of the step that the remedy of what is true of nearly every step must gain."""


def weighed(findings: Iterable[Finding], step: ReplayedStep | None) -> tuple[Finding, ...]:
    """Return the findings in order; what is common counts only where its remedy is known to pay.

    That is where a part has measured so, or the replay of the remedy says so. A price by replay
    goes where a part has measured something else.
    """
    common = {rule.name for rule in all_rules() if rule.common}

    def placed(finding: Finding) -> Finding:
        if (measurement := measured(finding)) is not None and measurement.refutes:
            finding = replace(finding, saves=None)
        if finding.rule not in common or finding.tier == "preview":
            return finding
        gain = counted_gain(finding)
        by_replay = bool(step and gain is not None and gain >= _PAYS * step.ns)
        pays = helps(finding) is True or by_replay
        return replace(finding, tier="stable" if pays else "account")

    return in_order(map(placed, findings), step)


def _takes(finding: Finding, least: float, evidence: Evidence) -> bool:
    """Whether a cause takes a share of the step, each by its own clock, in most steps."""
    by_step = finding.by_step if isinstance(finding, Found) else None
    return by_step is None or evidence.costs.holds_in_most_steps(by_step, least)


def _taken(finding: Found, evidence: Evidence) -> int | None:
    """Return how long all of the work takes that a finding's remedy takes away, if that is known.

    A device that need not be waited for lets the host get ahead, which can save more.
    """
    gone = [finding.removable] if finding.removable and not finding.change else []
    if set(finding.change) == {"free"}:
        gone = [finding.change["free"]]
    if not gone or (len(gone[0].waits) and evidence.report.has_gpu):
        return None
    return evidence.time_taken(gone[0])


def _with_lines(finding: Finding, rows: Mapping[str, Row]) -> Finding:
    """Return the finding with a source line for each place: that of its heaviest node."""

    def line(place: Place) -> str:
        row = rows.get(place.path)
        if row is None:
            return ""
        return next((text for node in finding.nodes if (text := line_of(row, node))), "")

    places = (replace(place, line=place.line or line(place)) for place in finding.places)
    return replace(finding, places=tuple(places))
