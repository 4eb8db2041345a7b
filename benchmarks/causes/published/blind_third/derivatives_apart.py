"""Derivatives of a physics-informed network by a backward for each coordinate."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="lululxvi/deepxde#163",
    because="The first derivatives come from a backward each, where one gives all of them.",
    cause=(
        "same nodes", "one call", "one pass", "one backward", "together", "repeated", "again",
        "several passes", "several backward",
    ),
    half=("second backward", "double backward", "create_graph", "autograd.grad", "backward times"),
    place=("residual()", "derivatives()"),
    fix="Differentiate for all coordinates at once",
    gain="no time; 'the cost is the same as we compute all the gradients in one back-propagation'",
    remains=True,
)  # fmt: skip


class Network(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = self.first(points).tanh()
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def derivatives(value: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(value.sum(), inputs, create_graph=True))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 256, 48, 8), sized(context, 6, 4, 1)
    count = sized(context, 20_000, 400, 6)
    model = made(context, lambda: Network(width, depth))
    x, y, t = (torch.rand(count, 1, device=context.device).requires_grad_() for _ in range(3))

    def residual() -> torch.Tensor:
        """Return by how much the heat equation, with a drift, is not met."""
        value = model(torch.cat((x, y, t), 1))
        if fixed:
            along_x, along_y, along_t = derivatives(value, [x, y, t])
        else:
            (along_x,), (along_y,), (along_t,) = (derivatives(value, [one]) for one in (x, y, t))
        (twice_x,), (twice_y,) = derivatives(along_x, [x]), derivatives(along_y, [y])
        return along_t + value * along_x - 0.1 * (twice_x + twice_y)

    def loss() -> torch.Tensor:
        start = model(torch.cat((x, y, torch.zeros_like(t)), 1))
        right = (3.14 * x).sin() * (3.14 * y).sin()
        return residual().square().mean() + (start - right).square().mean()

    return stepping(model, loss), {"": model}
