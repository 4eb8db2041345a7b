"""Anchors, positives and negatives of a triplet through a network of volumes one by one."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="MPI-Dortmund/tomotwin-cryoet#93",
    because="Three small batches take three passes through the network, where one would do.",
    cause=("times", "concatenat", "small batch", "one pass", "called batch", "one batch"),
    half=("launch", "host", "small kernels"),
    place=("encoder", "encoder.**", "embedded()"),
    fix="Concatenate the three and pass them at once",
    gain="no time given ('probably more efficient'; merged)",
)


class Encoder(nn.Module):
    def __init__(self, width: int, depth: int, outer: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inner = 1
        for number in range(depth):
            size = width * 2 ** min(number, 3)
            layers += [nn.Conv3d(inner, size, 3, padding=1), nn.GroupNorm(4, size), nn.LeakyReLU()]
            layers += [nn.Conv3d(size, size, 3, padding=1), nn.GroupNorm(4, size), nn.LeakyReLU()]
            layers.append(nn.MaxPool3d(2, ceil_mode=True))
            inner = size
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inner, outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.head(self.layers(x).mean((2, 3, 4))), dim=1)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 16, 8, 4), sized(context, 5, 3, 2)
    side, batch = sized(context, 32, 12, 8), sized(context, 8, 3, 2)
    model = made(context, lambda: Encoder(width, depth, 32))
    volumes = [context.randn(batch, 1, side, side, side) for _ in range(3)]

    def embedded() -> list[torch.Tensor]:
        if fixed:
            return list(model(torch.cat(volumes)).chunk(3))
        return [model(part) for part in volumes]

    def loss() -> torch.Tensor:
        anchor, positive, negative = embedded()
        return functional.triplet_margin_loss(anchor, positive, negative, margin=0.5)

    return stepping(model, loss), {"encoder": model}
