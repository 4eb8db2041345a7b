"""Attention as separate products and a softmax, with the whole matrix of weights in memory."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding

__all__ = ["find"]

_PRODUCTS = ("Bmm", "Baddbmm")
_BETWEEN = (
    "Softmax",
    "NativeDropout",
    "MaskedFill",
    "Where",
    "Div",
    "Mul",
    "SafeSoftmax",
    *_PRODUCTS,
)


@rule("attention-math")
def find(evidence: Evidence) -> Finding | None:
    """Find modules with a softmax between two batched products."""
    spans, owner = evidence.spans, evidence.ownership.owner
    softmax = evidence.nodes_named(lambda n: n.startswith(("Softmax", "SafeSoftmax")))
    products = evidence.nodes_named(lambda n: n.startswith(_PRODUCTS))
    width = int(owner.max(initial=0)) + 1
    softmaxes = np.bincount(owner[softmax], minlength=width)
    enough = (softmaxes > 0) & (np.bincount(owner[products], minlength=width) >= 2 * softmaxes)
    nodes = evidence.nodes_named(lambda n: n.startswith(_BETWEEN)) & enough[owner]
    if not nodes.any():
        return None
    number = int(softmaxes[enough].sum())
    return evidence.finding(
        title="Attention is computed step by step",
        seen=(
            f"{evidence.per_step(number, 'softmax', 'softmaxes')} between batched products: "
            f"{', '.join(evidence.top_nodes(nodes))} take "
            f"{evidence.ms(int(evidence.span_ns[nodes].sum()))} of the backward, and read and "
            "write all attention weights each time."
        ),
        remedy=(
            "torch.nn.functional.scaled_dot_product_attention runs it as one kernel. If it is used "
            "already, it fell back to its math path: half precision and a head size that flash or "
            "efficient attention takes bring it back; torch.nn.attention.sdpa_kernel says why not."
        ),
        link=(
            "https://docs.pytorch.org/docs/stable/generated/"
            "torch.nn.functional.scaled_dot_product_attention.html"
        ),
        places=evidence.places_of_spans(nodes),
        nodes=evidence.top_nodes(nodes & spans.is_node),
        kernels=evidence.top_kernels(evidence.work_of(nodes)),
    )
