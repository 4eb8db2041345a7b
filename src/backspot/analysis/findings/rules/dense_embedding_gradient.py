"""The gradient of a lookup table as large as the table itself."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence, Mask
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding
from backspot.trace import Category

__all__ = ["find"]

_LEAST = 0.04
"""Each language model has one: below this it is as it should be."""


@rule("dense-embedding-gradient")
def find(evidence: Evidence) -> Finding | None:
    """Find embedding nodes, which fill a gradient for every row of the table."""
    nodes = evidence.nodes_named(lambda name: name.startswith("Embedding") and "Sparse" not in name)
    nodes &= ~_sparse(evidence)
    if int(evidence.span_ns[nodes].sum()) < max(1, _LEAST * evidence.step_ns):
        return None
    return evidence.finding(
        title="Embedding backward writes a gradient for the whole table",
        seen=(
            f"{', '.join(evidence.top_nodes(nodes))}: "
            f"{evidence.ms(int(evidence.span_ns[nodes].sum()))} in "
            f"{evidence.per_step(int(nodes.sum()), 'node')}. Each clears a gradient of the table's "
            "size and adds to it row by row."
        ),
        remedy=(
            "For a large table of which a batch touches few rows, Embedding(..., sparse=True) with "
            "torch.optim.SparseAdam. Where a few tokens fill the batch, mark padding by "
            "padding_idx, or look up each distinct token once."
        ),
        link="https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html",
        places=evidence.places_of_spans(nodes),
        nodes=evidence.top_nodes(nodes),
        kernels=evidence.top_kernels(evidence.work_of(nodes)),
    )


def _sparse(evidence: Evidence) -> Mask:
    """Whether each span is of a table with ``sparse=True``: its node bears no other name."""
    sparse = ("aten::embedding_sparse_backward", "aten::_embedding_bag_sparse_backward")
    return evidence.spans_around(evidence.events.named(Category.OPERATOR, *sparse))
