"""Images as bytes from workers that crop and flip them, in half precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self._images = torch.randint(0, 256, (64, 3, 72, 72), dtype=torch.uint8)

    def __len__(self) -> int:
        return 3200

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = (int(value) for value in torch.randint(8, (2,)))
        image = self._images[index % 64][:, top : top + 64, left : left + 64]
        return image.flip(-1) if index % 2 else image.clone(), index % 10


def train() -> None:
    torch.manual_seed(0)
    width = sized(8, 96)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pinned = DEVICE == "cuda"
    loader = DataLoader(
        Images(), 32, shuffle=True, num_workers=2, pin_memory=pinned, persistent_workers=True
    )
    clock = Clock(400, period=100)
    while not clock.is_over:
        for images, labels in clock.batches(loader):
            pixels = images.to(DEVICE, non_blocking=True).float() / 255
            with torch.autocast(DEVICE, torch.bfloat16):
                predicted = model(pixels)
            loss = nn.functional.cross_entropy(predicted.float(), labels.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            with clock.part("optimizer"):
                optimizer.step()
            clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
