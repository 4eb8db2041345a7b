"""Phonemes of a speech model repeated for their durations frame by frame."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="axelspringer/ForwardTacotron#2",
    because="Each phoneme is expanded alone, by a duration that is read from the device.",
    cause=("loop", "one by one", "synchron", "waits for", "item()", "launch", "repeat_interleave"),
    half=("python", "small kernels", "small operators", "host"),
    place=("regulator", "expand()", "regulator.*"),
    fix="Index all frames of the batch at once",
    gain="0.9 to 2.5 steps a second (espnet#2482: the same change 284 to 7 ms)",
)


class Regulator(nn.Module):
    def __init__(self, frames: int, fixed: bool) -> None:
        super().__init__()
        self.frames, self.fixed = frames, fixed

    def expand(self, x: torch.Tensor, durations: torch.Tensor) -> torch.Tensor:
        found = []
        for number, phoneme in enumerate(x):
            found.append(phoneme.expand(int(durations[number] + 0.5), -1))
        return torch.cat(found)

    def forward(self, x: torch.Tensor, durations: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            ends = (durations + 0.5).long().cumsum(1)
            places = torch.arange(self.frames, device=x.device).expand(len(x), -1)
            at = torch.searchsorted(ends, places.contiguous(), right=True)
            here = (at < x.shape[1])[..., None]
            at = at.clamp(max=x.shape[1] - 1)[..., None].expand(-1, -1, x.shape[2])
            return x.gather(1, at) * here
        found = [self.expand(one, durations[number]) for number, one in enumerate(x)]
        return torch.stack([functional.pad(y, (0, 0, 0, self.frames - len(y))) for y in found])


class Speech(nn.Module):
    def __init__(self, phonemes: int, width: int, depth: int, frames: int, fixed: bool) -> None:
        super().__init__()
        self.phonemes = nn.Embedding(phonemes, width)
        self.encoder = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.regulator = Regulator(frames, fixed)
        self.decoder = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.mel = nn.Linear(width, 80)

    def forward(self, phonemes: torch.Tensor, durations: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.phonemes(phonemes))
        return self.mel(self.decoder(self.regulator(x, durations)))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 384, 64, 16), sized(context, 4, 2, 1)
    length, batch, most = sized(context, 64, 24, 5), sized(context, 16, 8, 2), 8
    frames = most * length
    model = made(context, lambda: Speech(80, width, depth, frames, fixed)).to(half(context))
    phonemes = context.randint(80, batch, length)
    durations = (context.randint(most, batch, length) + 1).float() - 0.2
    target = context.randn(batch, frames, 80)

    def loss() -> torch.Tensor:
        return functional.l1_loss(model(phonemes, durations).float(), target)

    return stepping(model, loss), {"": model}
