"""Chains of pointwise functions, and the one function that computes the same.

What a chain computes is told by its numbers, not by its operators: each function that could be
meant is given the first rows of the step's own tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch.nn import functional

from backspot.live.trials.chains import Chain, Node
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, Asked, Trial, piece_of, remedy
from backspot.live.trials.twins import Refused

_ROWS = 4
_LARGEST_EPS = 1e-2
_SAME = {torch.float32: 1e-3, torch.float64: 1e-3}
"""What results may differ by, as a share of the largest number; for narrow types 2%."""
One = Callable[[torch.Tensor], torch.Tensor]
_FUNCTIONS: dict[str, One] = {
    'F.gelu(approximate="tanh")': partial(functional.gelu, approximate="tanh"),
    "F.gelu": functional.gelu,
    "F.silu": functional.silu,
    "F.mish": functional.mish,
}


@remedy("pointwise-chain", chains=True)
def one_function(asked: Asked) -> Trial | None:
    """Try the function of PyTorch that computes the same as a chain, for the largest such chain."""
    missing = "no chain of pointwise functions was recognised in the step"
    for chain in sorted(asked.seen("pointwise", missing), key=_work):
        copies = chain.given["copies"]
        for start, count in chain.given["from"].items():
            nodes = chain.given["nodes"][:count]
            if found := _same(chain, nodes, start):
                name, function = found
                ways = {AS_IT_IS: _again(nodes, start, copies), name: function}
                x, leaves = copies[start], [*copies.values()]
                variants = {
                    name: [piece_of(chain, partial(way, x), leaves)] for name, way in ways.items()
                }
                what = f"{count} pointwise functions on {tuple(x.shape)}"
                return Trial(f"{what}, forward and backward", variants, allowed_s=CHAINS_S)
    raise Refused("no function of PyTorch is known that computes the same as its chains")


def _work(chain: Chain) -> int:
    start = next(iter(chain.given["from"]))
    return -chain.count * len(chain.given["nodes"]) * int(chain.given["copies"][start].numel())


def _again(nodes: Sequence[Node], start: Node, copies: Mapping[Node, torch.Tensor]) -> One:
    """Return what makes the first of the nodes of a tensor in place of ``start``."""
    order = [(one, one.function, one.parts, one.kwargs) for one in reversed(nodes)]

    def run(x: torch.Tensor) -> torch.Tensor:
        made: dict[Any, Any] = {**copies, start: x}
        for node, function, parts, kwargs in order:
            given = [made[one] if isinstance(one, Node) else one for one in parts]
            made[node] = function(*given, **kwargs)  # type: ignore[misc]
        result: torch.Tensor = made[nodes[0]]
        return result

    return run


def _same(chain: Chain, nodes: Sequence[Node], start: Node) -> tuple[str, One] | None:
    """Return the function that computes the same of the first rows, or comes nearest to it."""
    copies = {node: one.detach() for node, one in chain.given["copies"].items()}
    parts = [one for node in nodes for one in node.parts if isinstance(one, Node)]
    weights = [chain.given["copies"][one] for one in parts if one.is_weight and one in copies]
    rows = copies[start][:_ROWS]
    with torch.no_grad():
        expected = _again(nodes, start, copies)(rows)
        nearest, found = _SAME.get(expected.dtype, 0.02) * float(expected.abs().max()), None
        for name, function in _meant(nodes, rows.shape[-1], weights, expected.dtype):
            made = function(rows)
            if made.shape == expected.shape:
                far = float((made.to(expected.dtype) - expected).abs().max())
                if far < nearest:
                    nearest, found = far, (name, function)
    return found


def _meant(
    nodes: Sequence[Node], width: int, weights: Sequence[torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, One]]:
    yield from _FUNCTIONS.items()
    if not any(getattr(one.function, "__name__", "") in ("mean", "var") for one in nodes):
        return
    numbers = [one for node in nodes for one in node.parts if isinstance(one, float)]
    eps = next((one for one in numbers if 0 < one < _LARGEST_EPS), 1e-6)
    wide = [one for one in weights if one.shape == (width,)]
    for count in range(min(len(wide), 2), -1, -1):
        for some in permutations(wide, count):
            if count < 2 and hasattr(functional, "rms_norm"):
                yield "F.rms_norm", _normed(functional.rms_norm, width, some, eps, dtype)
            yield "F.layer_norm", _normed(functional.layer_norm, width, some, eps, dtype)


def _normed(
    function: Any, width: int, weights: Sequence[torch.Tensor], eps: float, dtype: torch.dtype
) -> One:
    def run(x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = function(x, (width,), *weights, eps=eps).to(dtype)
        return normed

    return run
