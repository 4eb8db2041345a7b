"""An optimizer that calls a compiled function for each weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import Clock, sized
from benchmarks.accuracy.trainings.parts import batch_of, perceptron


@torch.compile
def orthogonal(gradient: Tensor) -> Tensor:
    spread = gradient / (gradient.norm() + 1e-7)
    for _ in range(5):
        squared = spread @ spread.T
        spread = 3.44 * spread + (-4.77 * squared + 2.03 * squared @ squared) @ spread
    return spread


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is made orthogonal."""

    def __init__(self, weights: Iterable[Tensor], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                average = state.setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 0.05)
                weight.sub_(orthogonal(average), alpha=group["lr"])


def train() -> None:
    torch.manual_seed(0)
    width = sized(192, 768)
    model = perceptron(width, layers=4)
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    optimizer = Muon(matrices, lr=0.001)
    inputs, wanted = batch_of(64, width), batch_of(64, width)
    clock = Clock(500)
    while not clock.is_over:
        loss = functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        with clock.part("optimizer"):
            optimizer.step()
        clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
