"""Attention computed as separate products and a softmax, which write out the attention weights."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import grouped, take
from backspot.results.findings import Finding
from backspot.trace import Category
from backspot.trace.events import Ints, Mask

__all__ = ["find"]

_PRODUCTS = ("Bmm", "Baddbmm")
_SOFTMAX = ("Softmax", "SafeSoftmax")
_ATTENTION = (*_SOFTMAX, "NativeDropout", "MaskedFill", "Where", "Div", "Mul", *_PRODUCTS)
_LAYERS = ("Addmm", "Mm", "Linear", "MkldnnLinear", "Convolution")
_MATH = "aten::_scaled_dot_product_attention_math"
_USE = "Use torch.nn.functional.scaled_dot_product_attention, which runs attention as one kernel"
_NEEDED_ON_CPU = (
    "inputs of four dimensions, equal head sizes of query, key and value, and a mask that needs no "
    "gradient"
)
_WARNS = "torch.nn.attention.sdpa_kernel warns why a backend cannot run."


@rule("attention-math")
def find(evidence: Evidence) -> Finding | None:
    """Find modules with at least two batched products for each softmax.

    Fused attention has no layer inside, so talking heads, which mix the heads by a layer on both
    sides of the softmax, are skipped.
    """
    costs, say, owner = evidence.costs, evidence.wording, evidence.ownership.owner
    softmax = evidence.nodes_named(lambda name: name.startswith(_SOFTMAX))
    products = evidence.nodes_named(lambda name: name.startswith(_PRODUCTS))
    width = int(owner.max(initial=0)) + 1
    softmax &= ~_between_layers(evidence, softmax, products)
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
        remedy=_remedy(evidence, enough),
        link=(
            "https://docs.pytorch.org/docs/stable/generated/"
            "torch.nn.functional.scaled_dot_product_attention.html"
        ),
        nodes=names,
        kernels=costs.top_kernels(evidence.work_of(nodes)),
    )


def _between_layers(evidence: Evidence, softmax: Mask, products: Mask) -> Mask:
    """Whether each softmax has a layer between it and the products of its module, on both sides."""
    spans, owner = evidence.spans, evidence.ownership.owner
    layers = evidence.nodes_named(lambda name: name.startswith(_LAYERS))
    place = spans.thread * (owner.max(initial=0) + 1) + owner
    of_place = dict(grouped(place, np.flatnonzero(products)))
    of_thread = dict(grouped(spans.thread, np.flatnonzero(layers)))
    between = np.zeros(len(owner), bool)
    for number, mine in grouped(place, np.flatnonzero(softmax)):
        around = np.sort(spans.start[of_place.get(number, mine[:0])])
        inside = np.sort(spans.start[of_thread.get(int(spans.thread[mine[0]]), mine[:0])])
        after = np.searchsorted(around, spans.start[mine])
        enclosed = (after > 0) & (after < len(around))
        mine, after = mine[enclosed], after[enclosed]
        first, middle, last = (
            np.searchsorted(inside, moment)
            for moment in (around[after - 1], spans.start[mine], around[after])
        )
        between[mine] = (first < middle) & (middle < last)
    return between


def _remedy(evidence: Evidence, modules: Mask) -> str:
    """Return what to change, by the operators that ran in the forward of these modules."""
    events = evidence.events

    def among(index: Ints) -> Ints:
        """Return those of these operators that modules in the mask called."""
        span = evidence.spans.of(events, index)
        found: Ints = index[take(modules[evidence.ownership.owner], span, False)]
        return found

    on_gpu = evidence.report.has_gpu
    if not len(among(events.named(Category.OPERATOR, _MATH))):
        on_cpu = f" where dropout_p is 0. The fused kernel for the CPU needs {_NEEDED_ON_CPU}"
        return f"{_USE}{'' if on_gpu else on_cpu}."
    if on_gpu:
        return (
            "scaled_dot_product_attention falls back to its math backend here: use half precision "
            f"and a head size that the flash or efficient backend supports. {_WARNS}"
        )
    dropout = among(events.named(Category.OPERATOR, "aten::dropout"))
    if (evidence.around(events.thread[dropout], events.start[dropout], _MATH) >= 0).any():
        return (
            "scaled_dot_product_attention falls back to its math backend here, because dropout_p "
            "is not 0 and the fused kernel for the CPU has no dropout. Without dropout of the "
            "attention weights (dropout in nn.MultiheadAttention), attention runs as one kernel."
        )
    return (
        "scaled_dot_product_attention falls back to its math backend here. The fused kernel for "
        f"the CPU needs {_NEEDED_ON_CPU}."
    )
