"""Chains of pointwise functions, and the one function that computes the same.

What a chain computes is recognised by its numbers, not by its operators: each function that it
could be is given the first rows of the step's own tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch.nn import functional

from backspot.live.trials.chains import POINTWISE, Chain, Chains, Node, seen
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, Asked, Trial, remedy
from backspot.live.trials.twins import Refused

_POINTWISE = {*POINTWISE}
_CHAIN, _LONGEST = 3, 24
"""How many pointwise functions make a chain."""
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


@seen()
def _used(chains: Chains, node: Node) -> None:
    """Keep chains of which another function uses what they have made."""
    if node.function in _POINTWISE:
        return
    for end in node.inner:
        if end.function in _POINTWISE and not end.is_used:
            end.is_used = True
            nodes, enough = _made(end)
            if enough:
                functions = tuple(one.function for one in nodes[: next(iter(enough.values()))])
                weights = [part for one in nodes for part in one.inner if _is_weight(part)]
                given = {"from": [*enough], "counts": enough, "weights": weights}
                given["nodes"] = dict.fromkeys(nodes)  # keys, so that they are not copied
                chains.keep("pointwise", end, given, key=functions)


def _made(end: Node) -> tuple[list[Node], dict[Node, int]]:
    """Return the nodes that make one, the last one first, and each tensor that is enough for it.

    With each of these comes how many of the nodes it takes from there.
    """
    nodes, enough, edge = list[Node](), dict[Node, int](), {end}
    while inner := [one for one in edge if one.function in _POINTWISE]:
        last = max(inner, key=lambda one: one.number)
        edge.remove(last)
        nodes.append(last)
        edge.update(one for one in last.inner if not _is_weight(one))
        if len(edge) == 1 and len(nodes) >= _CHAIN:
            enough[next(iter(edge))] = len(nodes)
        if len(nodes) == _LONGEST:
            break
    return nodes, {node: count for node, count in enough.items() if node.tensor() is not None}


def _is_weight(node: Node) -> bool:
    return isinstance(node.tensor(), torch.nn.Parameter)


@remedy("pointwise-chain", chains=True)
def one_function(asked: Asked) -> Trial | None:
    """Try the function of PyTorch that computes the same as a chain, for the largest such chain."""
    missing = "no chain of pointwise functions was recognised in the step"

    def work(chain: Chain) -> int:
        return len(chain.given["nodes"]) * int(chain.end.shape.numel())

    for chain in asked.seen("pointwise", missing, work):
        for start, count in chain.given["counts"].items():
            if found := _same(chain, start):
                return _trial(asked, chain, start, count, *found)
    raise Refused("no function of PyTorch is known that computes the same as its chains")


def _trial(asked: Asked, chain: Chain, start: Node, count: int, name: str, function: One) -> Trial:
    again, given = chain.again(chain.end, given=[start]), chain.again(start)
    variants = {
        AS_IT_IS: [asked.piece(chain, lambda: again(*given())[0])],
        name: [asked.piece(chain, lambda: function(*given()))],
    }
    what = f"{count} pointwise functions on {tuple(start.shape)}, forward and backward"
    return Trial(what, variants, allowed_s=CHAINS_S)


def _same(chain: Chain, start: Node) -> tuple[str, One] | None:
    """Return the function that computes the same of the first rows, or comes nearest to it."""
    with torch.no_grad():
        rows = chain.again(start)()[0][:_ROWS]
        (expected,) = chain.again(chain.end, given=[start])(rows)
        nearest, found = _SAME.get(expected.dtype, 0.02) * float(expected.abs().max()), None
        weights = [chain.copies[one] for one in dict.fromkeys(chain.given["weights"])]
        for name, function in _meant(
            [*chain.given["nodes"]], rows.shape[-1], weights, expected.dtype
        ):
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
