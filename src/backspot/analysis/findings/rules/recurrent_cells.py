"""A recurrent layer that Python calls for each time step."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import Category
from backspot.trace.events import Ints

__all__ = ["find"]

_LEAST = 0.1
_MANY = 8
"""Calls in a step: with fewer, a whole layer saves little."""


@rule("recurrent-cells", devices=("cpu",))
def find(evidence: Evidence) -> Finding | None:
    """Find modules that call ``aten::lstm_cell`` many times in each step.

    GRU and plain cells are left out, because their whole layers run the same operators. The same
    holds for all of them in fp64.
    """
    spans, costs, say = evidence.spans, evidence.costs, evidence.wording
    cells = evidence.events.named(Category.OPERATOR, "aten::lstm_cell")
    cells = cells[~_double(evidence, cells)]
    span = spans.of(evidence.events, cells)
    owner = evidence.ownership.owner[span[(span >= 0) & ~evidence.in_pass[span]]]
    calls = np.bincount(owner, minlength=len(evidence.ownership.owners))
    looped = calls >= _MANY * evidence.report.steps
    mine = looped[evidence.ownership.owner]
    if not costs.holds_in_most_steps(costs.of_spans_by_step(mine), _LEAST):
        return None
    return finding(
        costs.places_of_spans(mine),
        title="A loop calls an LSTM cell for each time step",
        seen=(
            f"{say.per_step(int(calls[looped].sum()), 'call')} take "
            f"{say.ms(costs.of_spans(mine))}, forward and backward."
        ),
        remedy=(
            "If no input depends on an earlier output, call torch.nn.LSTM once for the whole "
            "sequence. In fp32 it computes the products of all time steps together and runs as a "
            "single operator on a CPU; in fp64 it takes as long as the loop."
        ),
        link="https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html",
        nodes=costs.top_nodes(mine),
    )


def _double(evidence: Evidence, index: Ints) -> np.ndarray:
    """Whether each of these operators is known to compute in fp64."""
    signatures = evidence.events.signatures
    double = np.array(["double" in one.types for one in signatures] + [False], bool)
    found: np.ndarray = double[evidence.events.signature[index]]
    return found
