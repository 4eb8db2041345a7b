"""Models of many kinds whose numbers are compared: each a module and the loss of one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.models import (
    Context,
    Layer,
    ResidualMlp,
    TwoStreams,
    custom,
    gpt2,
    gpt2_loss,
    resnet,
    timm_model,
)


@dataclass
class Build:
    """A model and its loss.

    Attributes:
        model: what is instrumented.
        loss: runs the forward.
        depth: compare wall times of subtrees at this depth (recomputation runs a whole block's
            forward inside the first of its nodes, so that only the block's sum can be compared).
        levels: the same depth for ``locate``, where it differs: containers of layers that are never
            called are no level there.
        clock: whether events on one stream can time it at all.
    """

    model: nn.Module
    loss: Callable[[], torch.Tensor]
    depth: int | None = None
    levels: int | None = None
    clock: bool = True

    def __post_init__(self) -> None:
        self.levels = self.levels or self.depth

    def step(self) -> None:
        """A step without an optimizer."""
        self.model.zero_grad()
        self.loss().backward()


def _squares(context: Context, model: nn.Module, inputs: torch.Tensor, **more: Any) -> Build:
    model.to(context.device)
    return Build(model, lambda: model(inputs).float().square().mean(), **more)


def _classifier(
    context: Context, model: nn.Module, batch: int, *, bf16: bool = True, **more: Any
) -> Build:
    channels_last = any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) and bf16
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.to(context.device, memory_format=layout).train()
    side = context.pick(224, 64)
    images = context.randn(context.pick(batch, 2), 3, side, side).contiguous(memory_format=layout)
    labels = context.randint(10, len(images))

    def loss() -> torch.Tensor:
        with context.bf16(bf16):
            return functional.cross_entropy(model(images), labels)

    return Build(model, loss, **more)


def _timm(name: str, batch: int, **more: Any) -> Callable[[Context], Build]:
    return lambda context: _classifier(
        context, timm_model(context, name, num_classes=10), batch, **more
    )


def _resnet50(batch: int, **more: Any) -> Callable[[Context], Build]:
    return lambda context: _classifier(context, resnet(context, 50, classes=10), batch, **more)


def _vit_patch_drop(context: Context) -> Build:
    torch.use_deterministic_algorithms(True)
    model = timm_model(context, "vit_base_patch16_224", num_classes=10, patch_drop_rate=0.5)
    return _classifier(context, model, 128)


def _attention_math(context: Context) -> Build:
    build = _timm("vit_base_patch16_224", 64)(context)
    loss = build.loss

    def by_formula() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return loss()

    return replace(build, loss=by_formula)


def _segmentation(context: Context) -> Build:
    from torchvision.models.segmentation import fcn_resnet50

    model = fcn_resnet50(weights=None, weights_backbone=None, num_classes=21)
    model.to(context.device, memory_format=torch.channels_last).train()
    side = context.pick(384, 32)
    images = context.randn(context.pick(16, 2), 3, side, side)
    labels = context.randint(21, len(images), side, side)

    def loss() -> torch.Tensor:
        with context.bf16():
            return functional.cross_entropy(model(images)["out"], labels)

    return Build(model, loss)


def _gpt2(
    context: Context, batch: int = 24, *, checkpointed: bool = False, length: int = 512, **more: Any
) -> Build:
    model = gpt2(context, layers=context.pick(8, 2))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Build(model, gpt2_loss(context, model, batch, length=length), **more)


def _mlp_wide(context: Context) -> Build:
    model = ResidualMlp(context.pick(4096, 16), 8).to(context.device)
    inputs = context.randn(context.pick(8192, 4), context.pick(4096, 16))

    def loss() -> torch.Tensor:
        with context.bf16():
            return model(inputs).float().square().mean()

    return Build(model, loss)


def _mlp_launch_bound(context: Context, **more: Any) -> Build:
    model = nn.Sequential(*(ResidualMlp(64, 6) for _ in range(12)))
    return _squares(context, model, context.randn(8, 64), **more)


class _Lstms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LSTM(width, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)[0])[0])


def _lstm(context: Context) -> Build:
    width = context.pick(1024, 16)
    inputs = context.randn(context.pick(256, 2), context.pick(128, 8), width)
    return _squares(context, _Lstms(width), inputs)


def _embedding_duplicates(context: Context) -> Build:
    rows, width = context.pick(50000, 100), context.pick(768, 16)
    model = nn.Sequential(nn.Embedding(rows, width), nn.LayerNorm(width), ResidualMlp(width, 3))
    return _squares(context, model, context.randint(4, context.pick(128, 2), context.pick(512, 8)))


def _sync_in_backward(context: Context) -> Build:
    looking = custom(torch.clone, lambda g, _: g * (1.0 if g.sum().item() > -1e30 else 0.0))
    width = context.pick(2048, 16)
    model = nn.Sequential()
    for index in range(4):
        model.add_module(f"mlp{index}", ResidualMlp(width, 4))
        model.add_module(f"sync{index}", Layer(looking))
    return _squares(context, model, context.randn(context.pick(8192, 4), width))


class _Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.linear(self.norm(x)))


def _compiled_blocks(context: Context) -> Build:
    width = context.pick(2048, 16)
    model = nn.Sequential(*(_Normed(width) for _ in range(4)), nn.Linear(width, width))
    for index in range(4):
        model[index].compile()
    return _squares(context, model, context.randn(context.pick(8192, 4), width))


def _two_streams(context: Context) -> Build:
    """Kernels of two modules run at once: sums are compared, the clock is not."""
    width = context.pick(2048, 16)
    model = TwoStreams(width, 4, context.device)
    return _squares(context, model, context.randn(context.pick(4096, 4), width), clock=False)


MODELS: dict[str, Callable[[Context], Build]] = {
    "vit_patch_drop": _vit_patch_drop,
    "vit": _timm("vit_base_patch16_224", 96),
    "vit_launch_bound": _timm("vit_small_patch16_224", 2),
    "resnet50_128": _resnet50(128),
    "resnet50_channels_last": _resnet50(192),
    "resnet50_fp32": _resnet50(64, bf16=False),
    "convnext": _timm("convnext_tiny", 96),
    "swin": _timm("swin_tiny_patch4_window7_224", 96),
    "efficientnet": _timm("efficientnet_b0", 192),
    "segmentation": _segmentation,
    "gpt2": _gpt2,
    "gpt2_checkpointed": partial(_gpt2, checkpointed=True, depth=3),
    "mlp_wide": _mlp_wide,
    "mlp_launch_bound": _mlp_launch_bound,
    "attention_math": _attention_math,
    "lstm": _lstm,
    "embedding_duplicates": _embedding_duplicates,
    "sync_in_backward": _sync_in_backward,
    "compiled_blocks": _compiled_blocks,
    "two_streams": _two_streams,
    # Models that wait for the host, by blocks, so that each is above 2% of the backward
    "vit_host": _timm("vit_base_patch16_224", 2, depth=2),
    "resnet50_host": _resnet50(8, depth=2),
    "gpt2_host": partial(_gpt2, batch=1, length=128, depth=3, levels=2),
    "convnext_host": _timm("convnext_tiny", 4, depth=4),
    "swin_host": _timm("swin_tiny_patch4_window7_224", 4, depth=4),
    "efficientnet_host": _timm("efficientnet_b0", 8, depth=3),
    "mlp_host": partial(_mlp_launch_bound, depth=1),
}

HOST = (*(name for name in MODELS if name.endswith("_host")), "resnet50_128")
"""The cases with the name ``HOST``."""
