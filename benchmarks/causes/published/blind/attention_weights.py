"""nn.MultiheadAttention with need_weights, its default, in every layer of a detector."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, Vit, made

CASE = Published(
    source="lyuwenyu/RT-DETR#678",
    cause=("need_weights", "scaled_dot_product", "flash", "fused attention", "attention weights"),
    place=("blocks.*.attn", "blocks.*.attn.**"),
    fix="need_weights=False, which takes the fused attention",
    gain="9 kernels to 3 in the attention, 13 to 6 in the layer; no times for training",
)


class Weighing(nn.MultiheadAttention):
    fixed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x, x, need_weights=not self.fixed)[0]


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 512, 64, 32), sized(context, 6, 3, 1)
    side, batch = sized(context, 512, 256, 32), sized(context, 24, 2, 2)

    def make() -> Vit:
        model = Vit(width, depth, side, 16)
        for block in model.blocks:
            block.attn = Weighing(width, 8, batch_first=True)
            block.attn.fixed = fixed
        return model

    model = made(context, make).to(half(context))
    images = context.randn(batch, 3, side, side).to(half(context))
    classes = context.randint(1000, batch)
    return stepping(model, lambda: nn.functional.cross_entropy(model(images), classes)), {"": model}
