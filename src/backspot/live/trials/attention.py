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
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, MOST_CHAINS, Asked, Trial, remedy
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
    given = _scored(scores)
    if given is None and _is_narrow(scores):
        given = {"scores": scores}
    if given is None:
        chains.missed["attention"] = "how the scores of its softmax are made is not known"
    else:
        chains.keep("attention", end, {**given, "v": end.parts[1], "p": p}, key=tuple(given))
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
    named = [one for one in end.kwargs.values() if isinstance(one, torch.Tensor)]
    if is_on and end.option("dropout_p", place, 0.0) > 0:
        if not any(one.requires_grad for one in named):
            chains.keep("dropout", end, {"parts": end.parts, "place": place})
        return
    chains.missed["attention"] = "it is PyTorch's attention already, without dropout"


def _scored(scores: Node) -> dict[str, Any] | None:
    """Return queries, keys, scale and masks of scores; ``None`` if they are made in another way."""
    masks: list[tuple[str, Node]] = []
    scale, node = 1.0, scores
    while node.function not in PRODUCTS:
        values = [one for one in node.inner if one.shape == node.shape and one.function]
        factor = next((one for one in node.parts if isinstance(one, (int, float))), None)
        if node.function in CHOSEN and len(node.parts) == 3:
            # torch.where(condition, a, b), and a.where(condition, b)
            condition, one, two = node.parts
            if node.function is torch.Tensor.where:
                condition, one = one, condition
            value, fill, kind = (two, one, "drop") if _is_low(one) else (one, two, "keep")
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
            value = next((one for one in values if one.function in _SCORING), None)
            if value is None:
                return None
            masks.append(("add", next(one for one in node.inner if one is not value)))
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
def attention(asked: Asked) -> Trial | None:
    """Try ``scaled_dot_product_attention`` on what the largest products of the step were given."""
    missing = "a function that trials do not take apart computes this attention"

    def scores(chain: Chain) -> int:
        return int(chain.given["v"].shape[-2] * chain.end.shape[:-1].numel())

    found = asked.seen("attention", missing, scores)[:MOST_CHAINS]
    variants = asked.variants(found, _ways)
    if len(variants) == 1:
        raise Refused("its parts are too different for one kernel")
    first = found[0].given
    shape = tuple(first["q" if "q" in first else "scores"].shape)
    what = f"softmax(q·kᵀ)·v of {shape}" if "q" in first else f"softmax(scores)·v of {shape}"
    return Trial(f"{what}, forward and backward", variants, allowed_s=CHAINS_S)


@remedy("attention-math", chains=True)
def without_weights(asked: Asked) -> Trial | None:
    """Try ``need_weights=False`` on what the largest ``nn.MultiheadAttention`` was given."""
    if not (asked.live.chains and asked.live.chains.of("weights")):
        return None
    found = asked.seen("weights", "", lambda chain: chain.end.shape.numel())[:MOST_CHAINS]
    what = f"nn.MultiheadAttention of {tuple(found[0].end.shape)}, forward and backward"
    return Trial(what, asked.variants(found, _without_weights), allowed_s=CHAINS_S)


@remedy("attention-math", chains=True)
def without_dropout(asked: Asked) -> Trial | None:
    """Try the largest calls of PyTorch's attention without dropout of the weights."""
    on_cpu = asked.live.device.type == "cpu"  # kernels for GPUs have dropout
    if not (on_cpu and asked.live.chains and asked.live.chains.of("dropout")):
        return None
    found = asked.seen("dropout", "", lambda chain: chain.end.shape.numel())[:MOST_CHAINS]
    what = f"PyTorch's attention of {tuple(found[0].end.shape)}, forward and backward"
    variants = asked.variants(found, _without_dropout)
    notes = {_NO_DROPOUT: "which trains without dropout of the weights"}
    return Trial(what, variants, allowed_s=CHAINS_S, notes=notes)


def _without_dropout(chain: Chain) -> dict[str, Attend]:
    end, place = chain.end, chain.given["place"]
    parts = (*end.parts[:place], 0.0, *end.parts[place + 1 :])[: len(end.parts)]
    by_name = {"dropout_p": 0.0} if "dropout_p" in end.kwargs else {}
    other = replace(end, parts=parts, kwargs={**end.kwargs, **by_name})
    now, way = chain.again(end), chain.again(other)
    return {AS_IT_IS: lambda: now()[0], _NO_DROPOUT: lambda: way()[0]}


def _without_weights(chain: Chain) -> dict[str, Attend]:
    other = replace(chain.end, kwargs={**chain.end.kwargs, "need_weights": False})
    now, way = chain.again(chain.end), chain.again(other)
    return {AS_IT_IS: lambda: now()[0], "need_weights=False": lambda: way()[0]}


def _ways(chain: Chain) -> dict[str, Attend]:
    given, end = chain.given, chain.end
    ways: dict[str, Attend] = {}
    if "q" in given:
        mask, parts = _mask(chain), (given["q"], given["kt"], given["v"])

        def arrange(q: Any, kt: Any, v: Any, **other: Any) -> Mapping[str, Any]:
            return {"query": q, "key": kt.mT, "value": v, "scale": given["scale"], **other}

        ways[_WITH_MASK] = _fused(chain, parts, partial(arrange, attn_mask=mask))
        if mask is not None and _is_causal(mask, given):
            ways[_CAUSAL] = _fused(chain, parts, partial(arrange, is_causal=True))
    else:
        scores, v = chain.again(given["scores"], given["v"])()
        # Queries and keys of zeros, as narrow as kernels take them.
        q, k = v.new_zeros(*scores.shape[:-1], 8), v.new_zeros(*v.shape[:-1], 8)
        ways[_SCORES] = _fused(
            chain,
            (given["scores"], given["v"]),
            lambda scores, v: {"query": q, "key": k, "value": v, "attn_mask": scores},
        )
    plain = chain.again(end, without=DROPOUT)
    # What lays out the result comes along: some kernels have done that.
    now, lay_out = chain.again(chain.after), chain.again(chain.after, given=[end])
    found: dict[str, Attend] = {AS_IT_IS: lambda: now()[0]}
    for name, way in ways.items():
        if given["p"] or _is_same(way, lambda: plain()[0]):
            found[name] = partial(lambda way: lay_out(way())[0], way)
    return found


def _fused(
    chain: Chain, parts: Sequence[Node], arrange: Callable[..., Mapping[str, Any]]
) -> Attend:
    """Return the one kernel on parts of a chain, arranged as its arguments."""
    again, shape = chain.again(*parts), chain.end.shape

    def four(tensor: Any) -> Any:
        is_less = isinstance(tensor, torch.Tensor) and tensor.dim() < 4
        return tensor.reshape(*(1,) * (4 - tensor.dim()), *tensor.shape) if is_less else tensor

    def run() -> torch.Tensor:
        given = {name: four(one) for name, one in arrange(*again()).items()}
        out = functional.scaled_dot_product_attention(**given, dropout_p=chain.given["p"])
        return out if len(shape) == 4 else out.reshape(shape)

    return run


def _mask(chain: Chain) -> torch.Tensor | None:
    """Return all masks of the step as one: of truth values where all are."""
    masks: Sequence[tuple[str, Node]] = chain.given["masks"]
    kept, added = None, None
    for (kind, _), mask in zip(masks, chain.again(*(one for _, one in masks))(), strict=True):
        if kind == "add":
            added = mask if added is None else added + mask
        else:
            keep = mask.bool() if kind == "keep" else ~mask.bool()
            kept = keep if kept is None else kept & keep
    if added is None:
        return kept
    return added if kept is None else added.masked_fill(~kept, float("-inf"))


def _is_causal(mask: torch.Tensor, given: Any) -> bool:
    """Whether a mask leaves each position those up to its own."""
    size = given["q"].shape[-2]
    if tuple(mask.shape[-2:]) != (size, size) or given["kt"].shape[-1] != size:
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
            found = way()
        except RuntimeError:
            return True
        far = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    return bool(far < _SAME)
