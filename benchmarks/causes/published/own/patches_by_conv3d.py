"""Patches of a vision tower, embedded by a Conv3d whose stride is its kernel."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sizes, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="axolotl-ai-cloud/axolotl#3897",
    cause=("cudnn", "fast kernel"),
    place=("patches", "patches.*"),
    fix="A linear layer over flattened patches",
    gain="11 to 18 times as fast a patch embedding in sgl-project/sglang-omni#132 (H20, forward)",
    device="cuda",
    same=False,
)


class Patches(nn.Module):
    def __init__(self, width: int, kernel: tuple[int, int, int], fixed: bool) -> None:
        super().__init__()
        self.proj, self.fixed = nn.Conv3d(3, width, kernel, stride=kernel, bias=False), fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            return nn.functional.linear(x.flatten(1), self.proj.weight.flatten(1))
        return self.proj(x).flatten(1)


class Tower(nn.Module):
    def __init__(self, width: int, depth: int, kernel: tuple[int, int, int], fixed: bool) -> None:
        super().__init__()
        self.patches = Patches(width, kernel, fixed)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.merge = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merge(self.blocks(self.patches(x)[None]))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, number, side = sizes(context, (1152, 6, 4096, 16), (64, 1, 16, 4))
    model = made(context, lambda: Tower(width, depth, (2, side, side), fixed)).to(half(context))
    pixels = context.randn(number, 3, 2, side, side).to(half(context))
    return stepping(model, lambda: model(pixels).float().square().mean()), {"": model}
