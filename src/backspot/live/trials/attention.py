"""Attention in one kernel, with the mask that the step has, or causal where that is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from backspot.live.trials.chains import (
    ADDED,
    CAST,
    CHOSEN,
    DIVIDED,
    DROPOUT,
    FILLED,
    PRODUCTS,
    SOFTMAX,
    TIMES,
    Chain,
    Chains,
    Node,
    seen,
)
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, MOST_CHAINS, Request, Trial, remedy
from backspot.live.trials.twins import Refused

_SAME = 0.05
"""A variant whose result differs by more than this share of the largest number is another one."""
_VERY_LOW = -1e4
"""A mask fills in such a number or a lower one, so that the softmax gives 0."""
_WITH_MASK = "scaled_dot_product_attention"
_NO_DROPOUT = "dropout_p=0"
_CAUSAL = "scaled_dot_product_attention(is_causal=True)"
_SCORES = "scaled_dot_product_attention, the scores as a mask"
Attend = Callable[[], torch.Tensor]

# What the step does ------------------------------------------------------------------------------


@seen(*PRODUCTS)
def _attended(chains: Chains, end: Node) -> None:
    """Keep softmax(q·kᵀ)·v, or the softmax of scores that are sums of columns."""
    p, node = 0.0, end.parts[0]
    while node.function in (DROPOUT | CAST) and node.inner:
        if node.function in DROPOUT and node.option("training", 2, True):
            p = float(node.option("p", 1, 0.5))
        node = node.parts[0]
    if node.function not in SOFTMAX or len(node.shape) < 3:
        return
    if node.option("dim", 1, None) not in (-1, len(node.shape) - 1):
        return
    scores = node.parts[0]
    inputs = _scored(scores)
    if inputs is None and _is_narrow(scores):
        inputs = {"scores": scores}
    if inputs is None:
        chains.missed["attention"] = "how the scores of its softmax are made is not known"
    else:
        chains.keep("attention", end, {**inputs, "v": end.parts[1], "p": p}, key=tuple(inputs))
    node.held = None


@seen(functional.multi_head_attention_forward)
def _weighed(chains: Chains, end: Node) -> None:
    """Keep the attention of ``nn.MultiheadAttention``, one function.

    If it returns its weights, or drops some of them.
    """
    if end.item == 0 and end.option("need_weights", 15, True):
        chains.keep("weights", end, {"parts": end.parts})
    elif end.item == 0:
        _keep_fused(chains, end, 10, is_on=bool(end.option("training", 13, True)))


@seen(functional.scaled_dot_product_attention)
def _in_one_function(chains: Chains, end: Node) -> None:
    """Keep attention that is one function already, if it drops some of its weights."""
    _keep_fused(chains, end, 4, is_on=True)


def _keep_fused(chains: Chains, end: Node, place: int, *, is_on: bool) -> None:
    """Keep a call of PyTorch's attention with dropout, whose probability has a place."""
    named = [value for value in end.kwargs.values() if isinstance(value, torch.Tensor)]
    if is_on and end.option("dropout_p", place, 0.0) > 0:
        if not any(value.requires_grad for value in named):
            chains.keep("dropout", end, {"parts": end.parts, "place": place})
        return
    chains.missed["attention"] = "it is PyTorch's attention already, without dropout"


def _scored(scores: Node) -> dict[str, Any] | None:
    """Return queries, keys, scale and masks of scores; ``None`` if they are made in another way."""
    masks: list[tuple[str, Node]] = []
    scale, node = 1.0, scores
    while node.function not in PRODUCTS:
        values = [inner for inner in node.inner if inner.shape == node.shape and inner.function]
        factor = next((value for value in node.parts if isinstance(value, (int, float))), None)
        if node.function in CHOSEN and len(node.parts) == 3:
            # torch.where(condition, a, b), and a.where(condition, b)
            condition, if_true, if_false = node.parts
            if node.function is torch.Tensor.where:
                condition, if_true = if_true, condition
            value, fill, kind = (
                (if_false, if_true, "drop") if _is_low(if_true) else (if_true, if_false, "keep")
            )
            if not (_is_low(fill) and isinstance(value, Node)):
                return None
            masks.append((kind, condition))
            values = [value]
        elif node.function in FILLED and _is_low(node.parts[2]):
            masks.append(("drop", node.parts[1]))
            values = [node.parts[0]]
        elif node.function in TIMES | DIVIDED and factor is not None:
            scale *= float(factor) if node.function in TIMES else 1 / float(factor)
        elif node.function in ADDED and len(node.inner) == 2 and not node.kwargs:
            value = next((value for value in values if value.function in _SCORING), None)
            if value is None:
                return None
            masks.append(("add", next(inner for inner in node.inner if inner is not value)))
            values = [value]
        elif node.function not in CAST:
            return None
        if not values:
            return None
        node = values[0]
    if len(node.shape) < 3 or node.shape[-1] == 1:
        return None
    return {"q": node.parts[0], "kt": node.parts[1], "scale": scale, "masks": masks[::-1]}


_SCORING = PRODUCTS | TIMES | DIVIDED | ADDED | FILLED | CHOSEN | CAST


def _is_low(fill: object) -> bool:
    if isinstance(fill, Node):  # to read it would have the host wait for a GPU
        tensor = fill.tensor()
        if tensor is None or tensor.device.type != "cpu" or not tensor.is_floating_point():
            return False
        return float(tensor.detach().max()) <= _VERY_LOW
    return isinstance(fill, (int, float)) and fill <= _VERY_LOW


def _is_narrow(scores: Node) -> bool:
    """Whether all products that make scores have a single column: they are none of q and k."""
    pending, narrow = [scores], False
    while pending:
        node = pending.pop()
        if node.function is None or node.function in PRODUCTS:
            if node.shape[-1:] == (1,) or node.shape[-2:-1] == (1,):
                narrow = True
            elif node.function is not None:
                return False
        else:
            pending += node.inner
    return narrow


# What is tried -----------------------------------------------------------------------------------


@remedy("attention-math", "kept-softmax", chains=True)
def attention(request: Request) -> Trial | None:
    """Try ``scaled_dot_product_attention`` on what the largest products of the step were given."""
    missing = "a function that trials do not take apart computes this attention"

    def scores(chain: Chain) -> int:
        return int(chain.given["v"].shape[-2] * chain.end.shape[:-1].numel())

    chains = request.seen("attention", missing, scores)[:MOST_CHAINS]
    variants = request.variants(chains, _ways)
    if len(variants) == 1:
        raise Refused("its parts are too different for one kernel")
    first = chains[0].given
    shape = tuple(first["q" if "q" in first else "scores"].shape)
    title = f"softmax(q·kᵀ)·v of {shape}" if "q" in first else f"softmax(scores)·v of {shape}"
    return Trial(f"{title}, forward and backward", variants, allowed_s=CHAINS_S)


@remedy("attention-math", chains=True)
def without_weights(request: Request) -> Trial | None:
    """Try ``need_weights=False`` on what the largest ``nn.MultiheadAttention`` was given."""
    if not (request.live.chains and request.live.chains.of("weights")):
        return None
    chains = request.seen("weights", "", lambda chain: chain.end.shape.numel())[:MOST_CHAINS]
    title = f"nn.MultiheadAttention of {tuple(chains[0].end.shape)}, forward and backward"
    return Trial(title, request.variants(chains, _without_weights), allowed_s=CHAINS_S)


@remedy("attention-math", chains=True)
def without_dropout(request: Request) -> Trial | None:
    """Try the largest calls of PyTorch's attention without dropout of the weights."""
    on_cpu = request.live.device.type == "cpu"  # kernels for GPUs have dropout
    if not (on_cpu and request.live.chains and request.live.chains.of("dropout")):
        return None
    chains = request.seen("dropout", "", lambda chain: chain.end.shape.numel())[:MOST_CHAINS]
    title = f"PyTorch's attention of {tuple(chains[0].end.shape)}, forward and backward"
    variants = request.variants(chains, _without_dropout)
    notes = {_NO_DROPOUT: "which trains without dropout of the weights"}
    return Trial(title, variants, allowed_s=CHAINS_S, notes=notes, changing=(_NO_DROPOUT,))


def _without_dropout(chain: Chain) -> dict[str, Attend]:
    end, place = chain.end, chain.given["place"]
    arguments = (*end.parts[:place], 0.0, *end.parts[place + 1 :])[: len(end.parts)]
    by_name = {"dropout_p": 0.0} if "dropout_p" in end.kwargs else {}
    other = replace(end, parts=arguments, kwargs={**end.kwargs, **by_name})
    now, way = chain.again(end), chain.again(other)
    return {AS_IT_IS: lambda: now()[0], _NO_DROPOUT: lambda: way()[0]}


def _without_weights(chain: Chain) -> dict[str, Attend]:
    other = replace(chain.end, kwargs={**chain.end.kwargs, "need_weights": False})
    now, way = chain.again(chain.end), chain.again(other)
    return {AS_IT_IS: lambda: now()[0], "need_weights=False": lambda: way()[0]}


def _ways(chain: Chain) -> dict[str, Attend]:
    inputs, end = chain.given, chain.end
    ways: dict[str, Attend] = {}
    if "q" in inputs:
        mask, nodes = _mask(chain), (inputs["q"], inputs["kt"], inputs["v"])

        def arrange(q: Any, kt: Any, v: Any, **other: Any) -> Mapping[str, Any]:
            return {"query": q, "key": kt.mT, "value": v, "scale": inputs["scale"], **other}

        ways[_WITH_MASK] = _fused(chain, nodes, partial(arrange, attn_mask=mask))
        if mask is not None and _is_causal(mask, inputs):
            ways[_CAUSAL] = _fused(chain, nodes, partial(arrange, is_causal=True))
    else:
        scores, v = chain.again(inputs["scores"], inputs["v"])()
        # Queries and keys of zeros, as narrow as kernels take them.
        q, k = v.new_zeros(*scores.shape[:-1], 8), v.new_zeros(*v.shape[:-1], 8)
        ways[_SCORES] = _fused(
            chain,
            (inputs["scores"], inputs["v"]),
            lambda scores, v: {"query": q, "key": k, "value": v, "attn_mask": scores},
        )
    plain = chain.again(end, without=DROPOUT)
    # What lays out the result comes along: some kernels have done that.
    now, lay_out = chain.again(chain.after), chain.again(chain.after, given=[end])
    ways_out: dict[str, Attend] = {AS_IT_IS: lambda: now()[0]}
    for name, way in ways.items():
        if inputs["p"] or _is_same(way, lambda: plain()[0]):
            ways_out[name] = partial(lambda way: lay_out(way())[0], way)
    return ways_out


def _fused(
    chain: Chain, nodes: Sequence[Node], arrange: Callable[..., Mapping[str, Any]]
) -> Attend:
    """Return the one kernel on parts of a chain, arranged as its arguments."""
    again, shape = chain.again(*nodes), chain.end.shape

    def four(tensor: Any) -> Any:
        is_less = isinstance(tensor, torch.Tensor) and tensor.dim() < 4
        return tensor.reshape(*(1,) * (4 - tensor.dim()), *tensor.shape) if is_less else tensor

    def run() -> torch.Tensor:
        arguments = {name: four(tensor) for name, tensor in arrange(*again()).items()}
        out = functional.scaled_dot_product_attention(**arguments, dropout_p=chain.given["p"])
        return out if len(shape) == 4 else out.reshape(shape)

    return run


def _mask(chain: Chain) -> torch.Tensor | None:
    """Return all masks of the step as one: of truth values where all are."""
    masks: Sequence[tuple[str, Node]] = chain.given["masks"]
    keeps, added = None, None
    for (kind, _), mask in zip(masks, chain.again(*(mask for _, mask in masks))(), strict=True):
        if kind == "add":
            added = mask if added is None else added + mask
        else:
            keep = mask.bool() if kind == "keep" else ~mask.bool()
            keeps = keep if keeps is None else keeps & keep
    if added is None:
        return keeps
    return added if keeps is None else added.masked_fill(~keeps, float("-inf"))


def _is_causal(mask: torch.Tensor, inputs: Any) -> bool:
    """Whether a mask leaves each position those up to its own."""
    size = inputs["q"].shape[-2]
    if tuple(mask.shape[-2:]) != (size, size) or inputs["kt"].shape[-1] != size:
        return False
    allowed = mask if mask.dtype == torch.bool else mask > _VERY_LOW
    if mask.dtype != torch.bool and bool((mask[allowed] != 0).any()):
        return False
    return bool((allowed == torch.ones_like(allowed).tril()).all())


def _is_same(way: Attend, now: Attend) -> bool:
    """Whether both compute the same; not if a variant fails, which its trial then says."""
    with torch.no_grad():
        expected = now()
        try:
            outputs = way()
        except RuntimeError:
            return True
        far = (outputs - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    return bool(far < _SAME)
