"""The rules over ranks, and how the modules of ``rules`` register theirs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from backspot.job.findings.evidence import Evidence
from backspot.registry import Registry
from backspot.registry import Rule as AnyRule
from backspot.results.job import JobFinding

__all__ = ["Rule", "all_rules", "fallback_rule", "rule"]

Rule: TypeAlias = AnyRule[Evidence, JobFinding, Iterable[JobFinding]]

_rules: Registry[Evidence, JobFinding, Iterable[JobFinding]] = Registry(
    "backspot.job.findings.rules"
)
rule = _rules.rule
fallback_rule = _rules.fallback_rule


def all_rules() -> tuple[Rule, ...]:
    """Return every rule, sorted by name, with the fallback rules last."""
    return _rules.rules
