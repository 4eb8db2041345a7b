"""An optimizer that runs forward and backward itself, several times in a step."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import Clock, sized
from benchmarks.accuracy.trainings.parts import batch_of, perceptron


def train() -> None:
    torch.manual_seed(0)
    width = sized(96, 512)
    model = perceptron(width)
    inputs, wanted = batch_of(128, width), batch_of(128, width)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=10, history_size=8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), wanted)
        loss.backward()
        return loss

    clock = Clock(300)
    while not clock.is_over:
        loss = optimizer.step(closure)
        clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
