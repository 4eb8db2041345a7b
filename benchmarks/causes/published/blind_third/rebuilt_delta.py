"""Adapters of low rank that are multiplied out to a full weight in every forward."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="WalkingMeatAxolotl/AnimaLoraStudio#196",
    because="The product of both adapters is a full weight, and is applied like one.",
    cause=(
        "low rank", "low-rank", "lora", "rank weight", "weight each forward", "order product",
        "full weight",
    ),
    half=("matrix product", "matmul", "linear", "twice", "frozen"),
    place=(
        "blocks.*.attn.qkv", "blocks.*.attn.proj", "blocks.*.mlp.fc1", "blocks.*.mlp.fc2",
        "delta()",
    ),
    fix="bypass_mode: the input through the one adapter, then the other",
    gain="0.11 to 0.19 steps a second expected (280 layers, rank 8, RTX 5070 Ti)",
)  # fmt: skip


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, fixed: bool) -> None:
        super().__init__()
        self.fixed, self.base = fixed, base.requires_grad_(False)
        self.down = nn.Parameter(0.02 * torch.randn(rank, base.in_features))
        self.up = nn.Parameter(0.02 * torch.randn(base.out_features, rank))

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            return functional.linear(functional.linear(x, self.down), self.up)
        return functional.linear(x, self.up @ self.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.delta(x)


class Denoiser(nn.Module):
    def __init__(self, width: int, depth: int, rank: int, fixed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.requires_grad_(False)
        for block in self.blocks:
            block.attn.qkv = Adapted(block.attn.qkv, rank, fixed)
            block.attn.proj = Adapted(block.attn.proj, rank, fixed)
            block.mlp.fc1 = Adapted(block.mlp.fc1, rank, fixed)
            block.mlp.fc2 = Adapted(block.mlp.fc2, rank, fixed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 2048, 192, 16), sized(context, 8, 3, 1)
    tokens = sized(context, 4096, 192, 6)
    model = made(context, lambda: Denoiser(width, depth, 8, fixed)).to(half(context))
    x, noise = (context.randn(1, tokens, width).to(half(context)) for _ in range(2))
    trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)

    def loss() -> torch.Tensor:
        return functional.mse_loss(model(x).float(), noise.float())

    return stepping(trained, loss), {"": model}
