"""Known remedies for ``what_if.py``: each builds its model before and after.

Sizes are such that a step is some tens of milliseconds on a large GPU and the GPU is what it waits
for, where the remedy is not about the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.models import (
    Around,
    Block,
    Checkpointed,
    Context,
    IndexPatchDropout,
    Layer,
    ResidualMlp,
    WrittenOutAttention,
    patch_drop_vit,
    training_step,
)


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
            own row, and ``=PATH`` the row of this path, not its subtree.
        build: makes the model with (true) or without the remedy.
    """

    about: str
    changed: tuple[str, ...]
    neighbours: tuple[str, ...]
    build: Callable[[Context, bool], Side]


def _side(context: Context, model: nn.Module, inputs: torch.Tensor, *, bf16: bool = True) -> Side:
    step = training_step(
        model, lambda: model(inputs).float().square().mean(), around=lambda: context.bf16(bf16)
    )
    return Side(model, step)


def _patch_drop(context: Context, after: bool, *, deterministic: bool) -> Side:
    torch.use_deterministic_algorithms(deterministic)
    model = patch_drop_vit(context, depth=context.pick(6, 2))
    if after:
        model.patch_drop = IndexPatchDropout()
    side = context.pick(224, 32)
    return _side(context, model, context.randn(context.pick(192, 4), 3, side, side))


# Blocks of a transformer -------------------------------------------------------------------------


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


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU written out, as many older models have it."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3))))


def _in_fp32(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One block that somebody kept in fp32."""
    with torch.autocast(x.device.type, enabled=False):
        return block(x.float())


class _Tower(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _write_out_attention(number: int, block: Block, _: bool) -> Block:
    if number in (2, 3):
        block.attn.__class__ = WrittenOutAttention
    return block


def _write_out_norm(_: int, block: Block, __: bool) -> Block:
    block.norm1 = _EagerNorm(block.norm1.normalized_shape[0])
    return block


def _write_out_gelu(_: int, block: Block, __: bool) -> Block:
    block.mlp.act = Layer(_tanh_gelu)
    return block


def _keep_fp32(number: int, block: Block, after: bool) -> nn.Module:
    plain = Around(block, lambda inner, x: inner(x))
    return block if number != 3 else plain if after else Around(block, _in_fp32)


def _checkpoint(number: int, block: Block, after: bool) -> nn.Module:
    return Checkpointed(block, active=not after) if number in (1, 2, 3) else block


def _tower(
    context: Context,
    after: bool,
    *,
    change: Callable[[int, Block, bool], nn.Module],
    always: bool = False,
) -> Side:
    """Six blocks, changed before the remedy, or ``always`` if a switch makes the change."""
    width = context.pick(768, 64)
    blocks: list[nn.Module] = [Block(width) for _ in range(6)]
    if always or not after:
        blocks = [change(number, block, after) for number, block in enumerate(blocks)]
    model = _Tower(blocks).to(context.device)
    return _side(context, model, context.randn(context.pick(32, 2), context.pick(1024, 16), width))


# Others ------------------------------------------------------------------------------------------


def _stage(context: Context, after: bool) -> Side:
    width, last = context.pick(256, 16), torch.channels_last
    stage = nn.Sequential()
    for _ in range(6):
        stage.append(nn.Conv2d(width, width, 3, padding=1, bias=False))
        stage.append(nn.BatchNorm2d(width)).append(nn.ReLU(inplace=True))
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, width, 4, stride=4))
    model.add_module("stage", stage)
    model.add_module("head", nn.Conv2d(width, width, 1))
    if after:
        stage.to(memory_format=last)
        stage.register_forward_pre_hook(lambda _, x: x[0].contiguous(memory_format=last))
    side = context.pick(224, 32)
    images = context.randn(context.pick(128, 2), 3, side, side)
    return _side(context, model.to(context.device).train(), images)


class _OneHot(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hot = x.unsqueeze(-1) == torch.arange(16, device=x.device)
        # In the type that an embedding gives, so that what follows does not run in another one.
        return (hot.to(self.weight.dtype) @ self.weight).to(self.weight.dtype)


class _Typed(nn.Module):
    def __init__(self, types: nn.Module, width: int) -> None:
        super().__init__()
        self.types, self.body = types, ResidualMlp(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.types(x))


def _one_hot(context: Context, after: bool) -> Side:
    width = context.pick(1024, 16)
    model = _Typed(_OneHot(width) if after else nn.Embedding(16, width), width)
    tokens = context.randint(2, context.pick(512, 4), context.pick(512, 8))
    return _side(context, model.to(context.device), tokens)


def _by_index(x: torch.Tensor) -> torch.Tensor:
    """Keep what is positive by a boolean index, for which the host waits."""
    mask, kept = x > 0, torch.zeros_like(x)
    kept[mask] = x[mask]
    return kept


def _mask(context: Context, after: bool) -> Side:
    width = context.pick(2048, 16)
    keep = (lambda x: torch.where(x > 0, x, torch.zeros_like(x))) if after else _by_index
    model = nn.Sequential()
    for index in range(3):
        model.add_module(f"body{index}", ResidualMlp(width, 4))
        if index < 2:
            model.add_module(f"mask{index}", Layer(keep))
    return _side(context, model.to(context.device), context.randn(context.pick(16384, 4), width))


class _Small(nn.Module):
    """Many small operations, one after another."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.sigmoid(layer(x)) * x
        return x


def _chain(context: Context, after: bool, *, rows: int) -> Side:
    width = context.pick(1024, 16)
    chain = _Small(width, context.pick(12, 2))
    model = nn.Sequential()
    for name, part in {"before": None, "chain": chain, "after": None}.items():
        model.add_module(name, part or ResidualMlp(width, 4))
    model.to(context.device)
    if after:
        chain.compile()
    return _side(context, model, context.randn(context.pick(rows, 4), width), bf16=False)


def _each(pattern: str, *numbers: int) -> tuple[str, ...]:
    return tuple(pattern.format(number) for number in numbers or range(6))


_DROP = ("patch_drop",), ("pos_drop", "")
_CHAIN = ("chain",), ("before", "after")
REMEDIES = {
    "patch_drop_deterministic": Remedy(
        "PatchDropout: gather → indexing, deterministic", *_DROP,
        partial(_patch_drop, deterministic=True),
    ),
    "patch_drop": Remedy(
        "PatchDropout: gather → indexing", *_DROP, partial(_patch_drop, deterministic=False)
    ),
    "attention_fused": Remedy(
        "attention written out → fused, in two of six blocks",
        _each("blocks.{}.attn", 2, 3),
        _each("blocks.{}.norm1", 2, 3) + _each("=blocks.{}", 2, 3),
        partial(_tower, change=_write_out_attention),
    ),
    "layer_norm_fused": Remedy(
        "LayerNorm written out → nn.LayerNorm, in all six blocks",
        _each("blocks.{}.norm1"), _each("blocks.{}.attn.qkv") + _each("=blocks.{}"),
        partial(_tower, change=_write_out_norm),
    ),
    "gelu_fused": Remedy(
        "GELU written out → nn.GELU, in all six blocks",
        _each("blocks.{}.mlp.act"), _each("blocks.{}.mlp.fc1") + _each("blocks.{}.mlp.fc2"),
        partial(_tower, change=_write_out_gelu),
    ),
    "block_bf16": Remedy(
        "one block of six fp32 → bf16 autocast", ("blocks.3",), ("blocks.2", "blocks.4"),
        partial(_tower, change=_keep_fp32, always=True),
    ),
    "checkpointing_off": Remedy(
        "checkpointing off in three of six blocks",
        _each("blocks.{}", 1, 2, 3), ("blocks.0", "blocks.4"),
        partial(_tower, change=_checkpoint, always=True),
    ),
    "stage_channels_last": Remedy(
        "a stage of convolutions NCHW → channels_last", ("stage",), ("stem", "head"), _stage
    ),
    "embedding_one_hot": Remedy(
        "a small table's embedding → one-hot product (262,144 tokens of 16 types)",
        ("types",), ("body", ""), _one_hot,
    ),
    "mask_where": Remedy(
        "a boolean-mask index with its wait → where",
        ("mask0", "mask1"), ("body0", "body1", "body2"), _mask,
    ),
    "chain_compiled": Remedy(
        "many small layers → torch.compile of the block, large batch", *_CHAIN,
        partial(_chain, rows=32768),
    ),
    "chain_compiled_launch_bound": Remedy(
        "many small layers → torch.compile of the block, launch-bound", *_CHAIN,
        partial(_chain, rows=256),
    ),
}  # fmt: skip
