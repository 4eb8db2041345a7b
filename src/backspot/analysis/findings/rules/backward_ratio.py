"""A module whose backward takes many times its forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backspot.analysis.attribution.ownership import SPECIAL
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import fallback_rule
from backspot.results.findings import Finding

__all__ = ["find"]

_HIGH = 10.0
"""A backward computes two gradients where its forward computed one value: usually twice its time.
Fused attention takes seven to twelve times its own forward, copies included, and is left out."""
_LEAST = 0.03  # of the step, a module


@fallback_rule("backward-ratio")
def find(evidence: Evidence, others: Sequence[Finding]) -> Finding | None:
    """Find modules whose own nodes take far more device time than their own forward.

    Args:
        evidence: the trace.
        others: what other rules found; a module that they explain is left out.
    """
    forward, backward, wall = _times(evidence)
    odd = (backward > _HIGH * forward) & (forward > 0) & (wall > _LEAST * evidence.step_ns)
    fused = evidence.nodes_named(lambda name: "ScaledDotProduct" in name)
    odd[evidence.ownership.owner[fused]] = False
    explained: dict[str, int] = {}
    for finding in others:
        for place in finding.places:
            explained[place.path] = explained.get(place.path, 0) + place.wall_ns
    for owner in np.flatnonzero(odd).tolist():
        path = evidence.places(np.array([owner]), np.array([0]))[0].path
        odd[owner] = 2 * explained.get(path, 0) < wall[owner]
    if not odd.any():
        return None
    worst = int(np.argmax(np.where(odd, wall, 0)))
    nodes = odd[evidence.ownership.owner] & evidence.in_pass & evidence.spans.is_node
    heaviest = evidence.top_nodes(nodes & (evidence.ownership.owner == worst))
    steps = evidence.report.steps
    path = evidence.places(np.array([worst]), np.array([0]))[0].label
    return evidence.finding(
        title="A backward takes many times its forward",
        seen=(
            f"{path}: forward {evidence.ms(int(forward[worst]))}, backward "
            f"{evidence.ms(int(backward[worst]))}, {backward[worst] / forward[worst]:.0f} times as "
            f"long, where twice is usual; mostly {', '.join(heaviest)}."
        ),
        remedy=(
            "Look at the nodes: an operation with a slow backward can often be written otherwise "
            "(sums over expanded dimensions, atomics, a custom Function); compile the module, or "
            "give it a backward of its own."
        ),
        link="https://docs.pytorch.org/docs/stable/notes/extending.html",
        places=evidence.places(np.flatnonzero(odd), wall[odd], np.full(int(odd.sum()), steps)),
        nodes=evidence.top_nodes(nodes),
    )


def _times(evidence: Evidence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each module's own time in forward and in backward, and its backward's clock time.

    The first two are the devices'; without any, the host's.
    """
    spans, work, owner = evidence.spans, evidence.work, evidence.ownership.owner
    width = len(SPECIAL) + len(spans.modules)
    forward, backward, wall = (np.zeros(width, np.int64) for _ in range(3))
    mine = work.span >= 0
    length = (work.end - work.start)[mine]
    # Handing gradients over is no part of computing them.
    computes = spans.is_node & ~evidence.accumulates
    of_node = computes[work.span[mine]]
    of_pass = evidence.in_pass[work.span[mine]]
    payer = owner[work.span[mine]]
    np.add.at(forward, payer[~of_pass], length[~of_pass])
    np.add.at(backward, payer[of_node], length[of_node])
    nodes = evidence.in_pass & computes
    np.add.at(wall, owner[nodes], evidence.span_ns[nodes])
    if not evidence.report.has_gpu:
        calls = (spans.module >= 0) & ~evidence.in_pass
        np.add.at(forward, owner[calls], evidence.host_ns[calls])
        backward = wall
    forward[: len(SPECIAL)] = 0
    return forward, backward, wall
