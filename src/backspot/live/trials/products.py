"""Products of tiny matrices written out, and distances of points by broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from backspot.live.trials.chains import PRODUCTS, Chain, Chains, Node, seen
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, Request, Trial, remedy
from backspot.live.trials.twins import check_room

_TINY = 4
"""A product of so few numbers each is rather a sum of element-wise products."""
Two = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@seen(*PRODUCTS)
def _product(chains: Chains, end: Node) -> None:
    a, b = end.parts
    if a.shape[-1] <= _TINY and len(end.shape) > 2 and len(b.shape) > 1:
        chains.keep("product", end, {"a": a, "b": b})


@seen(torch.cdist)
def _distance(chains: Chains, end: Node) -> None:
    p = end.option("p", 2, 2.0)
    chains.keep("distance", end, {"a": end.parts[0], "b": end.parts[1], "p": p}, key=p)


@remedy("tiny-products", chains=True)
def written_out(request: Request) -> Trial | None:
    """Try a sum of element-wise products in place of a batched product of tiny matrices."""
    missing = "no batched product of tiny matrices was recognised"
    chain = request.seen("product", missing, _numbers)[0]

    def sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = a[..., :1] * b[..., :1, :]
        for index in range(1, a.shape[-1]):
            total = total + a[..., index : index + 1] * b[..., index : index + 1, :]
        return total

    return _trial(request, "a @ b", chain, {"element-wise products and sums": sums})


@remedy("pairwise-distance", chains=True)
def broadcast(request: Request) -> Trial | None:
    """Try differences of all points, or for ``p=2`` a product of matrices."""
    chain = request.seen("distance", "no cdist was recognised in the step", _numbers)[0]
    p = chain.given["p"]

    def differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        far = a.unsqueeze(-2) - b.unsqueeze(-3)
        return far.abs().sum(-1) if p == 1 else torch.linalg.vector_norm(far, p, -1)

    ways: dict[str, Two] = {"broadcasting": differences}
    if p == 2:
        mode = "use_mm_for_euclid_dist"
        ways[f"compute_mode={mode!r}"] = partial(torch.cdist, compute_mode=mode)
    return _trial(request, "cdist(a, b)", chain, ways)


def _numbers(chain: Chain) -> int:
    """How many numbers all differences, or all products, are."""
    a, b = chain.given["a"].shape, chain.given["b"].shape
    return int(a.numel() * b[-2 if chain.kind == "distance" else -1])


def _trial(request: Request, title: str, chain: Chain, ways: dict[str, Two]) -> Trial:
    a, b = chain.given["a"], chain.given["b"]
    root = chain.copies[a.root]
    check_room(root.device, 3 * root.element_size() * _numbers(chain))
    now, inputs = chain.again(chain.end), chain.again(a, b)
    runs: dict[str, Callable[[], torch.Tensor]] = {AS_IT_IS: lambda: now()[0]}
    for name, way in ways.items():
        runs[name] = partial(lambda way: way(*inputs()), way)
    variants = request.variants([chain], lambda _: runs)
    shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
    return Trial(f"{title} of {shapes}, forward and backward", variants, allowed_s=CHAINS_S)
