"""Products of tiny matrices written out, and distances of points by broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from backspot.live.trials.chains import Chain
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, Asked, Trial, piece_of, remedy
from backspot.live.trials.twins import check_fits, check_room

Two = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@remedy("tiny-products", chains=True)
def written_out(asked: Asked) -> Trial | None:
    """Try a sum of element-wise products in place of a batched product of tiny matrices."""
    chain = _largest(asked, "product", "no batched product of tiny matrices was recognised")

    def sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made = a[..., :1] * b[..., :1, :]
        for at in range(1, a.shape[-1]):
            made = made + a[..., at : at + 1] * b[..., at : at + 1, :]
        return made

    return _trial("a @ b", chain, {"element-wise products and sums": sums})


@remedy("pairwise-distance", chains=True)
def broadcast(asked: Asked) -> Trial | None:
    """Try differences of all points, or for ``p=2`` a product of matrices."""
    chain = _largest(asked, "distance", "no cdist was recognised in the step")
    p = chain.given["p"]

    def differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        far = a.unsqueeze(-2) - b.unsqueeze(-3)
        return far.abs().sum(-1) if p == 1 else torch.linalg.vector_norm(far, p, -1)

    ways: dict[str, Two] = {"broadcasting": differences}
    if p == 2:
        mode = "use_mm_for_euclid_dist"
        ways[f"compute_mode={mode!r}"] = partial(torch.cdist, compute_mode=mode)
    return _trial("cdist(a, b)", chain, ways)


def _largest(asked: Asked, kind: str, missing: str) -> Chain:
    return max(asked.seen(kind, missing), key=lambda one: one.count * _numbers(one))


def _numbers(chain: Chain) -> int:
    """How many numbers all differences, or all products, are."""
    a, b = chain.given["a"].shape, chain.given["b"].shape
    return int(a.numel() * b[-2 if chain.kind == "distance" else -1])


def _trial(what: str, chain: Chain, ways: dict[str, Two]) -> Trial:
    a, b, call = chain.given["a"], chain.given["b"], chain.calls[0]
    leaves = [a.root, b.root]
    check_fits(leaves, 2)
    check_room(a.root.device, 3 * a.root.element_size() * _numbers(chain))

    given: dict[str, Two] = {AS_IT_IS: lambda *_: call.again(None), **ways}
    variants = {
        name: [piece_of(chain, partial(lambda way: way(a.made(), b.made()), way), leaves)]
        for name, way in given.items()
    }
    shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
    return Trial(f"{what} of {shapes}, forward and backward", variants, allowed_s=CHAINS_S)
