"""GPT-Neo's local mask computed by each layer from the same positions."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, TokenLoss, gpt, stepping
from benchmarks.models import Attention, Context, Gpt

CASE = Published(
    source="huggingface/transformers#11335",
    cause=("mask again", "same mask", "mask once", "mask repeat"),
    place=("h.*.attn",),
    fix="Compute the mask once for all layers",
    gain="'does not change memory/speed': 0.227 s for 512 tokens before",
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
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    def alter(model: Gpt) -> None:
        for block in model.h:
            block.attn = LocalAttention(model.width)

    model, tokens, follow = gpt(context, (1024, 8, 512, 24, 16384), (128, 3, 64, 4, 512), alter)
    criterion = TokenLoss()

    def loss() -> torch.Tensor:
        if fixed:
            length = tokens.shape[1]
            mask = local(length, length // 4, tokens.device)
            for block in model.h:
                block.attn.given = mask
        return criterion(model(tokens), follow)

    return stepping(model, loss), {"": model, "loss": criterion}
