"""A compiled model. With ``--lengths 2``, sequences become longer, which compiles it once more."""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import Language


def train() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Language(sized(96, 384), layers=2).to(DEVICE)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    clock = Clock(600)
    for number in range(clock.steps):
        length = 64
        if args.lengths > 1 and number >= clock.steps // 2:
            length = 96
            if number == clock.steps // 2:
                clock.once()
        ids = torch.randint(512, (8, length + 1), device=DEVICE)
        logits = compiled(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        with clock.part("optimizer"):
            optimizer.step()
        clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
