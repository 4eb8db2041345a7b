"""A training whose batches come from a ``DataLoader``: how fast, and how evenly, is an argument."""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.accuracy.trainings.clock import DEVICE, Clock
from benchmarks.accuracy.trainings.parts import WIDTH, Files, perceptron

_BATCH = 32


def train() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--batch-ms", type=float, default=4.0, help="what one worker takes")
    parser.add_argument("--stall-ms", type=float, default=0.0, help="once in 50 batches")
    parser.add_argument("--epoch", type=int, default=100, help="batches")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--slow-first-s", type=float, default=0.0)
    parser.add_argument("--persistent", action="store_true")
    args = parser.parse_args()

    def seconds(index: int) -> float:
        stalls = index % (50 * _BATCH) == 40 * _BATCH
        return (args.batch_ms / _BATCH + stalls * args.stall_ms) / 1e3

    loader = DataLoader(
        Files(args.epoch * _BATCH, seconds),
        _BATCH,
        num_workers=args.workers,
        prefetch_factor=args.prefetch if args.workers else None,
        persistent_workers=args.persistent,
        pin_memory=DEVICE == "cuda",
    )
    torch.manual_seed(0)
    model = perceptron(WIDTH, inputs=256, outputs=10, layers=6)
    optimizer = torch.optim.Adam(model.parameters())
    in_queue = 2 * args.workers * args.prefetch
    clock = Clock(args.steps, first=max(20, in_queue), period=args.epoch)
    time_of_first = args.slow_first_s
    while not clock.is_over:
        for inputs, labels in clock.batches(loader):
            time.sleep(time_of_first)
            time_of_first = 0.0
            optimizer.zero_grad()
            predicted = model(inputs.to(DEVICE, non_blocking=True))
            loss = functional.cross_entropy(predicted, labels.to(DEVICE, non_blocking=True))
            loss.backward()
            with clock.part("optimizer"):
                optimizer.step()
            clock.step()
            if clock.is_over:
                break
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
