"""Why a job is slow, and what to do about it.

In comes ``Evidence``: the summaries of all ranks, and what was made of them. Out come
``JobFinding``s, the most expensive first.

- ``evidence.py``: ``Evidence``, what a rule is a function of.
- ``registry.py``: the decorators ``rule`` and ``fallback_rule``, and the list of the rules.
- ``rules/``: one rule a file. The chapter on how to write one is in ``rules/__init__.py``.
"""

from __future__ import annotations

from dataclasses import replace

from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import all_rules
from backspot.results.job import JobFinding

__all__ = ["Evidence", "all_rules", "find_all"]


def find_all(evidence: Evidence) -> tuple[JobFinding, ...]:
    """Return what all rules find, the most expensive first."""
    found: list[JobFinding] = []
    for rule in all_rules():
        found += [replace(one, rule=rule.name) for one in rule.find(evidence, tuple(found))]
    return tuple(
        sorted(
            found, key=lambda one: (-one.cost_ns, -1 if one.rank is None else one.rank, one.path)
        )
    )
