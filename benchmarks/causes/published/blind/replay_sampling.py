"""Batches drawn from a replay buffer by NumPy, without replacement."""

import numpy
import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="gbionics/amp-rsl-rl#12",
    cause=("waiting for data", "numpy", "choice", "sampling", "on the host"),
    place=("(data)", "drawn()"),
    fix="Keep the buffer on the device and draw the rows there",
    gain="85.2 to 1.1 ms for 20,480 samples, 157.8 to 25.9 ms with the insertion",
    same=False,  # other rows are drawn
)


class Replay:
    def __init__(self, rows: int, width: int, context: Context, fixed: bool) -> None:
        self.device, self.fixed = context.device, fixed
        self.random = numpy.random.RandomState(0)
        data = torch.randn(rows, width)
        self.data = data.to(context.device) if fixed else data.numpy()

    def drawn(self, count: int) -> torch.Tensor:
        if self.fixed:
            return self.data[torch.randint(len(self.data), (count,), device=self.device)]
        rows = self.random.choice(len(self.data), count, replace=False)
        return torch.from_numpy(self.data[rows]).to(self.device)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    rows, count = sized(context, 600_000, 400_000, 50), sized(context, 8192, 256, 4)
    width, hidden = sized(context, 64, 32, 4), sized(context, 2048, 256, 8)
    replay = Replay(rows, width, context, fixed)

    def make() -> nn.Sequential:
        inner = [layer for _ in range(4) for layer in (nn.Linear(hidden, hidden), nn.ELU())]
        return nn.Sequential(nn.Linear(width, hidden), nn.ELU(), *inner, nn.Linear(hidden, 1))

    critic = made(context, make)
    loss = lambda: critic(replay.drawn(count)).square().mean()  # noqa: E731
    return stepping(critic, loss), {"": critic}
