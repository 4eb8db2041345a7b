"""What costs most in a step: a module, a phase, another cause, or what a part knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backspot.render._answer import answered, costliest_row
from backspot.render._remedies import first_remedy
from backspot.render.parts import costs_of_parts
from backspot.results.costs import Phase, Row
from backspot.results.findings import (
    ALL_OVER,
    Finding,
    gain_of,
    helps,
    is_concentrated,
    stable,
)
from backspot.results.grouping import numberless
from backspot.results.report import Answer, Report, lines_of

_STANDS_OUT = 0.1
"""Share of the step from which something stands out."""
_UNPRICED = 0.3
"""The same for a cause of which no replay says what it costs."""
_VAGUE = 0.5
"""What counts of a phase without a known cause, and of a cause all over the step, as neither says
where to look."""
_CLEAR = ("data",)
"""Phases that say where to look without a cause."""
_MOSTLY = 0.5
"""Share of a phase from which one line or one cause has most of it."""
_NEARLY = 0.75
"""Share from which the saving of a cause is that of the whole phase, or of the module."""


def costliest(report: Report) -> Answer:
    """Return what costs most in the step of a report, and what to do first."""
    subject = _costliest(report)
    return replace(subject, remedy=first_remedy(report, subject))


def _costliest(report: Report) -> Answer:
    candidates = sorted(
        _candidates(report), key=lambda candidate: (-candidate[0], -candidate[1].share)
    )
    for counts, answer in candidates:
        # A cause in no one place comes last, and one that no replay prices must be large.
        least = _STANDS_OUT if answer.saves else _UNPRICED
        if counts >= _STANDS_OUT or (answer.kind == "cause" and _gain(report, answer) >= least):
            return answer
    longest = max(
        (answer for _, answer in candidates), key=lambda answer: answer.share, default=None
    )
    wall_ns, share = (longest.wall_ns, longest.share) if longest else (0, 0.0)
    return Answer("nothing", "", "", "", wall_ns, share, None, "")


def _candidates(report: Report) -> Iterator[tuple[float, Answer]]:
    """Everything that may cost most, each with the share of the step for which it counts.

    That is what a step would gain where a replay knows it, else the clock time: of a module at
    least that of its backward, and at most that of forward and backward, as replays of noisy steps
    can say more. So its place is about the same where the step cannot be replayed.
    """
    whole_ns = max(1, report.whole_ns)
    findings = [finding for finding in stable(report.findings) if helps(finding) is not False]
    about = {
        finding.places[0].path: finding
        for finding in reversed(findings)
        if len(finding.places) == 1
    }
    for row in _rows(report):
        forward_ns = 0 if row.is_exchange else row.forward_ns  # waits, in which others compute
        wall_ns = min(row.wall_ns + forward_ns, report.whole_ns)
        share, of_backward = wall_ns / whole_ns, min(1.0, row.wall_ns / whole_ns)
        rule = about[row.path].rule if row.path in about else ""
        fields = (row.path, row.class_name, "", wall_ns, share, row.saves, rule)
        module = Answer("module", *fields)
        yield min(share, max(of_backward, _gain(report, module))), module
    of_phases = max(1, sum(phase.wall_ns for phase in report.phases))
    of_phase = set[str]()
    for phase in report.phases:
        if phase.name not in ("forward", "backward"):
            share = phase.wall_ns / of_phases
            cause = about.get(f"({phase.name})")
            cause = cause if cause and cause.wall_ns >= _MOSTLY * phase.wall_ns else None
            of_phase.add(cause.rule if cause else "")
            counts = share * (1 if cause or phase.name in _CLEAR else _VAGUE)
            if rare := next((work for work in report.rare if work.name == phase.name), None):
                # Of what takes most of the step, a module's part is a part of the same.
                counts = 1.0 if rare.share >= _MOSTLY else share
            yield counts, _phase(report, phase, share, cause)
    for finding in findings:
        if finding.rule in of_phase:
            continue
        found, outside = _cause(report, finding), finding.path.startswith("(")
        of_no_module = outside and not finding.places[0].class_name
        # Of a step that cannot be replayed, nothing has a price, and what is large counts.
        counted = report.replayed_step is None and found.share >= _UNPRICED
        priced = found.saves is not None or of_no_module or counted
        counts = _gain(report, found) if priced else 0.0
        if not is_concentrated(finding):
            counts *= ALL_OVER if found.saves and found.saves.at_best else _VAGUE
        yield counts, found
    for cost in costs_of_parts(report):
        yield cost.answer.share, cost.answer


def _rows(report: Report) -> Iterator[Row]:
    """The modules that take most of the step, and the communication that the backward waits for.

    Not a module of which a finding explains nearly all, as the finding says more.
    """
    row, first = costliest_row(report), answered(report)
    if row is not None and not _is_explained(report, row):
        yield row
    # Those that the backward takes longest for may take longer in all; not what the row is one of.
    if first is not None and (row is None or _kind(first) != _kind(row)):
        yield first


def _kind(row: Row) -> tuple[str, str]:
    """What a row has in common with its like."""
    return numberless(row.path), row.class_name


def _is_explained(report: Report, row: Row) -> bool:
    """Whether a finding about a module alone has nearly all of its time."""
    least = _NEARLY * (row.wall_ns + row.forward_ns)
    for one in stable(report.findings):
        if one.path == row.path and is_concentrated(one) and helps(one) is not False:
            gain = gain_of(one)
            if (one.wall_ns if gain is None else gain.ns) >= least:
                return True
    return False


def _gain(report: Report, candidate: Answer) -> float:
    """The share of the step that would be saved, or that is taken where that is not known."""
    if candidate.saves is None or report.replayed_step is None:
        return candidate.share
    return min(1.0, candidate.saves.ns / max(1, report.replayed_step.ns))


def _cause(report: Report, finding: Finding) -> Answer:
    """A cause, with its place where it has most of its time in one."""
    place, share = finding.places[0], min(1.0, finding.wall_ns / max(1, report.whole_ns))
    place_fields = (
        (place.path, place.class_name, place.line) if is_concentrated(finding) else ("", "", "")
    )
    return Answer("cause", *place_fields, finding.wall_ns, share, gain_of(finding), finding.rule)


def _phase(report: Report, phase: Phase, share: float, cause: Finding | None) -> Answer:
    """A phase with the line that takes most of it, and with what its cause saves."""
    path, line, saves, rule = f"({phase.name})", "", None, ""
    if lines := [line for line in lines_of(report) if line.phase == phase.name]:
        most = max(lines, key=lambda line: line.idle_ns)
        if most.idle_ns >= _MOSTLY * sum(line.idle_ns for line in lines):
            line = most.place
    if cause:
        line, rule = cause.places[0].line or line, cause.rule
        gain = gain_of(cause)
        saves = gain if gain and gain.ns >= _NEARLY * phase.wall_ns else None
    return Answer("phase", path, "", line, phase.wall_ns, share, saves, rule)
