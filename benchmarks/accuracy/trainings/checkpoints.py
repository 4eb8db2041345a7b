"""A checkpoint each 50 steps, and a line of numbers each 20."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import batch_of, perceptron


def train() -> None:
    torch.manual_seed(0)
    width = sized(512, 1536)
    model = perceptron(width, outputs=10, layers=4)
    optimizer = torch.optim.Adam(model.parameters())
    inputs, labels = batch_of(32, width), torch.randint(10, (32,), device=DEVICE)
    clock = Clock(700, period=100)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, clock.steps + 1):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            with clock.part("optimizer"):
                optimizer.step()
            clock.step()
            if number % 20 == 0:
                print(f"step {number}: loss {loss.item():.4f}")
            if number % 50 == 0:
                with clock.part("saving"):
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, Path(folder, "last.pt"))


if __name__ == "__main__":
    train()
