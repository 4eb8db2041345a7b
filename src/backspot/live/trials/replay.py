"""Forward and backward of functions on copies, again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backspot.live.trials.trial import Run


def forward_and_backward(
    function: Callable[[], torch.Tensor],
    leaves: Sequence[torch.Tensor],
    autocast: tuple[str, bool, torch.dtype],
) -> Run:
    """Return what runs a function, and the backward to its leaves, under the step's autocast."""
    kind, on, dtype = autocast
    seeds: list[torch.Tensor] = []

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        with torch.autocast(kind, enabled=on, dtype=dtype):
            out = function()
        if not out.requires_grad:
            return
        if not seeds:
            seeds.append(numbers_like(out))
        out.backward(seeds[0])

    return run


def numbers_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return small random numbers, without the training's generators."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    numbers = torch.randn(tensor.shape, generator=generator, device=tensor.device)
    return (1e-3 * numbers).to(tensor.dtype)
