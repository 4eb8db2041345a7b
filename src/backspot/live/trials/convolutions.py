"""A 3-D depthwise convolution in forms whose gradients have other kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch.nn import functional

from backspot.live.trials.chains import Chain, Chains, Node, seen
from backspot.live.trials.trial import AS_IT_IS, CHAINS_S, MOST_CHAINS, Request, Trial, remedy
from backspot.live.trials.twins import check_room


@seen(torch.conv3d)
def _convolved(chains: Chains, end: Node) -> None:
    inputs = dict(zip(("x", "weight", "bias"), end.inner, strict=False))
    if len(inputs) < 2 or any(isinstance(value, torch.Tensor) for value in end.kwargs.values()):
        return
    x, weight = inputs["x"].shape, inputs["weight"].shape
    if len(x) == 5 and end.option("groups", 6, 1) == x[1] > weight[1] == 1:
        chains.keep("depthwise", end, inputs)


@remedy("slow-convolution", chains=True)
def other_forms(request: Request) -> Trial | None:
    """Try a dense convolution, and 2-D depthwise ones that are summed over the kernel's frames."""
    missing = "no 3-D depthwise convolution was recognised in the step"
    chains = request.seen("depthwise", missing, lambda chain: chain.given["x"].shape.numel())
    chains = chains[:MOST_CHAINS]
    variants = request.variants(chains, _forms, room=4)
    shapes = [tuple(chains[0].given[name].shape) for name in ("weight", "x")]
    title = f"a depthwise convolution of {shapes[0]} over {shapes[1]}, forward and backward"
    return Trial(title, variants, allowed_s=CHAINS_S)


def _forms(chain: Chain) -> dict[str, Callable[[], torch.Tensor]]:
    now, inputs = chain.again(chain.end), chain.again(*chain.given.values())
    stride, padding, dilation = (
        chain.end.option(name, 3 + index, usual)
        for index, (name, usual) in enumerate((("stride", 1), ("padding", 0), ("dilation", 1)))
    )
    x, weight = chain.given["x"], chain.given["weight"]
    channels = x.shape[1]

    def dense() -> torch.Tensor:
        x, weight, *bias = inputs()
        full = torch.diag_embed(weight.squeeze(1).permute(1, 2, 3, 0)).permute(3, 4, 0, 1, 2)
        return functional.conv3d(x, full, *(bias or [None]), stride, padding, dilation)

    def by_frames() -> torch.Tensor:
        x, weight, *bias = inputs()
        depth, *plane = (padding,) * 3 if isinstance(padding, int) else padding
        x = functional.pad(x, (0, 0, 0, 0, depth, depth)).transpose(1, 2)
        frames = x.shape[1] - weight.shape[2] + 1
        convolved = (
            functional.conv2d(
                x[:, index : index + frames].flatten(0, 1), frame, padding=plane, groups=channels
            )
            for index, frame in enumerate(weight.unbind(2))
        )
        volume = reduce(torch.add, convolved).unflatten(0, (-1, frames)).transpose(1, 2)
        return volume + bias[0].view(-1, 1, 1, 1) if bias else volume

    ways: dict[str, Callable[[], torch.Tensor]] = {AS_IT_IS: lambda: now()[0]}
    if weight.shape[0] == channels:
        root = chain.copies[x.root]
        check_room(root.device, 3 * root.element_size() * channels * weight.shape.numel())
        ways["a dense convolution"] = dense
    if {stride, dilation} <= {1, (1, 1, 1)} and not isinstance(padding, str):
        ways["2-D depthwise convolutions of its frames"] = by_frames
    return ways
