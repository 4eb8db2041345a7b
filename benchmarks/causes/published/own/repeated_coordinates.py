"""Coordinates are repeated for every pixel before they are used."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, trained
from benchmarks.models import Context, made

CASE = Published(
    source="https://discuss.pytorch.org/t/122956",
    cause=("repeat", "broadcast", "expand"),
    place=("canvas",),
    fix="Broadcast in place of repeat(1, W * H, ...)",
    gain="20 s of backward before",
)


class Canvas(nn.Module):
    """Draws points as soft dots."""

    pixels: torch.Tensor

    def __init__(self, side: int, fixed: bool) -> None:
        super().__init__()
        self.side, self.fixed = side, fixed
        line = torch.linspace(0, 1, side)
        grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
        self.register_buffer("pixels", grid.view(-1, 2))

    def forward(self, points: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        batch, count, _ = points.shape
        if self.fixed:
            gap = points[:, None] - self.pixels[None, :, None]
            weight = weights[:, None]
        else:
            number = len(self.pixels)
            pixels = self.pixels[None, :, None].repeat(batch, 1, count, 1)
            gap = points[:, None].repeat(1, number, 1, 1) - pixels
            weight = weights[:, None].repeat(1, number, 1)
        dots = (-gap.square().sum(-1) * 200).exp() * weight
        return dots.sum(-1).view(batch, 1, self.side, self.side)


class Sketch(nn.Module):
    def __init__(self, width: int, points: int, side: int, fixed: bool) -> None:
        super().__init__()
        layers = (nn.Conv2d(width, width, 3, padding=1) for _ in range(6))
        stem = nn.Conv2d(3, width, 4, stride=4)
        self.stages = nn.Sequential(stem, *(nn.Sequential(one, nn.ReLU()) for one in layers))
        self.points = nn.Linear(width, points * 3)
        self.canvas = Canvas(side, fixed)
        self.paint = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.points(self.stages(x).mean((2, 3))).view(len(x), -1, 3)
        return self.paint(self.canvas(found[..., :2].sigmoid(), found[..., 2]))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, points, side, batch = sizes(context, (64, 256, 128, 8), (16, 48, 32, 2))
    return trained(
        context, made(context, lambda: Sketch(width, points, side, fixed)), batch, 3, side, side
    )
