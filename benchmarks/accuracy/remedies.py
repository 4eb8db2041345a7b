"""Known remedies for ``predicted_saving.py``: each builds its model before and after.

Sizes are such that a step is some tens of milliseconds on a large GPU and the GPU is what it waits
for, where the remedy is not about the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.models import (
    Attention,
    Checkpointed,
    Context,
    IndexPatchDropout,
    ResidualMlp,
    patch_drop_vit,
    training_step,
)

__all__ = ["REMEDIES", "Remedy", "Side", "describe", "remedy", "side_of"]


@dataclass
class Side:
    """One of the two builds."""

    model: nn.Module
    step: Callable[[], None]


@dataclass
class Remedy:
    """What changes.

    Attributes:
        about: in words.
        changed: paths of the changed subtrees.
        neighbours: paths of subtrees that hand tensors to these or take them; ``""`` is the root's
            own row, not its subtree.
        build: makes the model with (true) or without the remedy.
    """

    about: str
    changed: tuple[str, ...]
    neighbours: tuple[str, ...]
    build: Callable[[Context, bool], Side]


REMEDIES: dict[str, Remedy] = {}
_Build = Callable[[Context, bool], Side]


def remedy(
    about: str, changed: tuple[str, ...], neighbours: tuple[str, ...]
) -> Callable[[_Build], _Build]:
    def register(build: _Build) -> _Build:
        REMEDIES[build.__name__] = Remedy(about, changed, neighbours, build)
        return build

    return register


def side_of(
    context: Context, model: nn.Module, forward: Callable[[], torch.Tensor], *, bf16: bool = True
) -> Side:
    step = training_step(
        model, lambda: forward().float().square().mean(), around=lambda: context.bf16(bf16)
    )
    return Side(model, step)


# Patch dropout -----------------------------------------------------------------------------------


def _patch_drop(context: Context, after: bool) -> Side:
    model = patch_drop_vit(context, depth=context.pick(6, 2))
    if after:
        model.patch_drop = IndexPatchDropout()
    side = context.pick(224, 32)
    images = context.randn(context.pick(192, 4), 3, side, side)
    return side_of(context, model, lambda: model(images))


@remedy("PatchDropout: gather → indexing, deterministic", ("patch_drop",), ("pos_drop", ""))
def patch_drop_deterministic(context: Context, after: bool) -> Side:
    torch.use_deterministic_algorithms(True)
    return _patch_drop(context, after)


@remedy("PatchDropout: gather → indexing", ("patch_drop",), ("pos_drop", ""))
def patch_drop(context: Context, after: bool) -> Side:
    return _patch_drop(context, after)


# Transformers ------------------------------------------------------------------------------------


class _WrittenOutAttention(Attention):
    """Attention as three operations in the type of its input."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype) @ v


class _EagerNorm(nn.Module):
    """LayerNorm written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + 1e-5) * self.weight + self.bias


class _TanhGelu(nn.Module):
    """GELU written out, as many older models have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3))))


class _Block(nn.Module):
    def __init__(
        self, width: int, *, fused: bool = True, eager_norm: bool = False, eager_gelu: bool = False
    ) -> None:
        super().__init__()
        self.norm1 = _EagerNorm(width) if eager_norm else nn.LayerNorm(width)
        self.attn = (Attention if fused else _WrittenOutAttention)(width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = _TanhGelu() if eager_gelu else nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class _Tower(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _tower(context: Context, blocks: Callable[[int], list[nn.Module]]) -> Side:
    model = _Tower(blocks(context.pick(768, 64))).to(context.device)
    inputs = context.randn(context.pick(32, 2), context.pick(1024, 16), context.pick(768, 64))
    return side_of(context, model, lambda: model(inputs))


@remedy(
    "attention written out → fused, in two of six blocks",
    ("blocks.2.attn", "blocks.3.attn"),
    ("blocks.2.norm1", "blocks.3.norm1", "=blocks.2", "=blocks.3"),
)
def attention_fused(context: Context, after: bool) -> Side:
    return _tower(context, lambda w: [_Block(w, fused=after or i not in (2, 3)) for i in range(6)])


@remedy(
    "LayerNorm written out → nn.LayerNorm, in all six blocks",
    tuple(f"blocks.{i}.norm1" for i in range(6)),
    (*(f"blocks.{i}.attn.qkv" for i in range(6)), *(f"={f'blocks.{i}'}" for i in range(6))),
)
def layer_norm_fused(context: Context, after: bool) -> Side:
    return _tower(context, lambda w: [_Block(w, eager_norm=not after) for _ in range(6)])


@remedy(
    "GELU written out → nn.GELU, in all six blocks",
    tuple(f"blocks.{i}.act" for i in range(6)),
    tuple(f"blocks.{i}.fc{j}" for i in range(6) for j in (1, 2)),
)
def gelu_fused(context: Context, after: bool) -> Side:
    return _tower(context, lambda w: [_Block(w, eager_gelu=not after) for _ in range(6)])


class _InFp32(nn.Module):
    """One block that somebody kept in fp32."""

    def __init__(self, block: nn.Module, device: str) -> None:
        super().__init__()
        self.block = block
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, enabled=False):
            return self.block(x.float())


@remedy(
    "one block of six fp32 → bf16 autocast",
    ("blocks.3",),
    ("blocks.2", "blocks.4"),
)
def block_bf16(context: Context, after: bool) -> Side:
    class Plain(_InFp32):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x)

    kind = Plain if after else _InFp32

    def blocks(width: int) -> list[nn.Module]:
        return [kind(_Block(width), context.device) if i == 3 else _Block(width) for i in range(6)]

    return _tower(context, blocks)


@remedy(
    "checkpointing off in three of six blocks",
    ("blocks.1", "blocks.2", "blocks.3"),
    ("blocks.0", "blocks.4"),
)
def checkpointing_off(context: Context, after: bool) -> Side:
    def blocks(width: int) -> list[nn.Module]:
        return [
            Checkpointed(_Block(width), active=not after) if i in (1, 2, 3) else _Block(width)
            for i in range(6)
        ]

    return _tower(context, blocks)


def describe(name: str) -> dict[str, Any]:
    found = REMEDIES[name]
    return {
        "about": found.about,
        "changed": list(found.changed),
        "neighbours": list(found.neighbours),
    }


@remedy("a stage of convolutions NCHW → channels_last", ("stage",), ("stem", "head"))
def stage_channels_last(context: Context, after: bool) -> Side:
    width = context.pick(256, 16)

    def conv() -> list[nn.Module]:
        return [
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]

    class Stage(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if after:
                x = x.contiguous(memory_format=torch.channels_last)
            return super().forward(x)

    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, width, 4, stride=4))
    stage = Stage(*(layer for _ in range(6) for layer in conv()))
    model.add_module("stage", stage.to(memory_format=torch.channels_last) if after else stage)
    model.add_module("head", nn.Conv2d(width, width, 1))
    model.to(context.device).train()
    side = context.pick(224, 32)
    images = context.randn(context.pick(128, 2), 3, side, side)
    return side_of(context, model, lambda: model(images))


@remedy(
    "a small table's embedding → one-hot product (262,144 tokens of 16 types)",
    ("types",),
    ("body", ""),
)
def embedding_one_hot(context: Context, after: bool) -> Side:
    width = context.pick(1024, 16)

    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hot = x.unsqueeze(-1) == torch.arange(16, device=x.device)
            # In the type that an embedding gives, so that what follows does not run in another one.
            return (hot.to(self.weight.dtype) @ self.weight).to(self.weight.dtype)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.types = OneHot() if after else nn.Embedding(16, width)
            self.body = ResidualMlp(width, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(self.types(x))

    model = Model().to(context.device)
    tokens = context.randint(2, context.pick(512, 4), context.pick(512, 8))
    return side_of(context, model, lambda: model(tokens))


class _Masking(nn.Module):
    """Keeps what is positive: by a boolean index, for which the host waits, or by ``where``."""

    def __init__(self, *, where: bool) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        if self.where:
            return torch.where(mask, x, torch.zeros_like(x))
        kept = torch.zeros_like(x)
        kept[mask] = x[mask]
        return kept


@remedy(
    "a boolean-mask index with its wait → where",
    ("mask0", "mask1"),
    ("body0", "body1", "body2"),
)
def mask_where(context: Context, after: bool) -> Side:
    width = context.pick(2048, 16)
    model = nn.Sequential()
    for index in range(3):
        model.add_module(f"body{index}", ResidualMlp(width, 4))
        if index < 2:
            model.add_module(f"mask{index}", _Masking(where=after))
    model.to(context.device)
    inputs = context.randn(context.pick(16384, 4), width)
    return side_of(context, model, lambda: model(inputs))


class _Small(nn.Module):
    """Many small operations, one after another."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.sigmoid(layer(x)) * x
        return x


def _compiled_chain(context: Context, after: bool, rows: int) -> Side:
    width = context.pick(1024, 16)
    model = nn.Sequential()
    model.add_module("before", ResidualMlp(width, 4))
    chain = _Small(width, context.pick(12, 2))
    model.add_module("chain", chain)
    model.add_module("after", ResidualMlp(width, 4))
    model.to(context.device)
    if after:
        chain.compile()
    inputs = context.randn(rows, width)
    return side_of(context, model, lambda: model(inputs), bf16=False)


@remedy(
    "many small layers → torch.compile of the block, large batch", ("chain",), ("before", "after")
)
def chain_compiled(context: Context, after: bool) -> Side:
    return _compiled_chain(context, after, context.pick(32768, 4))


@remedy(
    "many small layers → torch.compile of the block, launch-bound",
    ("chain",),
    ("before", "after"),
)
def chain_compiled_launch_bound(context: Context, after: bool) -> Side:
    return _compiled_chain(context, after, context.pick(256, 4))
