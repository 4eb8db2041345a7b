"""The loss of many classes: for those positions alone that have a label, and as one operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from backspot.live.modules import find_modules
from backspot.live.trials.chains import (
    ADDED,
    CAST,
    LAID_OUT,
    LIMITED,
    LOGARITHM,
    PRODUCTS,
    SOFTMAX,
    Chain,
    Chains,
    Node,
    seen,
)
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, Piece, Request, Trial, remedy
from backspot.live.trials.twins import Refused, forward_and_backward, free_bytes

_MOST_LABELS = 0.9
"""Share of positions with a label, from which to leave the others out is no remedy."""

_NODES_OF_A_LOSS = 3
"""A cast, a softmax, and what picks the scores of the labels: all that ``loss-passes`` counts."""

_MOST_SCORES = 1 << 21
"""How many scores a CPU computes in the time that one call may take."""


@seen(functional.linear, *PRODUCTS)
def _projected(chains: Chains, end: Node) -> None:
    """Note a layer, which can also be written as a product with a matrix of weights."""
    is_product = end.function in PRODUCTS
    if is_product and [len(node.shape) for node in end.inner][1:] != [2]:
        return
    if (output := end.tensor()) is not None:
        inputs = [node.tensor() for node in end.inner]  # what it was given lives until the loss
        # Of a product, this node is the one that later ones are made of.
        chains.last = end if is_product else chains.node(output), end, output.dtype, inputs


@seen(functional.cross_entropy)
def _compared(chains: Chains, end: Node) -> None:
    if chains.last is None or len(end.inner) != 2:  # with weights of classes, for one
        return
    (output, layer, dtype, _), (node, target) = chains.last, end.inner
    read = node.tensor()
    while node is not output and node.function in CAST | LAID_OUT:
        node = node.parts[0]
    if node is not output or read is None or (read.dim(), len(target.shape)) != (2, 1):
        return
    inputs: dict[str, Any] = dict(zip(("x", "weight", "bias"), layer.inner, strict=False))
    if inputs["x"].shape[:-1].numel() == len(read):
        types, is_product = (dtype, read.dtype), layer.function in PRODUCTS
        inputs |= {"target": target, "types": types, "is_product": is_product}
        chains.keep("labels", end, inputs)


@remedy("loss-passes", chains=True)
def labelled(request: Request) -> Trial | None:
    """Try the last layer and the loss without the positions that the loss ignores."""
    missing = "no cross-entropy of a linear layer's scores was recognised"
    chain = request.seen("labels", missing, lambda chain: chain.given["target"].shape.numel())[0]
    *layer, target, (output, read), is_product = chain.given.values()
    inputs, (labels,) = chain.again(*layer), chain.again(target)()
    ignored = chain.end.option("ignore_index", 4, -100)
    share = float((labels != ignored).float().mean())
    if not 0 < share < _MOST_LABELS:
        return None
    classes, width = layer[1].shape[::-1] if is_product else layer[1].shape
    projected: Callable[..., torch.Tensor] = torch.matmul if is_product else functional.linear
    scores = free_bytes(labels.device) // (2 * output.itemsize + 3 * read.itemsize)
    if labels.is_cpu:
        scores = min(scores, _MOST_SCORES)
    stride = -(-len(labels) * classes // max(classes, scores))  # of so many positions one
    rows = -(-len(labels) // stride)
    # As many rows in each call: what a call does for the weights alone is in both alike then.
    stride_of_labelled = max(1, round(share * len(labels) / rows))

    def loss(*, fewer: bool) -> torch.Tensor:
        x, *rest = inputs()
        x = x.reshape(-1, width)
        if fewer:
            positions = (labels != ignored).nonzero().squeeze(1)[::stride_of_labelled]
            x, targets = x.index_select(0, positions), labels[positions]
        else:
            x, targets = x[::stride], labels[::stride]
        with torch.autocast(labels.device.type, enabled=False):
            scores = projected(x.to(output), *(tensor.to(output) for tensor in rest))
        return functional.cross_entropy(
            scores.to(read), targets, *chain.end.parts[2:], **chain.end.kwargs
        )

    ways = {
        AS_IT_IS: (partial(loss, fewer=False), stride),
        "only positions with a label": (partial(loss, fewer=True), stride_of_labelled),
    }
    variants = {
        name: [Piece(forward_and_backward(way, chain.leaves, chain.autocast), chain.count * times)]
        for name, (way, times) in ways.items()
    }
    title = (
        f"a last layer of {classes:,} classes and its loss, of which {share:.0%} of the positions "
        "have a label, forward and backward"
    )
    return Trial(
        title,
        variants,
        known_ns=_recorded_ns(request, chain, classes, width),
        of_sample=stride > 1,
        allowed_s=CHAINS_S,
    )


def _recorded_ns(request: Request, chain: Chain, classes: int, width: int) -> int:
    """Return what the loss and its last layer take in a step; 0 where that is not known.

    The layer is the one of these sizes, which no other module of the models has. The finding is
    about this loss alone if it has no more nodes than a cast, a softmax and what picks the labels.
    """
    layers = {
        id(module): ".".join(filter(None, (name, path)))
        for name, model in request.live.models.items()
        for path, module, _ in find_modules(model)
        if isinstance(module, torch.nn.Linear) and module.weight.shape == (classes, width)
    }
    nodes = sum(place.count for place in request.finding.places)
    rows = [row for row in request.report.modules if row.path in layers.values()]
    if len(layers) != 1 or len(rows) != 1 or nodes > _NODES_OF_A_LOSS * chain.count:
        return 0
    return request.in_step(request.finding.wall_ns + rows[0].forward_ns + rows[0].wall_ns)


@seen(*LOGARITHM)
def _logarithm(chains: Chains, end: Node) -> None:
    nodes = [end.inner[0]]
    while (node := nodes[-1]).function in ADDED | LIMITED and len(node.inner) == 1:
        nodes.append(node.inner[0])
    dim, output = node.option("dim", 1, None), end.tensor()
    if output is None or not output.requires_grad:  # of a model that is not trained
        return
    if node.function in SOFTMAX and dim is not None and len(node.shape) > 1:
        # F.softmax has the level of a warning before the type.
        dtype = node.option("dtype", 3 if node.function is functional.softmax else 2, None)
        inputs = {"scores": node.inner[0], "dim": dim % len(node.shape), "dtype": dtype}
        key = inputs["dim"], dtype, tuple(node.function for node in nodes)
        chains.keep("logarithm", end, inputs, key=key, replaced=nodes)


@remedy("loss-passes", chains=True, form="log_softmax")
def one_operator(request: Request) -> Trial | None:
    """Try ``log_softmax`` in place of a softmax and its logarithm."""
    missing = "no logarithm of a softmax was recognised"
    chain, count = max(
        (
            (chain, chain.count - len(chain.staying))
            for chain in request.seen("logarithm", missing, lambda chain: chain.end.shape.numel())
        ),
        key=lambda pair: pair[0].end.shape.numel() * pair[1],
    )
    if not count:
        raise Refused("the softmax is used beside its logarithm, too, so that it stays")
    scores, dim, dtype = chain.given.values()
    (logits,), written = chain.again(scores)(), chain.again(chain.end, given=[scores])
    rows = 0 if dim else 1  # of which a part is a trial of the same
    numel, device = logits.numel(), logits.device
    most = free_bytes(device) // (6 * logits.element_size())
    stride = -(-numel // max(1, min(most, _MOST_SCORES) if logits.is_cpu else most))
    positions = max(1, logits.shape[rows] // stride)
    sample = logits.detach().narrow(rows, 0, positions).clone().requires_grad_()
    ways: dict[str, Callable[[], torch.Tensor]] = {
        AS_IT_IS: lambda: written(sample)[0],
        "log_softmax": lambda: torch.log_softmax(sample, dim, dtype=dtype),
    }
    times = count * logits.shape[rows] / positions
    variants = {
        name: [Piece(forward_and_backward(way, [sample], chain.autocast), times)]
        for name, way in ways.items()
    }
    title = f"the logarithm of a softmax of {logits.shape[dim]:,} classes, forward and backward"
    return Trial(title, variants, allowed_s=CHAINS_S)
