"""A loss that is read for the log in each step, before the rest of the step is launched."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import TokenLoss, half, sized
from benchmarks.models import Context, Gpt, made

CASE = Published(
    source="meta-pytorch/torchtune#522",
    title="loss.item() in each step, though a line is logged every hundredth",
    cause=("synchron", "waits for", "wait for", ".item()"),
    place=("log()", "loss"),
    fix="Read the loss only when it is logged",
    gain="a wait of 40 to 50 ms a step (LoRA on Llama 2 7B)",
    device="cuda",
)


def log(value: torch.Tensor, kept: list[float], now: bool) -> None:
    if now:
        kept.append(value.item())


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 512, 64, 32), sized(context, 24, 3, 1)
    length, batch = sized(context, 512, 64, 8), sized(context, 4, 2, 2)
    words = sized(context, 8192, 512, 64)
    model = made(context, lambda: Gpt(width, depth, length, words)).to(half(context))
    tokens, follow = (context.randint(words, batch, length) for _ in range(2))
    criterion: nn.Module = TokenLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kept: list[float] = []

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(tokens), follow)
        log(loss, kept, now=not fixed)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, {"": model, "loss": criterion}
