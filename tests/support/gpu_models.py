"""Models and profiles for tests on a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.profiler import ProfilerActivity, profile

DEVICE = "cuda"
KEEPS_SITES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
"""Whether Inductor keeps the launch sites of compiled code."""
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class gpu_profile(profile):
    """A profile of host and device that begins and ends while the device is idle."""

    def __init__(self, **options: Any) -> None:
        super().__init__(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], **options)

    def start(self) -> None:
        torch.cuda.synchronize()
        super().start()

    def stop(self) -> None:
        torch.cuda.synchronize()
        super().stop()


class Attention(nn.Module):
    def __init__(self, width: int, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.drop(self.mlp(self.norm2(x)))


class Vit(nn.Module):
    """Patches, a class token, blocks and a head."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class Residual(nn.Module):
    """Adds and activates in place."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.act2 = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        y += self.down(x)
        return self.act2(y)


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1)
        self.blocks = nn.Sequential(Residual(32, 64, 2), Residual(64, 128, 2))
        self.head = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Gpt(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.Sequential(Block(width, causal=True), Block(width, causal=True))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places)))


def images() -> torch.Tensor:
    return torch.randn(8, 3, 32, 32, device=DEVICE)


def tokens() -> torch.Tensor:
    return torch.randint(0, 100, (8, 64), device=DEVICE)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "ViT": (Vit, images),
    "ResNet": (Resnet, images),
    "GPT": (Gpt, tokens),
}


def on_device(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().to(DEVICE)


class SlowFunction(torch.autograd.Function):
    """Gives back what it gets; in backward the GPU multiplies large matrices as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        large = torch.ones(2048, 2048, device=gradient.device)
        for _ in range(10):
            large = large @ large * 1e-4
        return gradient


class Slow(nn.Module):
    """Its backward takes the GPU longer than all else in these tests."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SlowFunction.apply(self.fc(x))


ASKED = 10


class AsksFunction(torch.autograd.Function):
    """In backward the host asks the GPU for a number, some times over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = sum(gradient.sum().item() for _ in range(ASKED))
        return gradient if total < float("inf") else -gradient


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AsksFunction.apply(x)


class Planted(nn.Module):
    """Blocks of linear layers, and one module among them that is given."""

    def __init__(self, plant: nn.Module, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)
        )
        self.plant = plant
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = self.plant(block(x)) if index == 1 else block(x)
        return self.head(x)
