"""A module with a backward that takes many times its forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import accumulating
from backspot.analysis.findings.registry import fallback_rule, finding
from backspot.results.findings import Finding
from backspot.trace.events import Ints

__all__ = ["find"]

_HIGH = 10.0
"""A backward computes two gradients where its forward computes one value, so it usually takes twice
as long. Fused attention takes seven to twelve times its forward, copies included, and is skipped.
"""
_LEAST = 0.03  # of the step, for each module


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
    odd = (backward > _HIGH * forward) & (forward > 0) & (wall > _LEAST * evidence.step_ns)
    fused = evidence.nodes_named(lambda name: "ScaledDotProduct" in name)
    odd[owner[fused]] = False
    explained: dict[str, int] = {}
    for other in found:
        for place in other.places:
            explained[place.path] = explained.get(place.path, 0) + place.wall_ns
    for module in np.flatnonzero(odd).tolist():
        path = costs.places(np.array([module]), np.array([0]))[0].path
        odd[module] = 2 * explained.get(path, 0) < wall[module]
    if not odd.any():
        return None
    worst = int(np.argmax(np.where(odd, wall, 0)))
    nodes = odd[owner] & evidence.in_pass & evidence.spans.is_node
    heaviest = costs.top_nodes(nodes & (owner == worst))
    label = costs.places(np.array([worst]), np.array([0]))[0].label
    steps = evidence.report.steps
    return finding(
        costs.places(np.flatnonzero(odd), wall[odd], np.full(int(odd.sum()), steps)),
        title="A backward takes many times its forward",
        seen=(
            f"{label}: the forward takes {say.ms(int(forward[worst]))}, the backward "
            f"{say.ms(int(backward[worst]))}, which is {backward[worst] / forward[worst]:.0f} "
            f"times as long; twice is usual. Most of it is {', '.join(heaviest)}."
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

    The first two are device time, or host time where the trace has no device.
    """
    spans, work, owner = evidence.spans, evidence.work, evidence.ownership.owner
    costs = evidence.costs
    owners = evidence.ownership.owners
    forward, backward, wall = (np.zeros(len(owners), np.int64) for _ in range(3))
    mine = work.span >= 0
    length = costs.device_ns[mine]
    # Adding a gradient to its parameter is not part of computing it.
    computes = spans.is_node & ~accumulating(evidence)
    of_node = computes[work.span[mine]]
    of_pass = evidence.in_pass[work.span[mine]]
    payer = evidence.ownership.work_owner[mine]
    np.add.at(forward, payer[~of_pass], length[~of_pass])
    np.add.at(backward, payer[of_node], length[of_node])
    nodes = evidence.in_pass & computes
    np.add.at(wall, owner[nodes], costs.span_ns[nodes])
    if not evidence.report.has_gpu:
        calls = (spans.module >= 0) & ~evidence.in_pass
        np.add.at(forward, owner[calls], costs.host_ns[calls])
        backward = wall
    forward[owners.is_special] = 0
    return forward, backward, wall
