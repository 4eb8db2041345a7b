"""A trainer's helper runs gc.collect() after each small task of a step."""

import gc

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, Unet, made

CASE = Published(
    source="Nerogar/OneTrainer#1459",
    cause=("garbage", "gc.collect"),
    place=("(garbage collector)", "torch_gc()"),
    fix="Return at once in the helper that collects",
    gain="'my training duration halved' (SDXL, batch 4, with sampling)",
)


def torch_gc() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, batch, side = sizes(context, (64, 16, 128), (8, 2, 32))
    model = made(context, lambda: Unet(width, 3))
    noisy, noise = context.randn(batch, 3, side, side), context.randn(batch, 3, side, side)
    free = (lambda: None) if fixed else torch_gc

    def loss() -> torch.Tensor:
        free()
        value = nn.functional.mse_loss(model(noisy), noise)
        free()
        return value

    return stepping(model, loss), {"": model}
