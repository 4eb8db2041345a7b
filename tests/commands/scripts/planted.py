"""The slow module that every script has somewhere."""

from __future__ import annotations

import os
from typing import Any

import torch

ROUNDS = int(os.environ.get("ROUNDS", "40"))
"""Of products whose results nobody needs: the losses are the same without them."""


class _Wasteful(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        scratch = torch.ones(256, 256, device=gradient.device)
        for _ in range(ROUNDS):
            scratch = (scratch @ scratch).clamp(0, 1)
        return gradient


class Slow(torch.nn.Module):
    """Passes its input on, and wastes time in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wasteful.apply(x)
