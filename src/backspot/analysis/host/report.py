"""Adds to a report where the host waits, what it launches, and its lines."""

from __future__ import annotations

from backspot.analysis.accounting.phases import phases_of_work
from backspot.analysis.host import places_in, sites_in, steps_in
from backspot.analysis.host.launches import find_launches
from backspot.analysis.host.lines import find_host_lines
from backspot.analysis.host.real_time import real_time
from backspot.analysis.recording import Options, Recording
from backspot.results.report import Report, changed


def with_host(report: Report, recording: Recording, _: Options) -> Report:
    """Add where the host waits, what it launches, and its lines in the steps that have stacks."""
    if recording.events.truncated:
        return report
    report = changed(report, waits=tuple(places_in(recording)[0]))
    if report.phases and report.has_gpu:
        phase = phases_of_work(recording.events, recording.ownership, recording.activity)
        found = find_launches(recording.ledger, phase, recording.typical)
        report = changed(report, launches=found)
    stacked = recording.detailed
    if not len(stacked.events.frames):
        return report
    lines = find_host_lines(
        stacked.events,
        stacked.ownership,
        sites_in(stacked),
        stacked.clock,
        stacked.ledger.steps,
        stacked.typical,
        stacked.activity if stacked.step_windows else None,
        real_time(
            steps_in(stacked),
            steps_in(recording) if stacked is not recording else None,
            report.step_ns,
        ),
    )
    return changed(report, host=lines)
