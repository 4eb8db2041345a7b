"""Adds to a report where the host waits, what it launches, and its lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backspot.analysis.host.lines import find_host_lines
from backspot.analysis.host.real_time import HostSteps, real_time
from backspot.analysis.host.waits import places_in
from backspot.analysis.recording import Options, Recording
from backspot.results.report import Report, changed, predictor_of

_PLACES = 20
"""Where the host waits, that are replayed without the wait."""


def with_host(report: Report, recording: Recording, _: Options) -> Report:
    """Add where the host waits, what it launches, and its lines in the steps that have stacks."""
    if recording.events.truncated:
        return report
    places, launches = places_in(recording)[0], recording.launches
    report = changed(report, waits=tuple(places), launches=launches)
    stacked = recording.detailed
    if not len(stacked.events.frames):
        return report
    lines = find_host_lines(
        stacked.events,
        stacked.ownership,
        stacked.sites,
        stacked.clock,
        stacked.ledger.steps,
        stacked.typical,
        stacked.activity if stacked.step_windows else None,
        real_time(
            HostSteps.of(stacked),
            HostSteps.of(recording) if stacked is not recording else None,
            report.step_ns,
        ),
    )
    return changed(report, host=lines)


def with_savings_of_waits(report: Report, recording: Recording, _: Options) -> Report:
    """Add what a step saves if the host waits nowhere, and without the longest waits alone."""
    predictor = predictor_of(report)
    if predictor is None or not report.waits:
        return report
    calls = [place.tolist() for place in places_in(recording)[1]]
    all_calls: Sequence[int] = [call for calls_of_place in calls for call in calls_of_place]
    all_saved, *alone = predictor.without_calls([all_calls, *calls[:_PLACES]])
    waits = [replace(wait, saves=saves) for wait, saves in zip(report.waits, alone, strict=False)]
    return changed(report, waits=(*waits, *report.waits[len(waits) :]), without_waits=all_saved)
