"""Why a job is slow, and what to do about it.

In comes ``Evidence``: the summaries of all ranks, and what was made of them. Out come
``JobFinding``s, the most expensive first.

- ``evidence.py``: ``Evidence``, what a rule is a function of.
- ``rules.py``: the rules, under the decorators ``rule`` and ``fallback_rule`` of this file. Its
  docstring is the chapter on how to write one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from backspot.job.findings.evidence import Evidence
from backspot.registry import Registry
from backspot.registry import Rule as AnyRule
from backspot.results.job import JobFinding

__all__ = ["Evidence", "Rule", "all_rules", "fallback_rule", "find_all", "rule"]

Rule: TypeAlias = AnyRule[Evidence, JobFinding, Iterable[JobFinding]]

_rules: Registry[Evidence, JobFinding, Iterable[JobFinding]] = Registry("backspot.job.findings")
rule = _rules.rule
fallback_rule = _rules.fallback_rule


def all_rules() -> tuple[Rule, ...]:
    """Return every rule, sorted by name, with the fallback rules last."""
    return _rules.rules


def find_all(evidence: Evidence) -> tuple[JobFinding, ...]:
    """Return what all rules find, the most expensive first."""
    found: list[JobFinding] = []
    for one in all_rules():
        found += [replace(each, rule=one.name) for each in one.find(evidence, tuple(found))]
    return tuple(
        sorted(
            found, key=lambda one: (-one.cost_ns, -1 if one.rank is None else one.rank, one.path)
        )
    )
