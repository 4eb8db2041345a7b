"""Spans to hide, drawn by NumPy on the host for one recording after the other."""

import numpy
import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="huggingface/transformers#11764",
    cause=("numpy", "on the host", "waits for", "synchron", "copy", "loop"),
    place=("hide", "spans()"),
    fix="Draw all spans on the GPU at once",
    gain="1% of the training: 'not really noticeable'",
    device="cuda",
    same=False,  # other spans are drawn
)


def spans(batch: int, frames: int, device: str, fixed: bool) -> torch.Tensor:
    """Return which frames to hide: an eighth of them begin a span of up to 10."""
    span, count = min(10, frames // 4), frames // 16
    if fixed:
        first = torch.rand(batch, frames - span, device=device).topk(count).indices
        places = first[..., None] + torch.arange(span, device=device)
        hidden = torch.zeros(batch, frames, device=device, dtype=torch.bool)
        return hidden.scatter(1, places.flatten(1), True)
    mask = numpy.zeros((batch, frames), bool)
    for row in mask:
        first = numpy.random.choice(frames - span, count, replace=False)
        row[(first[:, None] + numpy.arange(span)).ravel()] = True
    return torch.from_numpy(mask).to(device)


class Hide(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.fixed, self.instead = fixed, nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = spans(*x.shape[:2], str(x.device), self.fixed)
        return torch.where(hidden[..., None], self.instead, x)


class Speech(nn.Module):
    def __init__(self, width: int, channels: int, depth: int, fixed: bool) -> None:
        super().__init__()
        self.sound = nn.Conv1d(1, channels, 10, stride=5)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(channels, channels, 3, stride=2) for _ in range(5)
        )
        self.project = nn.Linear(channels, width)
        self.hide = Hide(width, fixed)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, sound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = nn.functional.gelu(self.sound(sound[:, None]))
        for convolution in self.convolutions:
            x = nn.functional.gelu(convolution(x))
        known = self.project(x.mT)
        x = self.hide(known)
        for block in self.blocks:
            x = block(x)
        return x, known


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, channels = sized(context, 1024, 64, 32), sized(context, 512, 32, 8)
    depth, batch = sized(context, 8, 3, 1), sized(context, 12, 2, 2)
    numpy.random.seed(0)
    model = made(context, lambda: Speech(width, channels, depth, fixed)).to(half(context))
    sound = context.randn(batch, sized(context, 120_000, 24_000, 4000)).to(half(context))

    def loss() -> torch.Tensor:
        found, known = model(sound)
        return (found - known.detach()).float().square().mean()

    return stepping(model, loss), {"": model}
