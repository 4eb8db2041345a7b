"""Causes at the allocators: memory that is asked of the driver in each step, and given back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.causes.case import Built, Context, built, control, plant
from benchmarks.causes.training import images, train_vit
from benchmarks.models import Gpt, gpt, vit

_DRAINED = {
    "launch-bound": "once the GPU has run empty, it waits for the host",
    "small-batch": "and it is empty for long",
}


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Emptying(nn.Module):
    """Empties the cache in the middle of the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _empty_cache()
        return x


class _EmptyingBackward(nn.Module):
    """Empties the cache in the middle of the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda _: _empty_cache())
        return x


def _lengths(context: Context, model: Gpt) -> Callable[[], torch.Tensor]:
    """Return a loss whose sequences are longer in each step, up to the model's length."""
    loss, most = nn.CrossEntropyLoss(), model.wpe.num_embeddings
    steps = iter(range(most // 2, most, max(1, most // 64)))
    tokens = _tokens(context, model)

    def forward() -> torch.Tensor:
        some = tokens[:, : next(steps, most)]
        return loss(model(some).flatten(0, 1), some.flatten())

    return forward


@plant("allocator-calls", ["(outside model)"], _DRAINED)
def emptied_vit(context: Context) -> Built:
    """torch.cuda.empty_cache() after each step."""
    made = train_vit(context, vit(context))

    def step() -> None:
        made.step()
        _empty_cache()

    return Built(made.modules, step, made.close)


@plant("allocator-calls", None, _DRAINED)
def emptied_block_vit(context: Context) -> Built:
    """torch.cuda.empty_cache() within the forward of a block."""
    model = vit(context)
    model.blocks[1].mlp = nn.Sequential(_Emptying(), model.blocks[1].mlp)
    return train_vit(context, model)


@plant("allocator-calls", None, _DRAINED)
def emptied_backward_vit(context: Context) -> Built:
    """torch.cuda.empty_cache() within the backward of a block."""
    model = vit(context)
    model.blocks[1].mlp = nn.Sequential(_EmptyingBackward(), model.blocks[1].mlp)
    return train_vit(context, model)


def _tokens(context: Context, model: Gpt) -> torch.Tensor:
    """A batch that is so small that the allocator's calls are not hidden by the device's work."""
    return context.randint(model.vocabulary, context.pick(4, 2), model.wpe.num_embeddings)


class _Noise(nn.Module):
    """Adds noise that the host makes, from the same, or from new pinned memory for each batch."""

    def __init__(self, context: Context, *, kept: bool) -> None:
        super().__init__()
        self.noise = images(context, 192, 224, torch.bfloat16).cpu()
        self.kept = kept
        self.buffers: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.buffers and self.kept):
            pinned = self.noise.pin_memory() if x.is_cuda else self.noise
            self.buffers.append(pinned)
        moved = self.buffers[-1].to(x.device, non_blocking=True)
        return x + moved.flatten()[: x.shape[-1]]


def _noisy(context: Context, *, kept: bool) -> Built:
    model = vit(context)
    model.blocks[2].mlp = nn.Sequential(_Noise(context, kept=kept), model.blocks[2].mlp)
    return train_vit(context, model, batch=32)


@plant("allocator-calls", ["blocks.2.mlp.0"], _DRAINED)
def pinned_each_vit(context: Context) -> Built:
    """Each batch of noise in pinned memory of its own, which a list keeps."""
    return _noisy(context, kept=False)


@control("allocator-calls")
def pinned_once_vit(context: Context) -> Built:
    """Each batch of noise from the same pinned memory."""
    return _noisy(context, kept=True)


@control("allocator-calls")
def lengths_with_room_gpt(context: Context) -> Built:
    """Sequences of another length in each step, of which the longest came first."""
    model = gpt(context)
    longest = built(context, model, lambda: model(_tokens(context, model)).float().mean())
    longest.step()
    return built(context, model, _lengths(context, model))
