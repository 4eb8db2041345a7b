"""Adds to a report what is in memory."""

from __future__ import annotations

from dataclasses import replace

from backspot.analysis.findings import FOUND, NOTHING_FOUND, weighed
from backspot.analysis.memory.evidence import MemoryEvidence
from backspot.analysis.memory.peaks import find_memory
from backspot.analysis.memory.registry import find_in_memory, rules_about_memory
from backspot.analysis.recording import Options, Recording
from backspot.results.report import Report, changed


def with_memory(report: Report, recording: Recording, _: Options) -> Report:
    """Add what is in memory, of each row and each device, and what holds too much of it."""
    detailed = recording.detailed
    memory = find_memory(detailed.events, detailed.ownership)
    if memory is None:
        lacks = {rule.name: f"needs {rule.needs[0]}" for rule in rules_about_memory()}
        return changed(report, rules=report.rules | lacks)
    named = detailed.ownership.owners.named
    memory_of = {named(owner): of_owner for owner, of_owner in enumerate(memory.of_owner)}
    rows = tuple(
        replace(row, memory=memory_of.get((row.path, row.class_name))) for row in report.modules
    )
    # What is asked for is recorded in steps of their own.
    is_asked = recording.detail is not None
    report = changed(report, modules=rows, memory=memory.devices, memory_asked=is_asked)
    if detailed.events.truncated:
        return report
    memory_findings = find_in_memory(MemoryEvidence(detailed.events, detailed.ownership, memory))
    states = dict.fromkeys((rule.name for rule in rules_about_memory()), NOTHING_FOUND)
    states |= {finding.rule: FOUND for finding in memory_findings}
    return changed(
        report,
        findings=weighed((*report.findings, *memory_findings), report.replayed_step),
        rules=report.rules | states,
    )
