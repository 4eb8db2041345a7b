"""Gather, scatter and index backward that sort their indices before they add."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import crowded, sorting
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import names
from backspot.trace.events import Mask

__all__ = ["find"]

_GATHER = (
    "An index that was expanded over the features sorts each element by itself: index whole rows "
    "instead, x[torch.arange(len(x))[:, None], keep]. Without "
    "torch.use_deterministic_algorithms(True) nothing is sorted."
)
_SELECT = (
    "Without torch.use_deterministic_algorithms(True) nothing is sorted here. A slice, or "
    "multiplying by a mask, needs no index at all."
)
_INDEX = (
    "If one dimension is indexed, use x.index_select(dim, index), which adds without a sort (in an "
    "order that varies from run to run). Slices, multiplying by a mask and torch.where need no "
    "index."
)


@rule("sorted-indexing", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find index nodes with kernels that sort.

    A floating-point sum over equal indices is reproducible only in a fixed order, so PyTorch sorts
    the indices first: always where the forward was ``x[index]``, and for ``gather`` and ``scatter``
    with deterministic algorithms.
    """
    costs, say = evidence.costs, evidence.wording
    nodes = sorting(evidence) & ~crowded(evidence)
    if not nodes.any():
        return None
    work = evidence.work_of(nodes)
    sorts = work & evidence.work_named(names.is_sort)
    return finding(
        costs.places_of_spans(nodes),
        title="Indexing backward sorts its indices",
        seen=(
            f"{', '.join(costs.top_nodes(nodes))}: {say.ms(costs.of_spans(nodes))} in "
            f"{say.per_step(int(nodes.sum()), 'node')}, with "
            f"{say.per_step(int(sorts.sum()), 'kernel')} to sort indices "
            f"({say.ms(costs.of_device(sorts))}) before anything is added."
        ),
        remedy=_remedy(evidence, nodes),
        link="https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html",
        nodes=costs.top_nodes(nodes),
        kernels=costs.top_kernels(work),
    )


def _remedy(evidence: Evidence, nodes: Mask) -> str:
    """Return the remedy for the kind of node that takes most of the time."""

    def spent(*kinds: str) -> int:
        mine = evidence.nodes_named(lambda name: name.startswith(kinds)) & nodes
        return evidence.costs.of_spans(mine)

    gathered, selected = spent("Gather", "Scatter"), spent("IndexSelect")
    rest = evidence.costs.of_spans(nodes) - gathered - selected
    return max((rest, _INDEX), (gathered, _GATHER), (selected, _SELECT))[1]
