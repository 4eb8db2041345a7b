"""Attention computed as separate products and a softmax, which write out the attention weights."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding

__all__ = ["find"]

_PRODUCTS = ("Bmm", "Baddbmm")
_SOFTMAX = ("Softmax", "SafeSoftmax")
_ATTENTION = (*_SOFTMAX, "NativeDropout", "MaskedFill", "Where", "Div", "Mul", *_PRODUCTS)


@rule("attention-math")
def find(evidence: Evidence) -> Finding | None:
    """Find modules with at least two batched products for each softmax."""
    costs, say, owner = evidence.costs, evidence.wording, evidence.ownership.owner
    softmax = evidence.nodes_named(lambda name: name.startswith(_SOFTMAX))
    products = evidence.nodes_named(lambda name: name.startswith(_PRODUCTS))
    width = int(owner.max(initial=0)) + 1
    softmaxes = np.bincount(owner[softmax], minlength=width)
    enough = (softmaxes > 0) & (np.bincount(owner[products], minlength=width) >= 2 * softmaxes)
    nodes = evidence.nodes_named(lambda name: name.startswith(_ATTENTION)) & enough[owner]
    if not nodes.any():
        return None
    number = int(softmaxes[enough].sum())
    names = costs.top_nodes(nodes)
    return finding(
        costs.places_of_spans(nodes),
        title="Attention is not fused into one kernel",
        seen=(
            f"{say.per_step(number, 'softmax', 'softmaxes')} between batched products: "
            f"{', '.join(names)} take {say.ms(costs.of_spans(nodes))} of the backward. Each of "
            "these nodes reads and writes the whole matrix of attention weights."
        ),
        remedy=(
            "Use torch.nn.functional.scaled_dot_product_attention, which runs attention as one "
            "kernel. If the model uses it already, it fell back to its math backend: use half "
            "precision and a head size that the flash or efficient backend supports. "
            "torch.nn.attention.sdpa_kernel warns why a backend cannot run."
        ),
        link=(
            "https://docs.pytorch.org/docs/stable/generated/"
            "torch.nn.functional.scaled_dot_product_attention.html"
        ),
        nodes=names,
        kernels=costs.top_kernels(evidence.work_of(nodes)),
    )
