"""A batch of windows of time series made by torch.tensor from a list of NumPy arrays."""

import numpy
import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="awslabs/gluonts#1732",
    cause=("numpy", "on the host", "waiting for data", "list of", "torch.tensor", "python"),
    place=("(data)", "collated()"),
    fix="Make one NumPy array of the list first",
    gain="'extremely slow' before; 1,967 to 63 ms in pytorch/pytorch#57467",
)


def collated(windows: list[numpy.ndarray], device: str, fixed: bool) -> torch.Tensor:
    if fixed:
        return torch.from_numpy(numpy.stack(windows)).to(device)
    return torch.tensor(windows, device=device)


class Forecaster(nn.Module):
    """A transformer over patches of a window."""

    def __init__(self, series: int, patch: int, width: int, depth: int, ahead: int) -> None:
        super().__init__()
        self.series, self.patch, self.ahead = series, patch, ahead
        self.embed = nn.Linear(series * patch, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, series * ahead)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.unflatten(1, (-1, self.patch)).flatten(2))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1)).view(len(x), self.ahead, self.series)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    series, past = sized(context, 4, 4, 2), sized(context, 128, 64, 16)
    ahead, batch = sized(context, 32, 16, 4), sized(context, 96, 32, 3)
    width, depth = sized(context, 1024, 96, 32), sized(context, 8, 2, 1)
    model = made(context, lambda: Forecaster(series, 8, width, depth, ahead))
    random = numpy.random.RandomState(0)
    known = random.standard_normal((50 * past, series)).astype(numpy.float32)
    starts = random.randint(0, len(known) - past - ahead, batch)

    def loss() -> torch.Tensor:
        windows = [known[start : start + past + ahead] for start in starts]
        both = collated(windows, context.device, fixed)
        return (model(both[:, :past]) - both[:, past:]).abs().mean()

    return stepping(model, loss), {"": model}
