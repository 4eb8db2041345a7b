"""What to know before trusting a comparison of two reports."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from backspot.results.report import Report

if TYPE_CHECKING:
    from backspot.comparison.changes import Change

__all__ = ["alike", "cautions", "named"]

# How many modules, and changed by which part, make a change of everything.
_MANY = 8
_DRIFT = 0.05


def named(report: Report) -> bool:
    """Whether the trace told of modules."""
    return any(row.is_module for row in report.modules)


def alike(changes: Iterable[Change]) -> Iterable[str]:
    """What to think where not this or that module changed, but everything."""
    ratios = [
        change.after_ms / change.before_ms
        for change in changes
        if change.kind == "module" and change.before_ms and change.after_ms
    ]
    if len(ratios) < _MANY:
        return
    middle = median(ratios)
    if max(middle, 1 / middle) > 1 + _DRIFT:
        yield (
            f"Most modules changed alike, half of them by {(middle - 1) * 100:+.0f}% or more: a "
            "change of everything (batch, precision), or another load or clock of the machine."
        )


def cautions(before: Report, after: Report, by: str) -> Iterable[str]:
    """What to know before trusting the numbers, a sentence each."""
    for name, report in (("Before", before), ("After", after)):
        for warning in report.warnings:
            if by == "module" or "names no modules" not in warning:
                yield f"{name}: {warning}"
    if by == "node":
        without = [name for name, r in (("before", before), ("after", after)) if not named(r)]
        where = "Neither recording names" if len(without) == 2 else f"The one {without[0]} names no"
        yield (
            f"{where} modules: autograd nodes are compared by name, each without a claim, because "
            "a report does not hold their times by step."
        )
    if min(before.steps, after.steps) < 2:
        yield "One step has no spread: record several on both sides to tell a change from noise."
    elif min(before.steps, after.steps) < 4:
        yield "Of two or three steps only large changes can be told from noise: profile(steps=10)."
    if before.step_unit != after.step_unit:
        yield (
            f"The steps differ in kind: before, a {before.step_unit}; after, a {after.step_unit}. "
            "Times per step may not compare."
        )
    if before.has_gpu != after.has_gpu:
        yield f"Only the recording {'before' if before.has_gpu else 'after'} holds GPU work."
