"""The last layer and the loss for those positions alone that have a label."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from backspot.live.trials.chains import CAST, LAID_OUT, Chains, Node, seen
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, Asked, Piece, Trial, remedy
from backspot.live.trials.twins import forward_and_backward, free_bytes

_MOST_LABELS = 0.9
"""Share of positions with a label, from which to leave the others out is no remedy."""

_MOST_SCORES = 1 << 22
"""How many scores a CPU computes in the time that one call may take."""


@seen(functional.linear)
def _projected(chains: Chains, end: Node) -> None:
    if (made := end.tensor()) is not None:
        given = [one.tensor() for one in end.inner]  # what it was given lives until the loss
        chains.last = chains.node(made), end, made.dtype, given


@seen(functional.cross_entropy)
def _compared(chains: Chains, end: Node) -> None:
    if chains.last is None or len(end.inner) != 2:  # with weights of classes, for one
        return
    (made, layer, dtype, _), (node, target) = chains.last, end.inner
    read = node.tensor()
    while node is not made and node.function in CAST | LAID_OUT:
        node = node.parts[0]
    if node is not made or read is None or (read.dim(), len(target.shape)) != (2, 1):
        return
    given = dict(zip(("x", "weight", "bias"), layer.inner, strict=False))
    if given["x"].shape[:-1].numel() == len(read):
        chains.keep("labels", end, {**given, "target": target, "types": (dtype, read.dtype)})


@remedy("loss-passes", chains=True)
def labelled(asked: Asked) -> Trial | None:
    """Try the last layer and the loss without the positions that the loss ignores."""
    missing = "no cross-entropy of a linear layer's scores was recognised"
    chain = asked.seen("labels", missing, lambda one: one.given["target"].shape.numel())[0]
    *layer, target, (made, read) = chain.given.values()
    given, (labels,) = chain.again(*layer), chain.again(target)()
    ignored = chain.end.option("ignore_index", 4, -100)
    share = float((labels != ignored).float().mean())
    if not 0 < share < _MOST_LABELS:
        return None
    classes, width = layer[1].shape
    scores = free_bytes(labels.device) // (2 * made.itemsize + 3 * read.itemsize)
    if labels.is_cpu:
        scores = min(scores, _MOST_SCORES)
    every = -(-len(labels) * classes // max(classes, scores))  # of so many positions one
    labels = labels[::every]

    def loss(*, fewer: bool) -> torch.Tensor:
        x, *rest = given()
        x, of = x.reshape(-1, width)[::every], labels
        if fewer:
            kept = (labels != ignored).nonzero().squeeze(1)
            x, of = x.index_select(0, kept), labels[kept]
        with torch.autocast(labels.device.type, enabled=False):
            scores = functional.linear(x.to(made), *(one.to(made) for one in rest))
        return functional.cross_entropy(
            scores.to(read), of, *chain.end.parts[2:], **chain.end.kwargs
        )

    ways = {
        AS_IT_IS: partial(loss, fewer=False),
        "only positions with a label": partial(loss, fewer=True),
    }
    variants = {
        name: [Piece(forward_and_backward(way, chain.leaves, chain.autocast), chain.count * every)]
        for name, way in ways.items()
    }
    what = (
        f"a last layer of {classes:,} classes and its loss, of which {share:.0%} of the positions "
        "have a label, forward and backward"
    )
    return Trial(what, variants, allowed_s=CHAINS_S)
