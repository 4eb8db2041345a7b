"""The mask of local attention, made again in each layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import TokenLoss, half, sized, stepping
from benchmarks.models import Attention, Context, Gpt, made

CASE = Published(
    source="huggingface/transformers#11335",
    title="GPT-Neo's local mask computed by each layer from the same positions",
    cause=("mask again", "same mask", "mask once", "mask repeat"),
    place=("h.*.attn",),
    fix="Compute the mask once for all layers",
    gain="'does not change memory/speed': 0.227 s for 512 tokens before",
    nothing=True,
)


def local(length: int, window: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(length, device=device)
    apart = places[:, None] - places
    return (apart >= 0) & (apart < window)


class LocalAttention(Attention):
    given: torch.Tensor | None = None

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[-2]
        mask = local(length, length // 4, q.device) if self.given is None else self.given
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 1024, 128, 32), sized(context, 8, 3, 2)
    length, batch = sized(context, 512, 64, 8), sized(context, 24, 4, 2)
    words = sized(context, 16384, 512, 64)

    def make() -> Gpt:
        model = Gpt(width, depth, length, words)
        for block in model.h:
            block.attn = LocalAttention(width)
        return model

    model = made(context, make).to(half(context))
    tokens, follow = (context.randint(words, batch, length) for _ in range(2))
    criterion = TokenLoss()

    def loss() -> torch.Tensor:
        if fixed:
            mask = local(length, length // 4, tokens.device)
            for block in model.h:
                block.attn.given = mask
        return criterion(model(tokens), follow)

    return stepping(model, loss), {"": model, "loss": criterion}
