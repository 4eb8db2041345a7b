"""A perceptron on data that are in memory already."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import batch_of, perceptron


def train() -> None:
    torch.manual_seed(0)
    width = sized(384, 2048)
    model = perceptron(width, outputs=10, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = batch_of(64, width)
    labels = torch.randint(10, (64,), device=DEVICE)
    clock = Clock(1000)
    while not clock.is_over:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        with clock.part("optimizer"):
            optimizer.step()
        clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
