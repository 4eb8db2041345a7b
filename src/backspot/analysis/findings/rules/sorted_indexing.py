"""Gather, scatter and index backward that sort their indices before they add."""

from __future__ import annotations

import re

from backspot.analysis.findings.evidence import Evidence, Mask
from backspot.analysis.findings.registry import rule
from backspot.analysis.findings.rules import duplicate_indices
from backspot.results.findings import Finding

__all__ = ["find"]

_SORT = re.compile(r"sort", re.IGNORECASE)


@rule("sorted-indexing")
def find(evidence: Evidence) -> Finding | None:
    """Find indexing nodes whose kernels sort.

    A sum over equal indices comes out the same each time only if its order is fixed, so PyTorch
    sorts the indices first: always where the forward was ``x[index]``, and for ``gather`` and
    ``scatter`` where deterministic algorithms are asked for.
    """
    nodes = duplicate_indices.sorting_nodes(evidence) & ~duplicate_indices.crowded(evidence)
    if not nodes.any():
        return None
    return evidence.finding(
        title="Indexing backward sorts its indices",
        seen=_seen(evidence, nodes),
        remedy=_remedy(evidence, nodes),
        link="https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html",
        places=evidence.places_of_spans(nodes),
        nodes=evidence.top_nodes(nodes),
        kernels=evidence.top_kernels(evidence.work_of(nodes)),
    )


_GATHER = (
    "An index that was expanded over the features sorts each element by itself: index whole rows "
    "instead, x[torch.arange(len(x))[:, None], keep]. Without "
    "torch.use_deterministic_algorithms(True) nothing is sorted."
)
_SELECT = (
    "Without torch.use_deterministic_algorithms(True) nothing is sorted here; a slice, or a mask "
    "by multiplication, needs no index at all."
)
_INDEX = (
    "Where one dimension is indexed, x.index_select(dim, index) adds without a sort (in an order "
    "that varies from run to run); slices, masks by multiplication and torch.where need no index."
)


def _remedy(evidence: Evidence, nodes: Mask) -> str:
    """What to do about the kind of node that takes most of the time."""

    def spent(*kinds: str) -> int:
        mine = evidence.nodes_named(lambda name: name.startswith(kinds)) & nodes
        return int(evidence.span_ns[mine].sum())

    gathered, selected = spent("Gather", "Scatter"), spent("IndexSelect")
    rest = int(evidence.span_ns[nodes].sum()) - gathered - selected
    return max((rest, _INDEX), (gathered, _GATHER), (selected, _SELECT))[1]


def _seen(evidence: Evidence, nodes: Mask) -> str:
    work = evidence.work_of(nodes)
    sorting = work & evidence.work_named(lambda name: _SORT.search(name) is not None)
    names = ", ".join(evidence.top_nodes(nodes))
    length = (evidence.work.end - evidence.work.start)[sorting].sum()
    return (
        f"{names}: {evidence.ms(int(evidence.span_ns[nodes].sum()))} in "
        f"{evidence.per_step(int(nodes.sum()), 'node')}, with "
        f"{evidence.per_step(int(sorting.sum()), 'kernel')} to sort indices "
        f"({evidence.ms(int(length))}) before anything is added."
    )
