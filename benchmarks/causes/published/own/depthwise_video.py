"""A video network with 3-D depthwise convolutions."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="pytorch/pytorch#37406",
    cause=("depthwise", "slow kernel"),
    place=("stages.*.spatial",),
    fix="2-D depthwise convolutions, summed over the frames of the kernel",
    gain="the backward about ten times a dense forward (#18631 has a script)",
    device="cuda",
)


class Spatial(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.fixed, self.weight = fixed, nn.Parameter(torch.randn(width, 1, 3, 3, 3) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fixed:
            return functional.conv3d(x, self.weight, padding=1, groups=x.shape[1])
        batch, width, frames = x.shape[:3]
        flat = functional.pad(x, (0, 0, 0, 0, 1, 1)).transpose(1, 2)
        parts = [
            functional.conv2d(
                flat[:, at : at + frames].flatten(0, 1),
                self.weight[:, :, at],
                padding=1,
                groups=width,
            )
            for at in range(3)
        ]
        return (parts[0] + parts[1] + parts[2]).unflatten(0, (batch, frames)).transpose(1, 2)


class Stage(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.expand = nn.Conv3d(width, 2 * width, 1)
        self.spatial = Spatial(2 * width, fixed)
        self.norm = nn.BatchNorm3d(2 * width)
        self.project = nn.Conv3d(2 * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.project(self.norm(self.spatial(self.expand(x))).relu())


class Video(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, width, (1, 4, 4), stride=(1, 4, 4))
        self.stages = nn.Sequential(*(Stage(width, fixed) for _ in range(3)))
        self.head = nn.Linear(width, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3, 4)))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, batch, side = sizes(context, (64, 8, 160), (8, 1, 24))
    model = made(context, lambda: Video(width, fixed))
    clips, labels = context.randn(batch, 3, 8, side, side), context.randint(40, batch)
    return stepping(model, lambda: functional.cross_entropy(model(clips), labels)), {"": model}
