"""An exponential average of the weights after each step."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import batch_of, perceptron


def train() -> None:
    torch.manual_seed(0)
    width = sized(384, 1536)
    model = perceptron(width, outputs=10, layers=4)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = batch_of(64, width), torch.randint(10, (64,), device=DEVICE)
    clock = Clock(800)
    while not clock.is_over:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        with clock.part("optimizer"):
            optimizer.step()
        clock.step()
        with clock.part("averaging"):
            average.update_parameters(model)
        if loss.item() < 0:
            break
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
