"""Models of many kinds for ``gpu_truth.py``: each a module and the loss of one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import (
    Context,
    ResidualMlp,
    TwoStreams,
    gpt2_loss,
    resnet,
    timm_model,
)
from benchmarks.models import (
    gpt2 as make_gpt2,
)

__all__ = ["HOST", "MODELS", "Build"]


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


MODELS: dict[str, Callable[[Context], Build]] = {}
_Make = Callable[[Context], Build]


def _model(make: _Make) -> _Make:
    MODELS[make.__name__] = make
    return make


def _classifier(
    context: Context, model: nn.Module, batch: int, *, side: int = 224, bf16: bool = True
) -> Build:
    channels_last = any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) and bf16
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.to(context.device, memory_format=layout).train()
    side = context.pick(side, 64)
    images = context.randn(context.pick(batch, 2), 3, side, side).contiguous(memory_format=layout)
    labels = context.randint(10, len(images))

    def loss() -> torch.Tensor:
        with context.bf16(bf16):
            return functional.cross_entropy(model(images), labels)

    return Build(model, loss)


@_model
def vit_patch_drop(context: Context) -> Build:
    torch.use_deterministic_algorithms(True)
    model = timm_model(context, "vit_base_patch16_224", num_classes=10, patch_drop_rate=0.5)
    return _classifier(context, model, 128)


@_model
def vit(context: Context) -> Build:
    return _classifier(context, timm_model(context, "vit_base_patch16_224", num_classes=10), 96)


@_model
def vit_launch_bound(context: Context) -> Build:
    return _classifier(context, timm_model(context, "vit_small_patch16_224", num_classes=10), 2)


@_model
def resnet50_128(context: Context) -> Build:
    return _classifier(context, resnet(context, 50, classes=10), 128)


@_model
def resnet50_channels_last(context: Context) -> Build:
    return _classifier(context, resnet(context, 50, classes=10), 192)


@_model
def resnet50_fp32(context: Context) -> Build:
    return _classifier(context, resnet(context, 50, classes=10), 64, bf16=False)


@_model
def convnext(context: Context) -> Build:
    return _classifier(context, timm_model(context, "convnext_tiny", num_classes=10), 96)


@_model
def swin(context: Context) -> Build:
    return _classifier(
        context, timm_model(context, "swin_tiny_patch4_window7_224", num_classes=10), 96
    )


@_model
def efficientnet(context: Context) -> Build:
    return _classifier(context, timm_model(context, "efficientnet_b0", num_classes=10), 192)


@_model
def segmentation(context: Context) -> Build:
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


def _gpt2(context: Context, *, checkpointed: bool) -> Build:
    model = make_gpt2(context, layers=context.pick(8, 2))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Build(model, gpt2_loss(context, model, 24), depth=3 if checkpointed else None)


@_model
def gpt2(context: Context) -> Build:
    return _gpt2(context, checkpointed=False)


@_model
def gpt2_checkpointed(context: Context) -> Build:
    return _gpt2(context, checkpointed=True)


@_model
def mlp_wide(context: Context) -> Build:
    model = ResidualMlp(context.pick(4096, 16), 8).to(context.device)
    inputs = context.randn(context.pick(8192, 4), context.pick(4096, 16))

    def loss() -> torch.Tensor:
        with context.bf16():
            return model(inputs).float().square().mean()

    return Build(model, loss)


@_model
def mlp_launch_bound(context: Context) -> Build:
    model = nn.Sequential(*(ResidualMlp(64, 6) for _ in range(12))).to(context.device)
    inputs = context.randn(8, 64)
    return Build(model, lambda: model(inputs).square().mean())


@_model
def attention_math(context: Context) -> Build:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = timm_model(context, "vit_base_patch16_224", num_classes=10)
    build = _classifier(context, model, 64)

    def loss() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return build.loss()

    return Build(model, loss)


@_model
def lstm(context: Context) -> Build:
    width = context.pick(1024, 16)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(width, width, batch_first=True)
            self.second = nn.LSTM(width, width, batch_first=True)
            self.head = nn.Linear(width, 1000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(x)[0])[0])

    model = Model().to(context.device)
    inputs = context.randn(context.pick(256, 2), context.pick(128, 8), width)
    return Build(model, lambda: model(inputs).square().mean())


@_model
def embedding_duplicates(context: Context) -> Build:
    rows, width = context.pick(50000, 100), context.pick(768, 16)
    model = nn.Sequential(nn.Embedding(rows, width), nn.LayerNorm(width), ResidualMlp(width, 3))
    model.to(context.device)
    tokens = context.randint(4, context.pick(128, 2), context.pick(512, 8))
    return Build(model, lambda: model(tokens).square().mean())


class _Sync(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1.0 if gradient.sum().item() > -1e30 else 0.0)


class _Syncing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sync.apply(x)


@_model
def sync_in_backward(context: Context) -> Build:
    width = context.pick(2048, 16)
    model = nn.Sequential()
    for index in range(4):
        model.add_module(f"mlp{index}", ResidualMlp(width, 4))
        model.add_module(f"sync{index}", _Syncing())
    model.to(context.device)
    inputs = context.randn(context.pick(8192, 4), width)
    return Build(model, lambda: model(inputs).square().mean())


class _Compiled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.linear(self.norm(x)))


@_model
def compiled_blocks(context: Context) -> Build:
    width = context.pick(2048, 16)
    model = nn.Sequential(*(_Compiled(width) for _ in range(4)), nn.Linear(width, width))
    model.to(context.device)
    for index in range(4):
        model[index].compile()
    inputs = context.randn(context.pick(8192, 4), width)
    return Build(model, lambda: model(inputs).square().mean())


@_model
def two_streams(context: Context) -> Build:
    """Kernels of two modules run at once: sums are compared, the clock is not."""
    model = TwoStreams(context.pick(2048, 16), 4, context.device).to(context.device)
    inputs = context.randn(context.pick(4096, 4), context.pick(2048, 16))
    return Build(model, lambda: model(inputs).square().mean(), clock=False)


# Models that wait for the host, by blocks, so that each is above 2% of the backward ---------------


def _blocks(build: Build, depth: int) -> Build:
    return replace(build, depth=depth, levels=depth)


@_model
def vit_host(context: Context) -> Build:
    model = timm_model(context, "vit_base_patch16_224", num_classes=10)
    return _blocks(_classifier(context, model, 2), 2)


@_model
def resnet50_host(context: Context) -> Build:
    return _blocks(_classifier(context, resnet(context, 50, classes=10), 8), 2)


@_model
def gpt2_host(context: Context) -> Build:
    model = make_gpt2(context, layers=context.pick(8, 2))
    return Build(model, gpt2_loss(context, model, 1, length=128), depth=3, levels=2)


@_model
def convnext_host(context: Context) -> Build:
    return _blocks(_classifier(context, timm_model(context, "convnext_tiny", num_classes=10), 4), 4)


@_model
def swin_host(context: Context) -> Build:
    model = timm_model(context, "swin_tiny_patch4_window7_224", num_classes=10)
    return _blocks(_classifier(context, model, 4), 4)


@_model
def efficientnet_host(context: Context) -> Build:
    return _blocks(
        _classifier(context, timm_model(context, "efficientnet_b0", num_classes=10), 8), 3
    )


@_model
def mlp_host(context: Context) -> Build:
    return _blocks(mlp_launch_bound(context), 1)


HOST = (*(name for name in MODELS if name.endswith("_host")), "resnet50_128")
"""The cases with the name ``HOST``."""
