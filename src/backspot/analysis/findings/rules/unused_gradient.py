"""Gradients that are computed and that no optimizer ever uses."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.ownership import SPECIAL
from backspot.analysis.findings.evidence import Evidence, Mask
from backspot.analysis.findings.registry import rule
from backspot.analysis.timeline import distinct, merged
from backspot.formatting import counted
from backspot.results.findings import Finding
from backspot.trace import Category
from backspot.trace.labels import Kind, parse_label

__all__ = ["find"]


@rule("unused-gradient")
def find(evidence: Evidence) -> Finding | None:
    """Find the nodes that only serve parameters which the live half saw in no optimizer.

    The engine goes from the last layer to the first. What runs after the last gradient that is used
    is done for nothing; before that, a module's node also hands its gradient on, so half of it is
    counted.
    """
    spans, owner = evidence.spans, evidence.ownership.owner
    unused = _unused(evidence)
    if not unused.any():
        return None
    accumulate = evidence.accumulates
    feeder = evidence.ownership.join.feeder
    cost = np.zeros(len(owner), np.int64)
    for run in range(len(evidence.report.passes)):
        mine = evidence.ownership.passes.of_span == run
        used = mine & accumulate & ~unused[owner]
        wasted = mine & accumulate & unused[owner]
        last = spans.start[used].max(initial=-1)
        # Without an unused gradient at its end the engine goes on for the sake of an input's.
        behind = last >= 0 and spans.start[wasted].max(initial=-1) > last
        needless = mine & (spans.start > last) if behind else np.zeros(len(mine), bool)
        cost[needless] = evidence.span_ns[needless]
        wasted &= ~needless
        cost[wasted] = evidence.span_ns[wasted]
        fed = feeder[wasted]
        fed = merged(fed[fed >= 0])
        fed = fed[~needless[fed]]
        cost[fed] = evidence.span_ns[fed] // 2
    places = evidence.places(owner[cost > 0], cost[cost > 0])
    return evidence.finding(
        title="Gradients are computed that no optimizer uses",
        seen=(
            f"In {counted(len(places), 'place')} backward works for parameters that no optimizer "
            f"then updates: about {evidence.ms(int(cost.sum()))} of it for nothing."
        ),
        remedy=(
            "parameter.requires_grad_(False) before the forward, not after it; a frozen prefix "
            "then needs no backward at all. Or run it under torch.no_grad()."
        ),
        link=(
            "https://docs.pytorch.org/docs/stable/notes/autograd.html"
            "#locally-disabling-gradient-computation"
        ),
        places=places,
        nodes=evidence.top_nodes(cost > 0),
    )


def _unused(evidence: Evidence) -> Mask:
    """For each owner whether the last optimizer step found it in no optimizer."""
    events, modules = evidence.events, evidence.spans.modules
    labels = [parse_label(name) for name in events.names]
    wanted = np.array([label is not None and label.kind is Kind.UNUSED for label in labels], bool)
    index = events.chosen(wanted, Category.OPERATOR, Category.ANNOTATION)
    steps = events.named(Category.ANNOTATION, "Optimizer.step#")
    if len(steps):
        # Until each optimizer has taken a step, its parameters look as if nobody had them.
        index = index[events.start[index] >= events.start[steps].max()]
    found = {
        (label.path, label.class_name)
        for name in distinct(events.name[index])
        if (label := labels[name]) is not None
    }
    named = [(module.path, module.class_name) in found for module in modules]
    return np.array([False] * len(SPECIAL) + named, bool)
