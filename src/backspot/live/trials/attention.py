"""Attention in one kernel, with the mask that the step has, or causal where that is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from backspot.live.trials.chains import Chain, View, tensors_of, through
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, Asked, Piece, Trial, piece_of, remedy
from backspot.live.trials.twins import Refused, check_fits

_MOST_CHAINS = 3
_SAME = 0.05
"""A variant whose result differs by more than this share of the largest number is another one."""
_WITH_MASK = "scaled_dot_product_attention"
_CAUSAL = "scaled_dot_product_attention(is_causal=True)"
_SCORES = "scaled_dot_product_attention, the scores as a mask"
Attend = Callable[[], torch.Tensor]


@remedy("attention-math", "kept-softmax", chains=True)
def attention(asked: Asked) -> Trial | None:
    """Try ``scaled_dot_product_attention`` on what the largest products of the step were given."""
    missing = "no softmax between two products was recognised in the step"
    found = sorted(asked.seen("attention", missing), key=lambda one: -one.count * _scores(one))
    found = found[:_MOST_CHAINS]
    variants: dict[str, list[Piece]] = {}
    for chain in found:
        check_fits(tensors_of(chain.given), 2)
        for name, piece in _ways(chain).items():
            variants.setdefault(name, []).append(piece)
    whole = {name: pieces for name, pieces in variants.items() if len(pieces) == len(found)}
    if len(whole) == 1:
        raise Refused("its parts are too different for one kernel")
    first = found[0].given
    shape = tuple(first["q" if "q" in first else "scores"].shape)
    what = f"softmax(q·kᵀ)·v of {shape}" if "q" in first else f"softmax(scores)·v of {shape}"
    return Trial(f"{what}, forward and backward", whole, allowed_s=CHAINS_S)


def _scores(chain: Chain) -> int:
    if "q" not in chain.given:
        return int(chain.given["scores"].shape.numel())
    return int(chain.given["q"].shape[:-1].numel() * chain.given["kt"].shape[-1])


def _ways(chain: Chain) -> dict[str, Piece]:
    given = chain.given
    leaves = list({id(one): one for one in tensors_of(given)}.values())
    now = _as_it_is(chain, dropout=True)
    ways: dict[str, Attend] = {AS_IT_IS: now}
    if "q" in given:
        mask = _mask(given["masks"])
        ways[_WITH_MASK] = _fused(given, mask)
        if mask is not None and _is_causal(mask, given):
            ways[_CAUSAL] = _fused(given, None, is_causal=True)
    else:
        ways[_SCORES] = _of_scores(given)
    plain = _as_it_is(chain, dropout=False)
    pieces = {}
    for name, way in ways.items():
        if name == AS_IT_IS or given["p"] or _is_same(way, plain):
            # What lays out the result comes along: some kernels have done that.
            whole = partial(lambda way: through(chain.after, way()), way)
            pieces[name] = piece_of(chain, whole, leaves)
    return pieces


def _as_it_is(chain: Chain, *, dropout: bool) -> Attend:
    calls = [one for one in chain.calls if dropout or one.function is not functional.dropout]
    scores = chain.given.get("scores")
    return lambda: through(calls, scores.made() if scores else None)


def _four(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor if tensor.dim() == 4 else tensor.reshape(*(1,) * (4 - tensor.dim()), *tensor.shape)
    )


def _fused(given: Any, mask: torch.Tensor | None, *, is_causal: bool = False) -> Attend:
    shape = (*given["q"].shape[:-1], given["v"].shape[-1])

    def run() -> torch.Tensor:
        out = functional.scaled_dot_product_attention(
            _four(given["q"].made()),
            _four(given["kt"].made().mT),
            _four(given["v"].made()),
            attn_mask=mask if mask is None else _four(mask),
            dropout_p=given["p"],
            is_causal=is_causal,
            scale=given["scale"],
        )
        return out if len(shape) == 4 else out.reshape(shape)

    return run


def _of_scores(given: Any) -> Attend:
    shape, v = given["scores"].shape, given["v"].root
    # Queries and keys of zeros, as narrow as kernels take them.
    q = torch.zeros(*shape[:-1], 8, dtype=v.dtype, device=v.device)
    k = torch.zeros(*given["v"].shape[:-1], 8, dtype=v.dtype, device=v.device)

    def run() -> torch.Tensor:
        v = given["v"].made()
        out = functional.scaled_dot_product_attention(
            _four(q),
            _four(k),
            _four(v),
            attn_mask=_four(given["scores"].made()),
            dropout_p=given["p"],
        )
        return out.reshape(*shape[:-1], v.shape[-1])

    return run


def _mask(masks: Sequence[tuple[str, View]]) -> torch.Tensor | None:
    """Return all masks of the step as one: of truth values where all are."""
    kept, added = None, None
    for kind, view in masks:
        mask = view.made()
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
    allowed = mask if mask.dtype == torch.bool else mask > -1e4
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
