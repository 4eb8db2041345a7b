"""Gradients that are computed and that no optimizer uses."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.ownership import Special
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import accumulating
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import NOTHING, distinct
from backspot.formatting import counted
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Mask
from backspot.trace.labels import Kind

__all__ = ["find"]


@rule("unused-gradient")
def find(evidence: Evidence) -> Finding | None:
    """Find the nodes that serve only parameters that the live half saw in no optimizer.

    The engine runs from the last layer to the first. What it runs after the last used gradient is
    useless. Before that, a node of such a module also passes its gradient on, so half of the node
    counts.
    """
    costs, spans, owner = evidence.costs, evidence.spans, evidence.ownership.owner
    unused = _unused(evidence)
    if not unused.any():
        return None
    accumulate = accumulating(evidence)
    feeder = evidence.ownership.join.feeder
    whole, half = np.zeros(len(owner), bool), np.zeros(len(owner), bool)
    for run in range(len(evidence.report.passes)):
        mine = evidence.ownership.passes.of_span == run
        used = mine & accumulate & ~unused[owner]
        wasted = mine & accumulate & unused[owner]
        last = spans.start[used].max(initial=-1)
        # If no unused gradient comes last, the engine goes on for the gradient of an input.
        behind = last >= 0 and spans.start[wasted].max(initial=-1) > last
        needless = mine & (spans.start > last) if behind else np.zeros(len(mine), bool)
        whole |= needless | wasted
        fed = feeder[wasted & ~needless]
        half[fed[fed >= 0]] = True
    half &= ~whole
    owners = len(evidence.ownership.owners)
    by_step, halved = (
        costs.spans_by_step(np.where(mask, np.maximum(owner, Special.OUTSIDE), NOTHING), owners)
        for mask in (whole, half)
    )
    cost = costs.places_by_step(by_step + halved // 2, owner[whole | half])
    return finding(
        cost,
        title="Gradients are computed that no optimizer uses",
        seen=(
            f"In {counted(len(cost.places), 'place')} backward computes gradients of parameters "
            f"that no optimizer updates: about {evidence.wording.ms(cost.wall_ns)} of needless "
            "work."
        ),
        remedy=(
            "Call parameter.requires_grad_(False) before the forward, not after it, or run the "
            "frozen part under torch.no_grad(). Frozen layers at the start of the model then need "
            "no backward at all."
        ),
        link=(
            "https://docs.pytorch.org/docs/stable/notes/autograd.html"
            "#locally-disabling-gradient-computation"
        ),
        nodes=costs.top_nodes(whole | half),
    )


def _unused(evidence: Evidence) -> Mask:
    """Whether the last optimizer step found each owner's parameters in no optimizer."""
    events = evidence.events
    wanted = np.array(
        [label is not None and label.kind is Kind.UNUSED for label in events.labels], bool
    )
    index = events.chosen(wanted, Category.OPERATOR, Category.ANNOTATION)
    steps = events.named(Category.ANNOTATION, names.OPTIMIZER_STEP)
    if len(steps):
        # Before each optimizer has taken a step, its parameters seem to belong to none.
        index = index[events.start[index] >= events.start[steps].max()]
    found = {
        (label.path, label.class_name)
        for name in distinct(events.name[index])
        if (label := events.labels[name]) is not None
    }
    owners = evidence.ownership.owners
    return owners.mask(lambda module: (module.path, module.class_name) in found)
