"""Attention with a bias for each pair, written out, in a model that works on the pairs."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="gnina/OMTRA#63",
    cause=("attention", "scaled_dot_product", "sdpa", "flash"),
    place=("blocks.*.attn", "blocks.*.attn.**"),
    fix="scaled_dot_product_attention",
    gain="'I did not see a difference in training speed': the pairs take the time",
)


class PairAttention(nn.Module):
    def __init__(self, width: int, pairs: int, heads: int, fixed: bool) -> None:
        super().__init__()
        self.heads, self.fixed = heads, fixed
        self.qkv, self.bias = nn.Linear(width, 3 * width), nn.Linear(pairs, heads)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias(z).permute(0, 3, 1, 2).contiguous()
        if self.fixed:
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5 + bias
            y = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class PairBlock(nn.Module):
    def __init__(self, width: int, pairs: int, heads: int, fixed: bool) -> None:
        super().__init__()
        self.norm_x, self.norm_z = nn.LayerNorm(width), nn.LayerNorm(pairs)
        self.transition = Mlp(pairs, 4 * pairs)
        self.attn = PairAttention(width, pairs, heads, fixed)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = z + self.transition(self.norm_z(z))
        x = x + self.attn(self.norm_x(x), z)
        return x + self.mlp(x), z


class Docking(nn.Module):
    def __init__(self, width: int, pairs: int, depth: int, heads: int, fixed: bool) -> None:
        super().__init__()
        self.atoms, self.places = nn.Linear(16, width), nn.Linear(8, pairs)
        self.blocks = nn.ModuleList(PairBlock(width, pairs, heads, fixed) for _ in range(depth))
        self.moves = nn.Linear(width, 3)

    def forward(self, atoms: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x, z = self.atoms(atoms), self.places(places)
        for block in self.blocks:
            x, z = block(x, z)
        return self.moves(x)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, pairs, heads = sized(context, 256, 64, 16), sized(context, 128, 64, 8), 4
    atoms, batch = sized(context, 256, 32, 6), sized(context, 8, 2, 2)
    model = made(context, lambda: Docking(width, pairs, sized(context, 4, 2, 1), heads, fixed))
    model = model.to(half(context))
    inputs = context.randn(batch, atoms, 16), context.randn(batch, atoms, atoms, 8)
    x, z = (one.to(half(context)) for one in inputs)
    return stepping(model, lambda: model(x, z).float().square().mean()), {"": model}
