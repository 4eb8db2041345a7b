"""A Function computes the gradients of both of its matrices, and one is a constant."""

from typing import Any

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, trained
from benchmarks.models import Context, Layer

CASE = Published(
    source="cai4cai/torchsparsegradutils#31",
    cause=("needs_input_grad", "nobody reads"),
    place=("1",),
    fix="Ask ctx.needs_input_grad",
    gain="not measured",
)


class Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, asks: bool) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.asks = asks
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wanted = [not ctx.asks or need for need in ctx.needs_input_grad]
        to_a = gradient @ b.mT if wanted[0] else None
        return to_a, a.mT @ gradient if wanted[1] else None, None


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    batch, width = sizes(context, (8192, 2048), (256, 256))
    table = context.randn(batch, batch) / batch
    model = nn.Sequential(nn.Linear(width, width), Layer(lambda x: Solve.apply(table, x, fixed)))
    return trained(context, model.append(nn.Linear(width, width)), batch, width)
