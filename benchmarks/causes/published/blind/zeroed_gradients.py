"""zero_grad() that fills gradients with zeros."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, Unet, made

CASE = Published(
    source="Lightning-AI/pytorch-lightning#6534",
    cause=("zero_grad", "set_to_none"),
    place=("zero_grad()", "(optimizer)"),
    fix="set_to_none=True",
    gain="41.42 to 41.05 s an epoch (0.9%); none in bonlime/pytorch-tools#94",
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    side, batch = sized(context, 192, 128, 16), sized(context, 32, 2, 2)
    model = made(context, lambda: Unet(sized(context, 64, 4, 4)))
    model = model.to(memory_format=torch.channels_last)
    images, classes = context.randn(batch, 3, side, side), context.randint(16, batch, side, side)

    def loss() -> torch.Tensor:
        with context.bf16(context.device != "cpu"):
            return nn.functional.cross_entropy(model(images), classes)

    return stepping(model, loss, set_to_none=fixed), {"": model}
