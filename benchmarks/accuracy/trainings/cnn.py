"""A convolutional network on images that the training's own process reads."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import Files


def train() -> None:
    torch.manual_seed(0)
    channels, batch = sized(16, 64), 32
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(2 * channels, 10),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(Files(6400, lambda _: 0.0001, (3, 32, 32)), batch, shuffle=True)
    clock = Clock(400)
    while not clock.is_over:
        for images, labels in clock.batches(loader):
            optimizer.zero_grad()
            loss = criterion(model(images.to(DEVICE)), labels.to(DEVICE))
            loss.backward()
            with clock.part("optimizer"):
                optimizer.step()
            clock.step()
            if clock.is_over:
                break
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
