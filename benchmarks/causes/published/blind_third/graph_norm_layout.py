"""Batch norms of point clouds that get all points of a batch as rows."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="pyg-team/pytorch_geometric#2394",
    because="BatchNorm1d was slower on points by channels than on clouds by channels by points.",
    cause=("batch norm shape", "batchnorm shape", "layout", "transpos", "reshape", "channels last"),
    half=("norm",),
    place=("layers.*.norm", "norm"),
    fix="Reshape to clouds, channels and points around each norm",
    gain="'significantly' faster (no figure; PointNet++ and DGCNN in 2021)",
)


class Layer(nn.Module):
    def __init__(self, inner: int, outer: int, points: int, fixed: bool) -> None:
        super().__init__()
        self.points, self.fixed = points, fixed
        self.linear = nn.Linear(inner, outer)
        self.norm = nn.BatchNorm1d(outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.fixed:
            clouds = x.view(-1, self.points, x.shape[1]).transpose(1, 2).contiguous()
            x = self.norm(clouds).transpose(1, 2).reshape(x.shape)
        else:
            x = self.norm(x)
        return functional.relu(x)


class Clouds(nn.Module):
    def __init__(self, width: int, points: int, classes: int, fixed: bool) -> None:
        super().__init__()
        self.points = points
        widths = (3, width, width, 2 * width, 8 * width)
        self.layers = nn.ModuleList(
            Layer(inner, outer, points, fixed) for inner, outer in pairwise(widths)
        )
        self.head = nn.Sequential(
            nn.Linear(8 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.view(-1, self.points, x.shape[1]).amax(1))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, points = sized(context, 64, 16, 4), sized(context, 1024, 256, 8)
    clouds = sized(context, 64, 8, 3)
    model = made(context, lambda: Clouds(width, points, 40, fixed))
    x, labels = context.randn(clouds * points, 3), context.randint(40, clouds)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(x), labels)

    return stepping(model, loss), {"": model}
