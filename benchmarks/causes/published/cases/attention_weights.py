"""nn.MultiheadAttention with need_weights, its default, in every layer of a detector."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="lyuwenyu/RT-DETR#678",
    cause=("need_weights", "scaled_dot_product", "flash", "fused attention", "attention weights"),
    place=("layers.*.attention", "layers.*"),
    fix="need_weights=False, which takes the fused attention",
    gain="9 kernels to 3 in the attention, 13 to 6 in the layer; no times for training",
)


class Layer(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        y, _ = self.attention(y, y, y, need_weights=not self.fixed)
        x = x + y
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, width: int, depth: int, fixed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(256, width)
        self.layers = nn.ModuleList(Layer(width, fixed) for _ in range(depth))
        self.boxes = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.boxes(x).sigmoid()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 512, 64, 32), sized(context, 6, 3, 1)
    tokens, batch = sized(context, 1024, 256, 8), sized(context, 24, 2, 2)
    model = made(context, lambda: Encoder(width, depth, fixed)).to(half(context))
    places = context.randn(batch, tokens, 256).to(half(context))
    boxes = context.randn(batch, tokens, 4).sigmoid()
    return stepping(model, lambda: (model(places) - boxes).abs().mean()), {"": model}
