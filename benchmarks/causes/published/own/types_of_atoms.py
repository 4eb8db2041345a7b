"""A table of a few types of atoms, read by plain indexing for each neighbour."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="deepmodeling/deepmd-kit#4747",
    cause=("indexing", "index_select", "duplicate", "few rows"),
    place=("describe.types",),
    fix="torch.nn.functional.embedding",
    gain="32 to 0.5 ms in the backward",
    device="cuda",
)


class Types(nn.Module):
    def __init__(self, kinds: int, width: int, fixed: bool) -> None:
        super().__init__()
        self.fixed, self.table = fixed, nn.Parameter(torch.randn(kinds, width))

    def forward(self, kinds: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(kinds, self.table) if self.fixed else self.table[kinds]


class Describe(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.types = Types(5, width, fixed)
        self.distance = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, kinds: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        return (self.distance(distance[..., None]) * self.types(kinds)).mean(1)


class Potential(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.describe = Describe(width, fixed)
        self.fit = nn.Sequential(*(Mlp(width, 4 * width) for _ in range(4)))
        self.energy = nn.Linear(width, 1)

    def forward(self, kinds: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        return self.energy(self.fit(self.describe(kinds, distance)))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, atoms, near = sizes(context, (128, 4096, 120), (64, 64, 20))
    model = made(context, lambda: Potential(width, fixed))
    kinds, distance = context.randint(5, atoms, near), context.randn(atoms, near).sigmoid()
    goal = context.randn(atoms, 1)
    return stepping(model, lambda: (model(kinds, distance) - goal).square().mean()), {"": model}
