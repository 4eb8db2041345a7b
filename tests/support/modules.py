"""Modules whose backward is not what their forward looks like: functions, checkpoints, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Cubes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(x) + Cube.apply(x * 0.5)


class Residual(nn.Module):
    """Adds and activates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = self.norm(self.conv(x))
        x += shortcut
        y: torch.Tensor = self.act(x)
        return y


class Custom(nn.Module):
    """A custom function of its own, and two of a module within it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.cubes = Cubes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(self.cubes(self.inner(x)))


class Block(nn.Module):
    """Adds and activates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        y += x
        return self.act(y) * 2


class Checkpointed(nn.Module):
    """Blocks that run again in backward, and functional code that does, too."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return checkpoint(lambda y: (y.tanh() * 2).exp(), x, use_reentrant=self.reentrant)
