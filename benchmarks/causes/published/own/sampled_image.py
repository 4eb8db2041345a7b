"""A few points are sampled from large images, whose gradient is as large."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sizes, trained
from benchmarks.models import Context, Layer

CASE = Published(
    source="pytorch/pytorch#64977",
    cause=("atomic", "backward-ratio"),
    place=("1",),
    fix="Sample maps that need no gradient",
    gain="the backward grows with the image, and not with what is sampled",
    device="cuda",
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    batch, side = sizes(context, (16, 1024), (2, 128))
    grid = (context.randn(batch, 32, 32, 2) / 3).clamp(-1, 1)

    def sample(x: torch.Tensor) -> torch.Tensor:
        maps = x.detach() if fixed else x
        return functional.grid_sample(maps, grid, align_corners=False)

    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Layer(sample), nn.Conv2d(16, 8, 1))
    return trained(context, model, batch, 3, side, side)
