"""The models in which causes are planted: small, well built, and large enough for a fast GPU.

Transformers hold bf16 weights, so that nothing is cast; convolutional models run under bf16
autocast in channels_last.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "Attention",
    "Block",
    "Detector",
    "Gpt",
    "Mlp",
    "Recommender",
    "Unet",
    "Vit",
    "Wide",
]


class Attention(nn.Module):
    def __init__(self, width: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = max(1, width // 64), causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, length, _ = x.shape
        return self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(*self.split(x))
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """``tokens`` stands between the embedding and the blocks: a place to plant things."""

    def __init__(self, width: int, depth: int, side: int, patch: int) -> None:
        super().__init__()
        self.width = width
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.pos = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width))
        self.tokens: nn.Module = nn.Identity()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Gpt(nn.Module):
    def __init__(self, width: int, depth: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.width, self.vocabulary = width, vocabulary
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.extra: nn.Module = nn.Identity()
        self.h = nn.ModuleList(Block(width, causal=True) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head: nn.Module = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.extra(self.wte(tokens) + self.wpe(places))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Recommender(nn.Module):
    """A history of items through an LSTM and a tower."""

    def __init__(self, users: int, items: int, width: int, hidden: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items: nn.Module = nn.Embedding(items, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.tower = Mlp(hidden, 4 * hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, user: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        x = self.items(history) + self.users(user)[:, None]
        x, _ = self.lstm(x)
        return self.head(self.tower(x)).squeeze(-1)


class _Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Unet(nn.Module):
    def __init__(self, width: int, classes: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_Double(3, width), _Double(width, 2 * width), _Double(2 * width, 4 * width)]
        )
        self.mid: nn.Module = _Double(4 * width, 8 * width)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * width * n, width * n, 2, stride=2) for n in (4, 2, 1)
        )
        self.skip = nn.ModuleList(nn.Identity() for _ in range(3))
        self.up = nn.ModuleList(_Double(2 * width * n, width * n) for n in (4, 2, 1))
        self.out: nn.Module = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.mid(x)
        for grow, skip, up in zip(self.grow, self.skip, self.up, strict=True):
            x = up(torch.cat((grow(x), skip(kept.pop())), dim=1))
        return self.out(x)


class Detector(nn.Module):
    """Convolutions, scores, and a head over what ``select`` takes from the best places."""

    def __init__(self, width: int, best: int, select: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(inplace=True),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        self.score = nn.Linear(width, 1)
        self.select = select
        self.head = Mlp(width, 8 * width)
        self.box = nn.Linear(width, 4)
        self.best = best

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.backbone(x).flatten(2).transpose(1, 2)
        score = self.score(places).squeeze(-1)
        values, chosen = score.topk(self.best, dim=1)
        picked = self.select(places, chosen) * values[..., None].sigmoid()
        return self.box(self.head(picked))


class Wide(nn.Module):
    """Few tokens, large weights."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return x
