"""Images are copied into another layout for a norm, and back."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sizes, trained
from benchmarks.models import Context

CASE = Published(
    source="pytorch/pytorch#76012",
    cause=("layout", "permute"),
    place=("*.0",),
    fix="channels_last, and a norm over the last dimension",
    gain="the norm itself is fast, the permutes around it are not",
)


class Turned(nn.Module):
    """LayerNorm over the channels of an image."""

    def __init__(self, width: int, copies: bool) -> None:
        super().__init__()
        self.norm, self.copies = nn.LayerNorm(width), copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.permute(0, 2, 3, 1)
        if not self.copies:
            return self.norm(y).permute(0, 3, 1, 2)
        y = functional.layer_norm(y.contiguous(), y.shape[-1:], self.norm.weight, self.norm.bias)
        return y.permute(0, 3, 1, 2).contiguous()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    batch, width, side = sizes(context, (64, 192, 56), (8, 64, 48))
    blocks = (nn.Sequential(Turned(width, not fixed), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*blocks, nn.Conv2d(width, 8, 1))
    made = trained(context, model, batch, width, side, side)
    if fixed:
        model.to(memory_format=torch.channels_last)
    return made
