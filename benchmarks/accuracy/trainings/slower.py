"""Steps become slower in the course of the training: each looks at more that was kept."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import WIDTH, batch_of, perceptron


def train() -> None:
    torch.manual_seed(0)
    model = perceptron(WIDTH, outputs=10)
    optimizer = torch.optim.Adam(model.parameters())
    inputs, labels = batch_of(64, WIDTH), torch.randint(10, (64,), device=DEVICE)
    kept: list[torch.Tensor] = []
    clock = Clock(800)
    while not clock.is_over:
        predicted = model(inputs)
        loss = functional.cross_entropy(predicted, labels)
        optimizer.zero_grad()
        loss.backward()
        with clock.part("optimizer"):
            optimizer.step()
        clock.step()
        kept += [predicted.detach().mean()] * sized(2, 1)
        recent = torch.stack(kept).mean()
    print(f"loss {loss.item():.4f}, mean output {recent.item():.4f}")


if __name__ == "__main__":
    train()
