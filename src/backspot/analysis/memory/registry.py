"""The rules about memory, and how ``rules.py`` registers them."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

from backspot.analysis.memory.evidence import MemoryEvidence
from backspot.registry import Registry, Rule
from backspot.results.findings import Finding, in_order

MemoryRule: TypeAlias = Rule[MemoryEvidence, Finding, Finding | None]

_rules: Registry[MemoryEvidence, Finding, Finding | None] = Registry("backspot.analysis.memory")
memory_rule = partial(_rules.rule, needs=("memory",))


def rules_about_memory() -> tuple[MemoryRule, ...]:
    """Return every rule about memory, sorted by name."""
    return _rules.rules


def find_in_memory(evidence: MemoryEvidence) -> tuple[Finding, ...]:
    """Ask every rule about memory; return the findings, those that hold the most first."""
    findings = [
        rule.named(finding)
        for rule in rules_about_memory()
        if (finding := rule.find(evidence, ())) is not None
    ]
    return in_order(findings, None)
