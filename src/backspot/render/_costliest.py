"""What costs most in a step: a module, a phase, another cause, or what a part knows."""

from __future__ import annotations

from collections.abc import Iterator

from backspot.render._answer import answered
from backspot.render.parts import costs_of_parts
from backspot.results.costs import Phase
from backspot.results.findings import ALL_OVER, Finding, gain_of, is_concentrated, stable
from backspot.results.report import Answer, Report, lines_of

_STANDS_OUT = 0.1
"""Share of the step from which something stands out."""
_UNPRICED = 0.3
"""The same for a cause of which no replay says what it costs."""
_VAGUE = 0.5
"""What counts of a phase without a known cause, and of a cause all over the step, as neither says
where to look."""
_MOSTLY = 0.5
"""Share of a phase from which one line or one cause has most of it."""
_NEARLY = 0.75
"""Share from which the saving of a cause is that of the whole phase, or of the module."""


def costliest(report: Report) -> Answer:
    """Return what costs most in the step of a report."""
    found = sorted(_candidates(report), key=lambda one: (-one[0], -one[1].share))
    for counts, answer in found:
        # A cause in no one place comes last, and one that no replay prices must be large.
        least = _STANDS_OUT if answer.saves else _UNPRICED
        if counts >= _STANDS_OUT or (answer.kind == "cause" and _gain(report, answer) >= least):
            return answer
    longest = max((answer for _, answer in found), key=lambda one: one.share, default=None)
    wall_ns, share = (longest.wall_ns, longest.share) if longest else (0, 0.0)
    return Answer("nothing", "", "", "", wall_ns, share, None, "")


def _candidates(report: Report) -> Iterator[tuple[float, Answer]]:
    """Everything that may cost most, each with the share of the step for which it counts.

    Of a cause that is what a step would gain where a replay knows it, else the clock time; of a
    module the larger of both, as its row has the backward alone.
    """
    whole = max(1, report.whole_ns)
    about = {
        one.places[0].path: one for one in reversed(stable(report.findings)) if len(one.places) == 1
    }
    if (row := answered(report)) is not None:
        share = min(1.0, row.wall_ns / whole)
        rule = about[row.path].rule if row.path in about else ""
        at = (row.path, row.class_name, "", row.wall_ns, share, row.saves, rule)
        module = Answer("module", *at)
        yield max(share, _gain(report, module)), module
    if (found := _forward_alone(report)) is not None:
        yield min(found.share, _gain(report, found)), found  # replays of noisy steps can say more
    of_phases = max(1, sum(phase.wall_ns for phase in report.phases))
    of_phase = set[str]()
    for phase in report.phases:
        if phase.name not in ("forward", "backward"):
            share = phase.wall_ns / of_phases
            cause = about.get(f"({phase.name})")
            cause = cause if cause and cause.wall_ns >= _MOSTLY * phase.wall_ns else None
            of_phase.add(cause.rule if cause else "")
            counts = share * (1 if cause else _VAGUE)
            if rare := next((work for work in report.rare if work.name == phase.name), None):
                # Of what takes most of the step, a module's part is a part of the same.
                counts = 1.0 if rare.share >= _MOSTLY else share
            yield counts, _phase(report, phase, share, cause)
    for one in stable(report.findings):
        if one.rule in of_phase:
            continue
        found, outside = _cause(report, one), one.path.startswith("(")
        priced = found.saves is not None or (outside and not one.places[0].class_name)
        counts = _gain(report, found) if priced else 0.0
        if not is_concentrated(one):
            counts *= ALL_OVER if found.saves and found.saves.at_best else _VAGUE
        yield counts, found
    for cost in costs_of_parts(report):
        yield cost.answer.share, cost.answer


def _forward_alone(report: Report) -> Answer | None:
    """The module that a step gains most without, if its forward takes more than its backward.

    Rankings of the backward do not show it: a metric, a frozen encoder, a module without gradients.
    Where a finding explains it, the finding says more.
    """
    first = next(iter(report.top(1, sort="saves")), None)
    saves = first.saves if first and first.is_module else None
    if first is None or saves is None or first.wall_ns >= first.forward_ns:
        return None
    for one in stable(report.findings):
        if one.path == first.path and one.saves and one.saves.ns >= _NEARLY * saves.ns:
            return None
    wall_ns = min(first.wall_ns + first.forward_ns, report.whole_ns)
    share = wall_ns / max(1, report.whole_ns)
    return Answer("module", first.path, first.class_name, "", wall_ns, share, saves, "")


def _gain(report: Report, found: Answer) -> float:
    """The share of the step that would be saved, or that is taken where that is not known."""
    if found.saves is None or report.replayed_step is None:
        return found.share
    return min(1.0, found.saves.ns / max(1, report.replayed_step.ns))


def _cause(report: Report, one: Finding) -> Answer:
    """A cause, with its place where it has most of its time in one."""
    place, share = one.places[0], min(1.0, one.wall_ns / max(1, report.whole_ns))
    at = (place.path, place.class_name, place.line) if is_concentrated(one) else ("", "", "")
    return Answer("cause", *at, one.wall_ns, share, gain_of(one), one.rule)


def _phase(report: Report, phase: Phase, share: float, cause: Finding | None) -> Answer:
    """A phase with the line that takes most of it, and with what its cause saves."""
    path, line, saves, rule = f"({phase.name})", "", None, ""
    if lines := [line for line in lines_of(report) if line.phase == phase.name]:
        most = max(lines, key=lambda one: one.idle_ns)
        if most.idle_ns >= _MOSTLY * sum(one.idle_ns for one in lines):
            line = most.place
    if cause:
        line, rule = cause.places[0].line or line, cause.rule
        gain = gain_of(cause)
        saves = gain if gain and gain.ns >= _NEARLY * phase.wall_ns else None
    return Answer("phase", path, "", line, phase.wall_ns, share, saves, rule)
