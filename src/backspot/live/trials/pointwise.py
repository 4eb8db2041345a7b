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
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, Request, Trial, remedy
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
                functions = tuple(node.function for node in nodes[: next(iter(enough.values()))])
                weights = [weight for node in nodes for weight in node.inner if _is_weight(weight)]
                inputs = {"from": [*enough], "counts": enough, "weights": weights}
                inputs["nodes"] = dict.fromkeys(nodes)  # keys, so that they are not copied
                chains.keep("pointwise", end, inputs, key=functions)


def _made(end: Node) -> tuple[list[Node], dict[Node, int]]:
    """Return the nodes that make one, the last one first, and each tensor that is enough for it.

    With each of these comes how many of the nodes it takes from there.
    """
    nodes, enough, edge = list[Node](), dict[Node, int](), {end}
    while inner := [node for node in edge if node.function in _POINTWISE]:
        last = max(inner, key=lambda node: node.number)
        edge.remove(last)
        nodes.append(last)
        edge.update(node for node in last.inner if not _is_weight(node))
        if len(edge) == 1 and len(nodes) >= _CHAIN:
            enough[next(iter(edge))] = len(nodes)
        if len(nodes) == _LONGEST:
            break
    return nodes, {node: count for node, count in enough.items() if node.tensor() is not None}


def _is_weight(node: Node) -> bool:
    return isinstance(node.tensor(), torch.nn.Parameter)


@remedy("pointwise-chain", chains=True)
def one_function(request: Request) -> Trial | None:
    """Try the function of PyTorch that computes the same as a chain, for the largest such chain."""
    missing = "the trial could not take the chain out of the step"

    def work(chain: Chain) -> int:
        return len(chain.given["nodes"]) * int(chain.end.shape.numel())

    for chain in request.seen("pointwise", missing, work):
        for start, count in chain.given["counts"].items():
            if function := _same(chain, start):
                return _trial(request, chain, start, count, *function)
    raise Refused("no function of PyTorch is known that computes the same as its chains")


def _trial(
    request: Request, chain: Chain, start: Node, count: int, name: str, function: One
) -> Trial:
    again, inputs = chain.again(chain.end, given=[start]), chain.again(start)
    variants = {
        AS_IT_IS: [request.piece(chain, lambda: again(*inputs())[0])],
        name: [request.piece(chain, lambda: function(*inputs()))],
    }
    title = f"{count} pointwise functions on {tuple(start.shape)}, forward and backward"
    return Trial(title, variants, allowed_s=CHAINS_S)


def _same(chain: Chain, start: Node) -> tuple[str, One] | None:
    """Return the function that computes the same of the first rows, or comes nearest to it."""
    with torch.no_grad():
        rows = chain.again(start)()[0][:_ROWS]
        (expected,) = chain.again(chain.end, given=[start])(rows)
        nearest, nearest_function = (
            _SAME.get(expected.dtype, 0.02) * float(expected.abs().max()),
            None,
        )
        weights = [chain.copies[weight] for weight in dict.fromkeys(chain.given["weights"])]
        for name, function in _meant(
            [*chain.given["nodes"]], rows.shape[-1], weights, expected.dtype
        ):
            output = function(rows)
            if output.shape == expected.shape:
                far = float((output.to(expected.dtype) - expected).abs().max())
                if far < nearest:
                    nearest, nearest_function = far, (name, function)
    return nearest_function


def _meant(
    nodes: Sequence[Node], width: int, weights: Sequence[torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, One]]:
    yield from _FUNCTIONS.items()
    if not any(getattr(node.function, "__name__", "") in ("mean", "var") for node in nodes):
        return
    numbers = [number for node in nodes for number in node.parts if isinstance(number, float)]
    eps = next((number for number in numbers if 0 < number < _LARGEST_EPS), 1e-6)
    wide = [weight for weight in weights if weight.shape == (width,)]
    for count in range(min(len(wide), 2), -1, -1):
        for chosen in permutations(wide, count):
            if count < 2 and hasattr(functional, "rms_norm"):
                yield "F.rms_norm", _normed(functional.rms_norm, width, chosen, eps, dtype)
            yield "F.layer_norm", _normed(functional.layer_norm, width, chosen, eps, dtype)


def _normed(
    function: Any, width: int, weights: Sequence[torch.Tensor], eps: float, dtype: torch.dtype
) -> One:
    def run(x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = function(x, (width,), *weights, eps=eps).to(dtype)
        return normed

    return run
