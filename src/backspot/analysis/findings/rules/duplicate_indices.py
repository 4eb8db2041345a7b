"""Index backward in which many gradients meet in few rows, one after the other."""

from __future__ import annotations

import re

import numpy as np

from backspot.analysis.findings.evidence import Evidence, Mask, once
from backspot.analysis.findings.registry import rule
from backspot.analysis.timeline import grouped
from backspot.results.findings import Finding

__all__ = ["crowded", "find", "sorting_nodes"]

_INDEXING = re.compile(r"(Gather|Scatter|Index|Take|UnsafeIndex|UnsafeMaskedIndex)\w*Backward\d*$")
_ADDS = re.compile(r"indexing_backward_kernel")
_SORT = re.compile(r"sort", re.IGNORECASE)
_CROWDED = 12
"""A backward without duplicates moves about three times what its forward moved; where it takes this
many times as long, rows wait for each other."""


@rule("duplicate-indices")
def find(evidence: Evidence) -> Finding | None:
    """Find index nodes that take far longer than the indexing that they undo."""
    nodes = crowded(evidence)
    if not nodes.any():
        return None
    work = evidence.work_of(nodes)
    forward = forward_of(evidence)[nodes].sum()
    backward = (evidence.work.end - evidence.work.start)[work].sum()
    names = ", ".join(evidence.top_nodes(nodes))
    return evidence.finding(
        title="Many gradients are added into few rows",
        seen=(
            f"{names}: {evidence.ms(int(backward))} of GPU time, "
            f"{backward / max(int(forward), 1):.0f} times as long as its forward "
            f"({evidence.ms(int(forward))}): equal indices are added one after the other."
        ),
        remedy=(
            "Look up a small table by a product with one-hot rows (a matmul adds in parallel), or "
            "sum what belongs to one row before the look-up; torch.nn.functional.embedding has a "
            "faster backward than x[index]."
        ),
        link="https://docs.pytorch.org/docs/stable/generated/torch.Tensor.index_put_.html",
        places=evidence.places_of_spans(nodes),
        nodes=evidence.top_nodes(nodes),
        kernels=evidence.top_kernels(work),
    )


@once
def crowded(evidence: Evidence) -> Mask:
    """Whether each span is an index node that duplicates slow down."""
    # Gather's own trouble is an index that was expanded: that has no duplicates.
    index = evidence.nodes_named(lambda name: _INDEXING.match(name) is not None) & ~(
        evidence.nodes_named(lambda name: name.startswith(("Gather", "Scatter")))
    )
    adds = evidence.work_named(lambda name: _ADDS.search(name) is not None)
    length = np.where(adds, evidence.work.end - evidence.work.start, 0)
    spent = np.zeros(len(index), np.int64)
    mine = evidence.work.span >= 0
    np.add.at(spent, evidence.work.span[mine], length[mine])
    forward = forward_of(evidence)
    return index & (forward > 0) & (spent > _CROWDED * forward)


@once
def sorting_nodes(evidence: Evidence) -> Mask:
    """Whether each span is an indexing node that sorts on a device."""
    index = evidence.nodes_named(lambda name: _INDEXING.match(name) is not None)
    sorts = evidence.work_named(lambda name: _SORT.search(name) is not None)
    sorting = np.zeros(len(index), bool)
    sorting[evidence.work.span[sorts & (evidence.work.span >= 0)]] = True
    return index & sorting


@once
def forward_of(evidence: Evidence) -> np.ndarray:
    """For each node the device time that the operator took that made it; 0 where unknown."""
    events, work, operator = evidence.events, evidence.work, evidence.ownership.join.operator
    made = np.flatnonzero(operator >= 0)
    spent = np.zeros(len(operator), np.int64)
    length = work.end - work.start
    made_by = dict(grouped(events.thread[operator[made]]))
    for thread, mine in grouped(work.thread):
        if thread < 0:
            continue
        mine = mine[work.launch[mine] >= 0]
        mine = mine[np.argsort(work.launch[mine], kind="stable")]
        total = np.append(0, np.cumsum(length[mine]))
        nodes = made[made_by.get(thread, mine[:0])]
        low = np.searchsorted(work.launch[mine], events.start[operator[nodes]], side="left")
        high = np.searchsorted(work.launch[mine], events.end[operator[nodes]], side="left")
        spent[nodes] = total[high] - total[low]
    return spent
