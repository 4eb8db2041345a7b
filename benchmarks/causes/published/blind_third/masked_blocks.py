"""Blocks of a spectrogram masked sample by sample for self-supervised speech."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="NVIDIA-NeMo/Speech#15739",
    because="A loop over samples and blocks fills the mask, with places read from the device.",
    cause=("loop", "one by one", "launch", "small kernels", "synchron", "waits for"),
    half=("python", "small operators", "host", "fill"),
    place=("masking", "drawn()", "masking.*"),
    fix="Scatter the blocks of all samples at once",
    gain="41 to 0.16 ms for the masks, about 18% of the whole (batch of 32, 2,000 frames)",
)


class Masking(nn.Module):
    def __init__(self, block: int, share: float, fixed: bool, seed: torch.Generator) -> None:
        super().__init__()
        self.block, self.share, self.fixed, self.seed = block, share, fixed, seed

    def drawn(self, samples: int, frames: int, device: torch.device) -> torch.Tensor:
        blocks = frames // self.block
        count = max(1, int(self.share * blocks))
        order = torch.rand(samples, blocks, generator=self.seed, device=device)
        chosen = order.topk(count).indices
        mask = torch.zeros(samples, frames, dtype=torch.bool, device=device)
        if self.fixed:
            there = torch.zeros(samples, blocks, dtype=torch.bool, device=device)
            wide = there.scatter(1, chosen, True).repeat_interleave(self.block, 1)
            mask[:, : wide.shape[1]] = wide
            return mask
        for sample in range(samples):
            for number in chosen[sample]:
                first = int(number) * self.block
                mask[sample, first : first + self.block] = True
        return mask

    def forward(self, x: torch.Tensor, filler: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = self.drawn(x.shape[0], x.shape[1], x.device)
        return torch.where(mask[..., None], filler.to(x.dtype), x), mask


class Encoder(nn.Module):
    def __init__(self, width: int, depth: int, masking: Masking) -> None:
        super().__init__()
        self.masking = masking
        self.filler = nn.Parameter(torch.zeros(80))
        self.first = nn.Conv1d(80, width, 8, stride=4, padding=2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 4 * 80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.masking(x, self.filler)
        y = self.first(hidden.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            y = block(y)
        found = self.last(y).reshape(x.shape)
        wrong = (found.float() - x.float()).square().mean(-1)
        return (wrong * mask).sum() / mask.sum()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 512, 64, 16), sized(context, 6, 3, 1)
    frames, batch = sized(context, 1920, 192, 48), sized(context, 16, 8, 2)
    seed = torch.Generator(context.device).manual_seed(0)
    masking = Masking(sized(context, 48, 12, 4), 0.4, fixed, seed)
    model = made(context, lambda: Encoder(width, depth, masking)).to(half(context))
    x = context.randn(batch, frames, 80).to(half(context))
    return stepping(model, lambda: model(x)), {"": model}
