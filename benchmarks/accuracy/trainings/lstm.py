"""An LSTM over sequences of different lengths, with clipped gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import batch_of


def train() -> None:
    torch.manual_seed(0)
    width = sized(96, 512)
    model = nn.LSTM(width, width, batch_first=True).to(DEVICE)
    head = nn.Linear(width, 10).to(DEVICE)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters)
    inputs = batch_of(16, 40, width)
    labels = torch.randint(10, (16,), device=DEVICE)
    draw = torch.Generator().manual_seed(1)
    clock = Clock(400)
    while not clock.is_over:
        lengths = torch.randint(10, 41, (16,), generator=draw)
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = model(packed)
        loss = nn.functional.cross_entropy(head(hidden[-1]), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        with clock.part("optimizer"):
            optimizer.step()
        clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
