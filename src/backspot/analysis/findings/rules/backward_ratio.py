"""A module with a backward that takes many times its forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import accumulating
from backspot.analysis.findings.registry import fallback_rule, finding
from backspot.analysis.timeline import NOTHING, take
from backspot.formatting import duration
from backspot.results.findings import Finding
from backspot.trace.events import Ints

__all__ = ["find"]

_HIGH = 10.0
"""A backward computes two gradients where its forward computes one value, so it usually takes twice
as long. Fused attention takes seven to twelve times its forward, copies included, and is skipped.
"""
_LEAST = 0.03  # of the step, for each module
_LEAST_ON_HOST = 500_000
"""Nanoseconds of backward in the median step, without a GPU. On a busy machine, the host loses the
processor for longer than a short forward takes, mostly to the backward, which takes longer."""


@fallback_rule("backward-ratio")
def find(evidence: Evidence, found: Sequence[Finding]) -> Finding | None:
    """Find modules with nodes that take far more device time than the module's own forward.

    Args:
        evidence: the trace.
        found: what the other rules found. A ratio says that something is odd, but not what: a
            module is skipped when another finding explains half of its backward.
    """
    costs, say, owner = evidence.costs, evidence.wording, evidence.ownership.owner
    forward, backward, wall = _times(evidence)
    holds = (backward > _HIGH * forward) & (forward > 0) & (wall > _LEAST * costs.step_ns)
    if not evidence.report.has_gpu:
        holds &= backward > _LEAST_ON_HOST
    often = holds.sum(axis=1)
    odd = 2 * often > holds.shape[1]
    fused = evidence.nodes_named(lambda name: "ScaledDotProduct" in name)
    odd[owner[fused]] = False
    spent = wall.sum(axis=1)
    explained: dict[str, int] = {}
    for other in found:
        for place in other.places:
            explained[place.path] = explained.get(place.path, 0) + place.wall_ns
    for module in np.flatnonzero(odd).tolist():
        path = costs.places(np.array([module]), np.array([0]))[0].path
        odd[module] = 2 * explained.get(path, 0) < spent[module]
    if not odd.any():
        return None
    worst = int(np.argmax(np.where(odd, spent, 0)))
    nodes = odd[owner] & evidence.in_pass & evidence.spans.is_node
    heaviest = costs.top_nodes(nodes & (owner == worst))
    label = costs.places(np.array([worst]), np.array([0]))[0].label
    ratio = backward[worst] / np.maximum(forward[worst], 1) * (forward[worst] > 0)
    median = int(np.argsort(ratio, kind="stable")[(len(ratio) - 1) // 2])
    steps = evidence.report.steps
    return finding(
        costs.places(np.flatnonzero(odd), spent[odd], np.full(int(odd.sum()), steps)),
        title="A backward takes many times its forward",
        seen=(
            f"{label}: the forward takes {duration(forward[worst, median])} and the backward "
            f"{duration(backward[worst, median])}, which is {ratio[median]:.0f} times as long; "
            f"twice is usual. The backward takes more than {_HIGH:.0f} times its forward "
            f"{say.in_steps(int(often[worst]))}. Most of it is {', '.join(heaviest)}."
        ),
        remedy=(
            "Rewrite the operation behind these nodes: sums over expanded dimensions, atomic "
            "additions and custom Functions often have a slow backward. Or compile the module, or "
            "write its backward as a torch.autograd.Function."
        ),
        link="https://docs.pytorch.org/docs/stable/notes/extending.html",
        nodes=costs.top_nodes(nodes),
    )


def _times(evidence: Evidence) -> tuple[Ints, Ints, Ints]:
    """Return each owner's own time in forward and in backward, and its backward's clock time.

    All three have one row an owner and one column a step. The first two are device time, or host
    time where the trace has no device.
    """
    spans, owner, costs = evidence.spans, evidence.ownership.owner, evidence.costs
    owners = evidence.ownership.owners
    # Adding a gradient to its parameter is not part of computing it.
    computes = np.where(spans.is_node & ~accumulating(evidence), owner, NOTHING)
    of_nodes = np.where(evidence.in_pass, computes, NOTHING)
    wall = costs.spans_by_step(of_nodes, len(owners))
    if evidence.report.has_gpu:
        span = evidence.work.span
        calls = np.where(evidence.in_pass, NOTHING, owner)
        forward = costs.device_by_step(take(calls, span), len(owners))
        backward = costs.device_by_step(take(computes, span), len(owners))
    else:
        calls = np.where((spans.module >= 0) & ~evidence.in_pass, owner, NOTHING)
        forward, backward = costs.spans_by_step(calls, len(owners)), wall
    forward[owners.is_special] = 0
    return forward, backward, wall
