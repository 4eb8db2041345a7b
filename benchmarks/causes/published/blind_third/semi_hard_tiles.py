"""A triplet loss that repeats its distances once for every pair to find semi-hard negatives."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="huggingface/sentence-transformers#4026",
    because="Distances and masks are repeated to batch by batch by batch before a row is reduced.",
    cause=("tile", "repeat", "materializ", "broadcast", "expanded", "large intermediate"),
    half=("pointwise", "elementwise", "kept", "memory", "copies"),
    place=("loss", "farther()", "loss.*"),
    fix="Sort the negatives of each anchor once and search each positive in them",
    gain="58.4 to 3.4 ms for 128 texts, 501.8 to 12.8 for 256 (the loss, on a CPU)",
)


class SemiHard(nn.Module):
    def __init__(self, fixed: bool, margin: float = 0.3) -> None:
        super().__init__()
        self.fixed, self.margin = fixed, margin

    def farther(self, away: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the nearest negative farther than each positive, else the farthest of all."""
        size = len(away)
        farthest = away.masked_fill(~other, float("-inf")).amax(1, keepdim=True)
        if self.fixed:
            order = away.detach().masked_fill(~other, float("inf")).sort(1)
            at = torch.searchsorted(order.values, away.detach(), right=True)
            at = at.clamp(max=size - 1)
            there = order.values.gather(1, at).isfinite()
            return torch.where(there, away.gather(1, order.indices.gather(1, at)), farthest)
        tiles = away.repeat_interleave(size, 0)
        candidate = other.repeat_interleave(size, 0) & (tiles > away.reshape(-1, 1))
        nearest = tiles.masked_fill(~candidate, float("inf")).amin(1).view(size, size)
        there = candidate.any(1).view(size, size)
        return torch.where(there, nearest, farthest)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = functional.normalize(x.float(), dim=1)
        away = (2 - 2 * x @ x.T).clamp(min=1e-6)
        same = labels[:, None] == labels
        negative = self.farther(away, ~same)
        pairs = same & ~torch.eye(len(x), dtype=torch.bool, device=x.device)
        losses = (away - negative + self.margin).clamp(min=0)
        return (losses * pairs).sum() / pairs.sum()


class Sentences(nn.Module):
    def __init__(self, words: int, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, words = sized(context, 384, 64, 16), sized(context, 6, 3, 1), 1000
    texts, length = sized(context, 512, 96, 8), sized(context, 64, 12, 4)
    model = made(context, lambda: Sentences(words, width, depth)).to(half(context))
    loss = SemiHard(fixed)
    text = context.randint(words, texts, length)
    labels = torch.arange(texts, device=context.device) % (texts // 4)

    def compared() -> torch.Tensor:
        value: torch.Tensor = loss(model(text), labels)
        return value

    return stepping(model, compared), {"": model, "loss": loss}
