"""A loss of a subclass of ``Tensor``, and an optimizer that is not PyTorch's, as in fastai."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.accuracy.trainings.clock import DEVICE, Clock
from benchmarks.accuracy.trainings.parts import WIDTH, Files, perceptron


class Predicted(torch.Tensor):
    """A tensor with methods of its own."""


class Momentum:
    """An optimizer."""

    def __init__(self, weights: Iterable[torch.Tensor], lr: float) -> None:
        self.weights = list(weights)
        self.lr = lr
        self.averages = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self) -> None:
        for weight, average in zip(self.weights, self.averages, strict=True):
            if weight.grad is not None:
                average.mul_(0.9).add_(weight.grad, alpha=0.1)
                weight.sub_(self.lr * average)

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None


def train() -> None:
    torch.manual_seed(0)
    model = perceptron(WIDTH, inputs=256, outputs=10, layers=6)
    optimizer = Momentum(model.parameters(), 0.01)
    loader = DataLoader(Files(3200, lambda _: 0.00005), 32, shuffle=True)
    clock = Clock(500)
    while not clock.is_over:
        for inputs, labels in clock.batches(loader):
            predicted = model(inputs.to(DEVICE)).as_subclass(Predicted)
            loss = functional.cross_entropy(predicted, labels.to(DEVICE))
            loss.backward()
            with clock.part("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            clock.step()
            if clock.is_over:
                break
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
