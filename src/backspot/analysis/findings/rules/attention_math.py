"""Attention computed as separate products and a softmax, which write out the attention weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import forward_of
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import FAR, NOTHING, grouped
from backspot.results.findings import Finding
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask

__all__ = ["find"]

_PRODUCTS = ("Bmm", "Baddbmm")
_SOFTMAX = ("Softmax", "SafeSoftmax")
_VIEWS = (
    *("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Unsqueeze"),
    *("Squeeze", "Slice", "Select", "Split", "Unbind", "Clone", "ToCopy", "Alias"),
)
_SCALED_OR_MASKED = ("Mul", "Div", "Add", "Sub", "MaskedFill", "Where")
_LEARNED = ("Index", "IndexSelect", "Embedding")
_DROPPED_OUT = ("NativeDropout", "Mul", "Div", "MaskedFill", "Where")
_OF_VALUES = ("Addmm", "Mm", "Linear", "MkldnnLinear", "Convolution")
_LEAST_WIDTH = 8
"""With fewer channels in queries and keys, or with fewer keys, there is little to fuse."""
_ALIKE = 4
"""Both products multiply as many numbers. Where one takes this many times the other, the scores are
no product of queries and keys: additive attention has products with a single column, for example.
"""
_MATH = "aten::_scaled_dot_product_attention_math"
_USE = "Use torch.nn.functional.scaled_dot_product_attention, which runs attention as one kernel"
_NEEDED_ON_CPU = (
    "inputs of four dimensions, equal head sizes of query, key and value, and a mask that needs no "
    "gradient"
)
_WARNS = "torch.nn.attention.sdpa_kernel warns why a backend cannot run."


@rule("attention-math")
def find(evidence: Evidence) -> Finding | None:
    """Find the chains of nodes of a batched product, a softmax and another batched product."""
    costs, say = evidence.costs, evidence.wording
    nodes, softmax = _chains(evidence)
    if not softmax.any():
        return None
    names = costs.top_nodes(nodes)
    return finding(
        costs.places_of_spans(nodes),
        title="Attention is not fused into one kernel",
        seen=(
            f"{say.per_step(int(softmax.sum()), 'softmax', 'softmaxes')} between batched products: "
            f"{', '.join(names)} take {say.ms(costs.of_spans(nodes))} of the backward. Each of "
            "these nodes reads and writes the whole matrix of attention weights."
        ),
        remedy=_remedy(evidence, softmax),
        link=(
            "https://docs.pytorch.org/docs/stable/generated/"
            "torch.nn.functional.scaled_dot_product_attention.html"
        ),
        nodes=names,
        kernels=costs.top_kernels(evidence.work_of(nodes)),
    )


def _chains(evidence: Evidence) -> tuple[Mask, Mask]:
    """Return the nodes of attention that fused attention could replace, and their softmaxes.

    Nodes are numbered in the order of the forward. From the scores to the softmax there may be what
    fused attention does itself: a factor, and a mask that fills in or is added. A layer or another
    function there makes it something else: talking heads, additive attention, the router of
    experts. The fused kernel for the CPU takes no mask that is learned.
    """
    before = {*_VIEWS, *_SCALED_OR_MASKED, *(() if evidence.device == "cpu" else _LEARNED)}
    after = {*_VIEWS, *_DROPPED_OUT, *_OF_VALUES}
    join, kinds = evidence.ownership.join, [_kind(name) for name in evidence.spans.node_names]
    numbered = evidence.in_pass & evidence.spans.is_node & (join.sequence >= 0)
    nodes, softmax = np.zeros((2, len(numbered)), bool)
    found: dict[int, list[tuple[Ints, int]]] = {}
    for _, mine in grouped(join.builder, np.flatnonzero(numbered)):
        mine = mine[np.argsort(join.sequence[mine], kind="stable")]
        kind = [kinds[node] for node in evidence.spans.node[mine].tolist()]
        for at in (at for at, one in enumerate(kind) if one in _SOFTMAX):
            first, last = _product(kind, at, -1, before), _product(kind, at, 1, after)
            if first is not None and last is not None:
                among = [one for one in range(first, last + 1) if kind[one] not in _OF_VALUES]
                owner = int(evidence.ownership.owner[mine[first]])
                found.setdefault(owner, []).append((mine[among], int(mine[at])))
    spent = forward_of(evidence)
    for chains in found.values():
        if _is_attention(evidence, np.array([chain[[0, -1]] for chain, _ in chains]), spent):
            for chain, middle in chains:
                nodes[chain] = softmax[middle] = True
    return nodes, softmax


def _kind(node: str) -> str:
    """Return the operator in the name of a node: ``Bmm`` of ``BmmBackward0``."""
    return node.partition("Backward")[0]


def _product(kind: Sequence[str], at: int, way: int, between: Collection[str]) -> int | None:
    """Return the place of the nearest batched product, if only nodes of some kinds come before."""
    at += way
    while 0 <= at < len(kind) and kind[at] in between:
        at += way
    return at if 0 <= at < len(kind) and kind[at] in _PRODUCTS else None


def _is_attention(evidence: Evidence, products: Ints, spent: Ints) -> bool:
    """Whether one product has the scores of queries and keys, and the other the mean of values.

    Args:
        evidence: the trace.
        products: the nodes of both, one row for each time that a module computes them.
        spent: the time of the forward operator of each node.
    """
    operators = evidence.ownership.join.operator[products[0]]
    scores, mean = (_shape_of_product(evidence, one) for one in operators.tolist())
    if scores and mean:
        return min(scores[1:]) >= _LEAST_WIDTH and scores[2] == mean[1]
    # The least time is that without an interruption.
    low, high = sorted(spent[products].min(axis=0).tolist())
    return bool(high <= _ALIKE * low)


def _shape_of_product(evidence: Evidence, operator: int) -> tuple[int, int, int] | None:
    """Return rows, inner size and columns of a batched product, where shapes are recorded."""
    events = evidence.events
    signature = int(events.signature[operator]) if operator >= 0 else NOTHING
    if signature < 0:
        return None
    matrices = [one for one in json.loads(events.signatures[signature].shapes) if len(one) == 3]
    if len(matrices) < 2:
        return None
    (_, rows, inner), (_, _, columns) = matrices[-2:]
    return rows, inner, columns


def _remedy(evidence: Evidence, softmax: Mask) -> str:
    """Return what to change, by the operators that ran in the forward around these softmaxes."""
    events = evidence.events
    operator = evidence.ownership.join.operator[softmax]
    operator = operator[operator >= 0]
    thread, start, end = events.thread[operator], events.start[operator], events.end[operator]
    math = (evidence.around(thread, start, _MATH) >= 0).any()
    if evidence.device != "cpu":
        if not math:
            return f"{_USE}."
        return (
            "scaled_dot_product_attention falls back to its math backend here: use half precision "
            f"and a head size that the flash or efficient backend supports. {_WARNS}"
        )
    falls_back = "scaled_dot_product_attention falls back to its math backend here"
    if _drops_out(events, thread, end):
        return (
            f"{f'{falls_back}, because' if math else 'Here'} dropout_p is not 0, and the fused "
            "kernel for the CPU has no dropout. Without dropout of the attention weights (dropout "
            "in nn.MultiheadAttention), scaled_dot_product_attention runs as one kernel."
        )
    if math:
        return f"{falls_back}. The fused kernel for the CPU needs {_NEEDED_ON_CPU}."
    return f"{_USE} where dropout_p is 0. The fused kernel for the CPU needs {_NEEDED_ON_CPU}."


def _drops_out(events: Events, thread: Ints, end: Ints) -> bool:
    """Whether what runs next after one of these moments, products aside, is a dropout."""
    random = events.named(Category.OPERATOR, "aten::bernoulli_", "aten::native_dropout")
    product = events.named(Category.OPERATOR, "aten::bmm", "aten::baddbmm")

    def following(index: Ints) -> Ints:
        """Return the start of the next of these operators after each moment; ``FAR`` for none."""
        result = np.full(len(end), FAR)
        of_thread = dict(grouped(events.thread, index))
        for one, mine in grouped(thread):
            times = np.append(np.sort(events.start[of_thread.get(one, index[:0])]), FAR)
            result[mine] = times[np.searchsorted(times[:-1], end[mine])]
        return result

    return bool((following(random) < following(product)).any())
