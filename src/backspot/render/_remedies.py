"""What to do first: of all remedies that have a price, the one to begin with, and its sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from backspot.formatting import duration, percent
from backspot.render._words import Part, said
from backspot.render.parts import remedies_of_parts
from backspot.results.findings import (
    Finding,
    FirstRemedy,
    counted_gain,
    gain_of,
    helps,
    measured,
    other_cost,
    stable,
)
from backspot.results.grouping import numberless
from backspot.results.report import Answer, Report

_LEAST = 0.02
"""Share of the step from which a remedy is worth to begin with."""
_NEAR = 2 / 3
"""Remedies that save this share of what the best one saves are as good: which of them comes first
must not change from one recording to the next."""
_PREDICTED = 0.5
"""What counts of a saving that was not measured."""
_END = re.compile(r"(?<=[^.])\.(?= [A-Z(]|$)|(?<=[\w)\]]): ")
"""What ends the first sentence of a remedy, or what explains it."""


def first_remedy(report: Report, subject: Answer) -> FirstRemedy | None:
    """Return what to do first; ``None`` where nothing is known to save 2% of a step.

    That is what saves most. Of remedies that save about as much, one comes first that is about what
    costs most, then one that was measured. What trains something else comes last.

    Args:
        subject: what costs most in the step.
    """
    candidates = list(_candidates(report, subject))
    unchanged = [entry for entry in candidates if not entry[2].changes_training]
    candidates = unchanged or candidates
    most = max((weight for weight, _, _ in candidates), default=0.0)
    near = [entry for entry in candidates if entry[0] >= _NEAR * most]
    near.sort(key=lambda entry: (not entry[1], not entry[2].measured, entry[2].rule, entry[2].what))
    return near[0][2] if near else None


def _candidates(report: Report, subject: Answer) -> Iterator[tuple[float, bool, FirstRemedy]]:
    """What counts of each saving, whether it is about what costs most, and the remedy."""
    replayed = report.replayed_step if report.clock != "real" else None
    step_ns = max(1, replayed.ns if replayed else report.whole_ns)
    for finding in stable(report.findings):
        saves, counted = gain_of(finding), counted_gain(finding)
        if saves is None or counted is None or other_cost(finding) or helps(finding) is False:
            continue
        measurement = measured(finding)
        if measurement and measurement.of_plan:
            continue
        is_measured = bool(measurement and measurement.helps)
        share = saves.ns / step_ns
        # A trial of an earlier, longer step can say more than this step takes.
        if counted < _LEAST * step_ns or share > 1:
            continue
        way = measurement.way if measurement else ""
        changes = finding.changes_training or bool(measurement and measurement.changes_training)
        what = way if is_measured and way else _in_few_words(finding.remedy)
        if not what:
            continue
        weight = counted * (1.0 if is_measured else _PREDICTED)
        remedy = FirstRemedy(what, saves, share, finding.rule, is_measured, changes)
        yield weight, _is_about(finding, subject), remedy
    for remedy in remedies_of_parts(report):
        if remedy.share >= _LEAST:
            yield float(remedy.saves.ns), False, remedy


def _is_about(finding: Finding, subject: Answer) -> bool:
    """Whether all places of a finding are where a step takes most, or its rule says why."""
    if finding.rule == subject.rule:
        return True
    kind = numberless(subject.path), subject.class_name
    return all((numberless(place.path), place.class_name) == kind for place in finding.places)


def _in_few_words(remedy: str) -> str:
    return _END.split(remedy, maxsplit=1)[0].strip()


def remedy_sentence(report: Report) -> list[Part]:
    """What to do first, and what a step saves with it; nothing where no remedy has a price."""
    remedy = report.answer.remedy
    if remedy is None:
        return []
    saves = remedy.saves
    least, best = "at least " * saves.at_least, " at best" * saves.at_best
    basis = "measured" if remedy.measured else "predicted"
    changes = ", but it changes what is trained" * remedy.changes_training
    return said(
        f"First: {{}}: {least}{{}} less{best}, {{}} of the {report.per} ({basis}{changes}).",
        ("text", remedy.what),
        duration(saves.ns),
        percent(remedy.share),
    )
