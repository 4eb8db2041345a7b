"""A selective scan as a Python loop over positions."""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, trained
from benchmarks.models import Context, Layer, Mlp

CASE = Published(
    source="johnma2006/mamba-minimal#18",
    cause=("loop", "launch", "time step"),
    place=("1",),
    fix="The scan as one product",
    gain="about 14 times as fast (A30, inference)",
    same=False,
)


def scanned(x: torch.Tensor, how: str) -> torch.Tensor:
    keep = 0.95
    if how == "product":
        place = torch.arange(x.shape[1], device=x.device)
        return (keep ** (place[:, None] - place).clamp(min=0)).tril() @ x
    if how == "doubling":
        reach = 1
        while reach < x.shape[1]:
            x = torch.cat([x[:, :reach], x[:, reach:] + keep**reach * x[:, :-reach]], 1)
            reach *= 2
        return x
    state, rows = torch.zeros_like(x[:, 0]), []
    for each in x.unbind(1):
        state = keep * state + each
        rows.append(state)
    return torch.stack(rows, 1)


def scan(
    context: Context, how: str, sizes: tuple[int, ...], layers: Callable[[int], nn.Module]
) -> tuple[Step, Models]:
    """Return the step of layers around a scan."""
    width = sizes[-1]
    parts = layers(width), Layer(lambda x: scanned(x, how)), layers(width)
    return trained(context, nn.Sequential(*parts), *sizes)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    shape = sizes(context, (8, 1024, 512), (4, 128, 64))
    return scan(context, "product" if fixed else "loop", shape, lambda n: Mlp(n, 2 * n))
