"""An evaluation on other data after each 50 steps.

There are so many that one more or less at an end of what counts is below a hundredth of the time.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.accuracy.trainings.clock import DEVICE, Clock
from benchmarks.accuracy.trainings.parts import WIDTH, Files, perceptron


def evaluate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, int]]) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, labels in loader:
            right += int((model(inputs.to(DEVICE)).argmax(1).cpu() == labels).sum())
    model.train()
    return right / 1600


def train() -> None:
    torch.manual_seed(0)
    model = perceptron(WIDTH, inputs=256, outputs=10, layers=6)
    optimizer = torch.optim.Adam(model.parameters())
    trained = DataLoader(Files(1600, lambda _: 0.00005), 32, shuffle=True)
    held_out = DataLoader(Files(1600, lambda _: 0.00005), 128)
    clock = Clock(1600, period=50)
    while not clock.is_over:
        for inputs, labels in clock.batches(trained):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.to(DEVICE)), labels.to(DEVICE))
            loss.backward()
            with clock.part("optimizer"):
                optimizer.step()
            clock.step()
        with clock.part("evaluation"):
            accuracy = evaluate(model, held_out)
        print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    train()
