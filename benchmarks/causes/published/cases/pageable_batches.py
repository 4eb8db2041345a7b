"""Batches that are copied to the GPU from memory that is not pinned."""

from __future__ import annotations

from itertools import cycle

import torch
from torch.nn import functional

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import half, sized, stepping
from benchmarks.models import Context, Vit, made

CASE = Published(
    source="metatensor/metatrain#1273",
    title="non_blocking copies to the GPU from batches that nobody has pinned",
    cause=("pinned", "pin_memory", "pageable"),
    place=("(data)", "fetched()"),
    fix="pin_memory=True in the loader",
    gain="8.6% more structures a second; 2x in ostris/ai-toolkit#813 (with offloading)",
    device="cuda",
)


def fetched(batch: torch.Tensor, context: Context) -> torch.Tensor:
    return batch.to(context.device, non_blocking=True)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    side, batch = sized(context, 224, 32, 16), sized(context, 160, 2, 2)
    width, depth = sized(context, 768, 64, 32), sized(context, 4, 2, 1)
    model = made(context, lambda: Vit(width, depth, side, 16)).to(half(context))
    batches = [torch.randn(batch, 3, side, side) for _ in range(3)]
    if fixed and context.device != "cpu":
        batches = [one.pin_memory() for one in batches]
    feed, classes = cycle(batches), context.randint(1000, batch)

    def loss() -> torch.Tensor:
        images = fetched(next(feed), context).to(half(context))
        return functional.cross_entropy(model(images), classes)

    return stepping(model, loss), {"": model}
