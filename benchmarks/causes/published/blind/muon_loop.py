"""Newton-Schulz iterations for each of 126 matrices, thousands of tiny kernels a step."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, Vit, made

CASE = Published(
    source="ultralytics/ultralytics#25288",
    cause=("launch", "foreach", "one by one", "each parameter", "small kernels", "batched"),
    place=("(optimizer)", "orthogonal()"),
    fix="Stack the matrices of one shape and iterate on all of them at once",
    gain="62.2 to 7.7 ms in the optimizer (yolo26n, RTX PRO 6000)",
    device="cuda",
)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iterations on a matrix, or on many."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        product = x @ x.mT
        x = 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], fixed: bool) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self.fixed = fixed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if parameter.ndim != 2:
                parameter.sub_(1e-4 * parameter.grad)
            else:
                alike[parameter.shape if self.fixed else number].append(parameter)
        for same in alike.values():
            gradients = [parameter.grad for parameter in same]
            if self.fixed:
                updates = list(orthogonal(torch.stack(gradients)))
                torch._foreach_add_(same, updates, alpha=-1e-4)
            else:
                same[0].sub_(1e-4 * orthogonal(gradients[0]))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 192, 64, 32), sized(context, 20, 2, 1)
    side, batch = sized(context, 128, 32, 16), sized(context, 64, 2, 2)
    model = made(context, lambda: Vit(width, depth, side, 8)).to(half(context))
    images = context.randn(batch, 3, side, side).to(half(context))
    classes = context.randint(1000, batch)
    optimizer = Muon(model.parameters(), fixed)
    loss = lambda: nn.functional.cross_entropy(model(images), classes)  # noqa: E731
    return stepping(model, loss, optimizer=optimizer), {"": model}
