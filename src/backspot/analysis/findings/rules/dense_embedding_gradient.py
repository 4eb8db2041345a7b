"""The gradient of a lookup table that is as large as the table itself."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import Category
from backspot.trace.events import Mask

__all__ = ["find"]

_LEAST = 0.04
"""Every language model has such a gradient; below this share of the step it is as usual."""


@rule("dense-embedding-gradient")
def find(evidence: Evidence) -> Finding | None:
    """Find embedding nodes, which fill a gradient for every row of the table."""
    costs, say = evidence.costs, evidence.wording
    nodes = evidence.nodes_named(lambda name: name.startswith("Embedding") and "Sparse" not in name)
    nodes &= ~_sparse(evidence)
    cost = costs.of_spans(nodes)
    if not costs.holds_in_most_steps(costs.of_spans_by_step(nodes), _LEAST):
        return None
    names = costs.top_nodes(nodes)
    return finding(
        costs.places_of_spans(nodes),
        title="Embedding backward writes a gradient for the whole table",
        seen=(
            f"{', '.join(names)}: {say.ms(cost)} in {say.per_step(int(nodes.sum()), 'node')}. "
            "Each node fills a gradient of the table's size with zeros, and then adds to the rows "
            "that the batch used."
        ),
        remedy=(
            "If each batch uses few rows of a large table, use Embedding(..., sparse=True) with "
            "torch.optim.SparseAdam. If a few tokens fill the batch, pass padding_idx for padding, "
            "or look up each distinct token once."
        ),
        link="https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html",
        nodes=names,
        kernels=costs.top_kernels(evidence.work_of(nodes)),
    )


def _sparse(evidence: Evidence) -> Mask:
    """Whether each span is the node of a table with ``sparse=True``, which has the same name."""
    sparse = ("aten::embedding_sparse_backward", "aten::_embedding_bag_sparse_backward")
    return evidence.spans_around(evidence.events.named(Category.OPERATOR, *sparse))
