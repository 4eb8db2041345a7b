"""Adapters of rank 1 are trained with every block checkpointed."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sizes, stepping
from benchmarks.models import Block, Checkpointed, Context, made

CASE = Published(
    source="bghira/SimpleTuner#1184",
    cause=("checkpoint", "recompu", "forward again"),
    place=("blocks.*", "blocks.**"),
    fix="Checkpoint every second block",
    gain="4.25 to 3.00 s a step (Flux, LoRA of rank 1, 24 GB); 1.00 to 1.50 steps a second (SDXL)",
    partly=True,
)


class Adapted(nn.Module):
    """A frozen layer, and an adapter of rank 1 beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 1, bias=False)
        self.up = nn.Linear(1, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


class Flow(nn.Module):
    def __init__(self, width: int, depth: int, fixed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 64)
        blocks = [Block(width).requires_grad_(False) for _ in range(depth)]
        for block in blocks:
            block.attn.qkv, block.attn.proj = Adapted(block.attn.qkv), Adapted(block.attn.proj)
        self.blocks = nn.ModuleList(
            Checkpointed(block, active=not fixed or number % 2 == 0)
            for number, block in enumerate(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, tokens, batch = sizes(context, (1536, 10, 1024, 8), (128, 6, 128, 2))
    model = made(context, lambda: Flow(width, depth, fixed)).to(half(context))
    noisy, flow = (context.randn(batch, tokens, 64).to(half(context)) for _ in range(2))
    return stepping(model, lambda: (model(noisy) - flow).square().mean()), {"": model}
