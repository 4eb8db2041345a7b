"""An optimizer's step as one compiled function."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import batch_of, perceptron


def train() -> None:
    torch.manual_seed(0)
    width = sized(256, 1024)
    model = perceptron(width, outputs=10, layers=6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    inputs, labels = batch_of(64, width), torch.randint(10, (64,), device=DEVICE)

    @torch.compile
    def update() -> None:
        optimizer.step()

    clock = Clock(1000)
    while not clock.is_over:
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        with clock.part("optimizer"):
            update()
        optimizer.zero_grad()
        clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
