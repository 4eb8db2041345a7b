"""Gradient checkpointing of each block, where one in four fits in memory."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Checkpointed, Context, made

CASE = Published(
    source="huggingface/diffusers#10611",
    cause=("checkpoint", "recompu", "forward again"),
    place=("blocks.*", "blocks.**"),
    fix="Checkpoint every fourth block",
    gain="1.339 to 1.630 steps a second (9.3 to 22.2 GB)",
    partly=True,
)


class Denoiser(nn.Module):
    def __init__(self, width: int, depth: int, fixed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 16)
        self.blocks = nn.ModuleList(
            Checkpointed(Block(width), active=not fixed or number % 4 == 0)
            for number in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 1536, 128, 32), sized(context, 8, 4, 4)
    tokens, batch = sized(context, 1024, 128, 8), sized(context, 8, 2, 2)
    model = made(context, lambda: Denoiser(width, depth, fixed)).to(half(context))
    noisy, noise = (context.randn(batch, tokens, 16).to(half(context)) for _ in range(2))
    return stepping(model, lambda: (model(noisy) - noise).square().mean()), {"": model}
