"""non_blocking copies to the GPU from batches that nobody has pinned."""

from itertools import cycle

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, Vit, made

CASE = Published(
    source="metatensor/metatrain#1273",
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
        return nn.functional.cross_entropy(model(images), classes)

    return stepping(model, loss), {"": model}
