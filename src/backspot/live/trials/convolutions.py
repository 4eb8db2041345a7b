"""A 3-D depthwise convolution in forms whose gradients have other kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch.nn import functional

from backspot.live.trials.chains import Chain, Chains, Node, seen
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, MOST_CHAINS, Asked, Trial, remedy
from backspot.live.trials.twins import check_room


@seen(torch.conv3d)
def _convolved(chains: Chains, end: Node) -> None:
    given = dict(zip(("x", "weight", "bias"), end.inner, strict=False))
    if len(given) < 2 or any(isinstance(one, torch.Tensor) for one in end.kwargs.values()):
        return
    x, weight = given["x"].shape, given["weight"].shape
    if len(x) == 5 and end.option("groups", 6, 1) == x[1] > weight[1] == 1:
        chains.keep("depthwise", end, given)


@remedy("slow-convolution", chains=True)
def other_forms(asked: Asked) -> Trial | None:
    """Try a dense convolution, and 2-D depthwise ones that are summed over the kernel's frames."""
    missing = "no 3-D depthwise convolution was recognised in the step"
    found = asked.seen("depthwise", missing, lambda one: one.given["x"].shape.numel())
    found = found[:MOST_CHAINS]
    variants = asked.variants(found, _forms, room=4)
    shapes = [tuple(found[0].given[name].shape) for name in ("weight", "x")]
    what = f"a depthwise convolution of {shapes[0]} over {shapes[1]}, forward and backward"
    return Trial(what, variants, allowed_s=CHAINS_S)


def _forms(chain: Chain) -> dict[str, Callable[[], torch.Tensor]]:
    now, given = chain.again(chain.end), chain.again(*chain.given.values())
    stride, padding, dilation = (
        chain.end.option(name, 3 + at, usual)
        for at, (name, usual) in enumerate((("stride", 1), ("padding", 0), ("dilation", 1)))
    )
    x, weight = chain.given["x"], chain.given["weight"]
    channels = x.shape[1]

    def dense() -> torch.Tensor:
        x, weight, *bias = given()
        full = torch.diag_embed(weight.squeeze(1).permute(1, 2, 3, 0)).permute(3, 4, 0, 1, 2)
        return functional.conv3d(x, full, *(bias or [None]), stride, padding, dilation)

    def by_frames() -> torch.Tensor:
        x, weight, *bias = given()
        depth, *plane = (padding,) * 3 if isinstance(padding, int) else padding
        x = functional.pad(x, (0, 0, 0, 0, depth, depth)).transpose(1, 2)
        frames = x.shape[1] - weight.shape[2] + 1
        parts = (
            functional.conv2d(
                x[:, at : at + frames].flatten(0, 1), frame, padding=plane, groups=channels
            )
            for at, frame in enumerate(weight.unbind(2))
        )
        made = reduce(torch.add, parts).unflatten(0, (-1, frames)).transpose(1, 2)
        return made + bias[0].view(-1, 1, 1, 1) if bias else made

    ways: dict[str, Callable[[], torch.Tensor]] = {AS_IT_IS: lambda: now()[0]}
    if weight.shape[0] == channels:
        root = chain.copies[x.root]
        check_room(root.device, 3 * root.element_size() * channels * weight.shape.numel())
        ways["a dense convolution"] = dense
    if {stride, dilation} <= {1, (1, 1, 1)} and not isinstance(padding, str):
        ways["2-D depthwise convolutions of its frames"] = by_frames
    return ways
