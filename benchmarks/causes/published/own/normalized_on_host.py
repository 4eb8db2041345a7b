"""Images of a data set that are normalized to floats by the workers."""

from itertools import cycle

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, Unet, made

CASE = Published(
    source="talmolab/sleap-nn#434",
    cause=("uint8", "as floats"),
    place=("(data)", "on_device()"),
    fix="Keep uint8 until the images are on the GPU, and normalize there",
    gain="a quarter of the bytes; 7.4 to 0.8 ms for 8 images of 1024 x 1280 in #406",
    device="cuda",
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, batch, high, wide = sizes(context, (16, 8, 1024, 1280), (4, 1, 32, 32))
    images = [torch.randint(256, (batch, 3, high, wide), dtype=torch.uint8) for _ in range(3)]
    batches = images if fixed else [one.float() / 255 for one in images]
    if context.device != "cpu":
        batches = [one.pin_memory() for one in batches]
    feed, model = cycle(batches), made(context, lambda: Unet(width, 14))
    goal = torch.zeros(batch, 14, high, wide, device=context.device)

    def on_device() -> torch.Tensor:
        found = next(feed).to(context.device, non_blocking=True)
        return found.float() / 255 if fixed else found

    def loss() -> torch.Tensor:
        x = on_device()
        with context.bf16():
            return nn.functional.mse_loss(model(x), goal)

    return stepping(model, loss), {"": model}
