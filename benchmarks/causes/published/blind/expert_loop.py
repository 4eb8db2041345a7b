"""Waits for the GPU for each expert of each layer, to learn which tokens are its own."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, gpt, learning
from benchmarks.models import Context, Gpt, Mlp

CASE = Published(
    source="jingyaogong/minimind#837",
    cause=("synchron", "waits for", "wait for", "nonzero", ".item()"),
    place=("h.*.mlp", "h.*.mlp.**"),
    fix="Sort the tokens by expert and read all counts at once: one wait a layer",
    gain="96 to 8 waits a forward call; the layer 1.2 to 1.5 times as fast with 4 or more experts",
    device="cuda",
    partly=True,
)


class Experts(nn.Module):
    def __init__(self, width: int, count: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(Mlp(width, 2 * width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        found = torch.zeros_like(flat)
        for rows, expert in zip(self.rows(chosen), self.experts, strict=True):
            if rows is not None:
                mixed = expert(flat[rows]) * weight[rows, None]
                found = found.index_add(0, rows, mixed.to(found.dtype))
        return found.view(x.shape)

    def rows(self, chosen: torch.Tensor) -> list[torch.Tensor | None]:
        count = len(self.experts)
        if self.fixed:
            sizes = nn.functional.one_hot(chosen, count).sum(0).tolist()
            return list(chosen.argsort(stable=True).split(sizes))
        masks = (chosen == expert for expert in range(count))
        return [mask.nonzero().flatten() if mask.any() else None for mask in masks]


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    def alter(model: Gpt) -> None:
        for block in model.h:
            block.mlp = Experts(model.width, 8, fixed)

    return learning(*gpt(context, (768, 8, 512, 8, 6400), (96, 3, 64, 4, 512), alter))
