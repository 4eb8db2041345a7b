"""Logits of all tokens, of which the loss reads the 15% that were masked."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="facebookresearch/pytext#957",
    cause=("ignore", "masked", "logits nobody"),
    place=("head", "loss"),
    fix="Give the head the masked tokens only",
    gain="85% of the logits and their softmax saved; the same in PrimeIntellect-ai/prime-rl#3326",
)


class Encoder(nn.Module):
    def __init__(self, words: int, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        x = self.norm(self.blocks(self.words(tokens))).flatten(0, 1)
        return self.head(x if chosen is None else x.index_select(0, chosen))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    words, width = sized(context, 50_304, 8192, 64), sized(context, 1024, 128, 32)
    length, batch = sized(context, 512, 64, 10), sized(context, 32, 4, 4)
    model = made(context, lambda: Encoder(words, width, sized(context, 4, 2, 1))).to(half(context))
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    tokens = context.randint(words, batch, length)
    chosen = torch.randperm(tokens.numel())[: tokens.numel() * 15 // 100].to(context.device)
    targets = torch.full_like(tokens.flatten(), -100)
    targets[chosen] = tokens.flatten()[chosen]

    def loss() -> torch.Tensor:
        if fixed:
            return criterion(model(tokens, chosen), targets[chosen])
        return criterion(model(tokens, None), targets)

    return stepping(model, loss), {"": model, "loss": criterion}
