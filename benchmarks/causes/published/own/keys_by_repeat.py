"""Keys and values that heads share are repeated for each head."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Pre, Published, Step, sizes, trained
from benchmarks.models import Context

CASE = Published(
    source="mosaicml/llm-foundry#628",
    cause=("repeat",),
    place=("*.mlp",),
    fix="expand in place of repeat",
    gain="less memory and more of the peak",
)


class Shared(nn.Module):
    """Attention whose heads share keys and values."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.heads, self.how = width // 32, how
        self.q, self.kv, self.out = (nn.Linear(width, n) for n in (width, 64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 32)).transpose(1, 2)
        k, v = self.kv(x)[:, None].chunk(2, -1)
        if self.how == "repeat":
            k, v = (one.repeat(1, self.heads, 1, 1) for one in (k, v))
        else:
            k, v = (one.expand(-1, self.heads, -1, -1) for one in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    batch, length, width = sizes(context, (32, 1024, 1024), (8, 128, 256))
    blocks = [Pre(nn.LayerNorm(width), width) for _ in range(3)]
    for block in blocks:
        block.mlp = Shared(width, "expand" if fixed else "repeat")
    return trained(context, nn.Sequential(*blocks), batch, length, width)
