"""Volumes in channels_last_3d behind instance norms, which want them contiguous."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="pytorch/pytorch#59168",
    because="InstanceNorm3d has no channels_last kernel, so each one converts there and back.",
    cause=(
        "channels_last", "channels last", "layout", "memory format", "contiguous", "transpos",
        "strides",
    ),
    half=("copies", "norm", "convert"),
    place=("**.norm1", "**.norm2", "**.conv1", "**.conv2", "blocks.*"),
    fix="Leave the model and its inputs in the default layout",
    gain="1.579 to 1.273 s for 5 steps of nnU-Net's residual encoder",
    device="cuda",
)  # fmt: skip


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(inner, outer, 3, stride=stride, padding=1)
        self.norm1 = nn.InstanceNorm3d(outer, affine=True)
        self.conv2 = nn.Conv3d(outer, outer, 3, padding=1)
        self.norm2 = nn.InstanceNorm3d(outer, affine=True)
        self.skip = nn.Conv3d(inner, outer, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.leaky_relu(self.norm1(self.conv1(x)), 0.01)
        return functional.leaky_relu(self.norm2(self.conv2(y)) + self.skip(x), 0.01)


class Volumes(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        widths = (1, width, 2 * width, 4 * width)
        self.blocks = nn.ModuleList(
            Residual(inner, outer, 1 if inner == 1 else 2) for inner, outer in pairwise(widths)
        )
        self.head = nn.Conv3d(4 * width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, side = sized(context, 32, 8, 4), sized(context, 96, 16, 8)
    batch, classes = sized(context, 2, 2, 1), 5
    model = made(context, lambda: Volumes(width, classes)).to(half(context))
    x = context.randn(batch, 1, side, side, side).to(half(context))
    labels = context.randint(classes, batch, side // 4, side // 4, side // 4)
    if not fixed:
        model = model.to(memory_format=torch.channels_last_3d)
        x = x.to(memory_format=torch.channels_last_3d)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(x).float(), labels)

    return stepping(model, loss), {"": model}
