"""A small language model with a schedule of its learning rate."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import Language


def train() -> None:
    torch.manual_seed(0)
    model = Language(sized(96, 512), layers=sized(2, 6)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    ids = torch.randint(512, (64, 65))
    clock = Clock(400)
    while not clock.is_over:
        picked = ids[torch.randint(64, (8,))].to(DEVICE)
        logits = model(picked[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), picked[:, 1:].flatten())
        loss.backward()
        with clock.part("optimizer"):
            optimizer.step()
        clock.step()
        schedule.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
