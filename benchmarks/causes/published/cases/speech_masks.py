"""SpecAugment's masks, filled span by span in a step of a speech model."""

from __future__ import annotations

import numpy
import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="huggingface/transformers#11764",
    title="Masks of speech frames made by a Python loop over the batch",
    cause=("loop", "numpy"),
    place=("masks()",),
    fix="Fill all spans at once",
    gain="'a 1% speed-up in training (not really noticeable)'",
    nothing=True,
)


def masks(starts: numpy.ndarray, frames: int, fixed: bool) -> torch.Tensor:
    """True where a frame is masked; each span has ten."""
    found = numpy.zeros((len(starts), frames), dtype=bool)
    if fixed:
        spans = (starts[..., None] + numpy.arange(10)).reshape(len(starts), -1)
        numpy.put_along_axis(found, spans, values=True, axis=1)
    else:
        for row, spans in zip(found, starts, strict=True):
            for start in spans:
                row[start : start + 10] = True
    return torch.from_numpy(found)


class Listener(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, width, 10, stride=5),
            nn.GELU(),
            nn.Conv1d(width, width, 8, stride=8),
            nn.GELU(),
            nn.Conv1d(width, width, 8, stride=8),
        )
        self.masked = nn.Parameter(torch.zeros(width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 32)

    def forward(self, speech: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.convolutions(speech).transpose(1, 2)
        return self.head(self.blocks(torch.where(mask[..., None], self.masked, x)))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 768, 64, 32), sized(context, 8, 2, 1)
    batch, frames = sized(context, 16, 2, 2), sized(context, 500, 120, 12)
    model = made(context, lambda: Listener(width, depth)).to(half(context))
    speech = context.randn(batch, 1, frames * 320 + 300).to(half(context))
    targets, random = context.randint(32, batch * frames), numpy.random.default_rng(0)
    spans = max(1, frames // 25)

    def loss() -> torch.Tensor:
        starts = random.integers(0, frames - 10, (batch, spans))
        logits = model(speech, masks(starts, frames, fixed).to(context.device))
        return functional.cross_entropy(logits.flatten(0, 1), targets)

    return stepping(model, loss), {"": model}
