"""Four batches to a step."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.accuracy.trainings.clock import DEVICE, Clock
from benchmarks.accuracy.trainings.parts import WIDTH, Files, perceptron


def train() -> None:
    torch.manual_seed(0)
    model = perceptron(WIDTH, inputs=256, outputs=10, layers=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Files(6400, lambda _: 0.00002), 32, num_workers=1, shuffle=True)
    clock = Clock(300, period=50)
    while not clock.is_over:
        for number, (inputs, labels) in enumerate(clock.batches(loader), 1):
            predicted = model(inputs.to(DEVICE))
            loss = functional.cross_entropy(predicted, labels.to(DEVICE)) / 4
            loss.backward()
            if number % 4 == 0:
                with clock.part("optimizer"):
                    optimizer.step()
                optimizer.zero_grad()
                clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
