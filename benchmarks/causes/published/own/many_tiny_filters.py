"""A Conv3d with 729 filters of 2 by 2 by 2, for which cuDNN takes a slow backward."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="pytorch/pytorch#32370",
    cause=("cudnn", "fast kernel"),
    place=("filters",),
    fix="Run this layer without cuDNN",
    gain="the backward from 7 to 15 times its forward to parity",
    device="cuda",
)


class Volume(nn.Module):
    def __init__(self, width: int, filters: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.stem = nn.Conv3d(1, width, 3, padding=1)
        self.before = nn.Sequential(nn.ReLU(), nn.Conv3d(width, width, 3, padding=1), nn.ReLU())
        self.filters = nn.Conv3d(width, filters, 2)
        self.after = nn.Conv3d(filters, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.filters(self.before(self.stem(x)))
        return self.head(self.after(x.relu()).mean((2, 3, 4)))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, filters, batch, side = sizes(context, (2, 729, 16, 33), (2, 27, 2, 6))
    model = made(context, lambda: Volume(width, filters, fixed))
    data, labels = context.randn(batch, 1, side, side, side), context.randint(10, batch)
    inner = stepping(model, lambda: nn.functional.cross_entropy(model(data), labels))

    def step() -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=not fixed):
            return inner()

    return step, {"": model}
