"""Causes in what a backward computes: dense tables' gradients, and backwards of many forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.case import Built, Context, plant
from benchmarks.causes.training import put, train_gpt, train_recommender, train_unet, train_vit
from benchmarks.models import Layer, custom, gpt, recommender, unet, vit

_TABLE = {
    "backward-ratio": "the forward reads a few rows, the backward fills them all",
    "unused-gradient": "most rows of the gradient are zero",
}


# dense-embedding-gradient -------------------------------------------------------------------------


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    cuda = next(model.parameters()).is_cuda
    return torch.optim.SGD(model.parameters(), lr=1e-3, fused=cuda)


@plant("dense-embedding-gradient", ["users"], _TABLE)
def dense_users_recommender(context: Context) -> Built:
    """Twenty million users, of which a step sees 2,048."""
    model = recommender(context, users=20_000_000)
    return train_recommender(context, model, _sgd(model))


@plant("dense-embedding-gradient", ["items"], _TABLE)
def dense_items_recommender(context: Context) -> Built:
    """Sixteen million items, of which a step sees at most 102,400; AdamW."""
    return train_recommender(context, recommender(context, items=16_000_000))


class _Hashed(nn.Module):
    """Adds rows of a table of two million."""

    def __init__(self, context: Context, width: int, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.rows = context.pick(2_000_000, 100)
        where = {"device": context.device, "dtype": torch.bfloat16}
        self.table = kind(self.rows, width, **where, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        places = torch.arange(batch * length, device=x.device)
        found = (places * 7919) % self.rows
        if isinstance(self.table, nn.EmbeddingBag):
            found = torch.stack((found, (found * 31) % self.rows), 1)
        return x + self.table(found).view_as(x)


@plant("dense-embedding-gradient", ["extra.table"], _TABLE)
def dense_hashed_gpt(context: Context) -> Built:
    """A hash table of two million n-grams, a dense gradient each step."""
    model = gpt(context)
    put(model, extra=_Hashed(context, model.width, nn.Embedding))
    return train_gpt(context, model, optimizer=_sgd(model))


@plant("dense-embedding-gradient", ["tokens.table"], _TABLE)
def dense_bag_vit(context: Context) -> Built:
    """An EmbeddingBag of two million features beside the patches."""
    model = vit(context)
    put(model, tokens=_Hashed(context, model.width, nn.EmbeddingBag, mode="sum"))
    return train_vit(context, model, optimizer=_sgd(model))


# backward-ratio -----------------------------------------------------------------------------------


class _Solved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        solved = gradient
        for _ in range(16):
            solved = gradient + 0.1 * (solved @ weight.T)
        return solved @ weight.T, x.flatten(0, 1).T @ solved.flatten(0, 1)


class Implicit(nn.Module):
    """A layer whose backward solves an equation by iteration."""

    def __init__(self, width: int, context: Context) -> None:
        super().__init__()
        weight = 0.01 * context.randn(width, width)
        self.weight = nn.Parameter(weight.to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Solved.apply(x, self.weight)


@plant("backward-ratio", ["tokens"])
def ratio_implicit_vit(context: Context) -> Built:
    """An implicit layer: sixteen iterations in its backward, one in its forward."""
    model = vit(context)
    return train_vit(context, put(model, tokens=Implicit(model.width, context)))


@plant("backward-ratio", ["extra"])
def ratio_iterated_gpt(context: Context) -> Built:
    """A rounding whose gradient is smoothed forty times over."""

    def smoothed(gradient: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            gradient = 0.5 * gradient + 0.25 * gradient.roll(1, 1)
        return gradient

    rounded = custom(torch.round, smoothed)
    return train_gpt(context, put(gpt(context), extra=Layer(lambda x: x + rounded(x))))


@plant("backward-ratio", ["skip.0"], {"casts": "grid_sample runs in fp32 under autocast"})
def ratio_warp_unet(context: Context) -> Built:
    """A warp by grid_sample, in which all pixels look at a few: its backward adds atomically."""

    def warp(x: torch.Tensor) -> torch.Tensor:
        turn = torch.tensor([[0.02, 0.0, 0.0], [0.0, 0.02, 0.0]], device=x.device)
        shape = list(x.shape)
        grid = functional.affine_grid(turn.expand(len(x), 2, 3), shape, align_corners=False)
        return functional.grid_sample(x, grid.to(x.dtype), align_corners=False).to(x.dtype)

    model = unet(context)
    model.skip[0] = Layer(warp)
    return train_unet(context, model)


@plant("backward-ratio", ["items"], {"recompute": "the backward computes the forward again"})
def ratio_estimated_recommender(context: Context) -> Built:
    """Items through a layer whose gradient is estimated from twenty perturbed forwards."""

    def estimated(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        slope = torch.zeros_like(x)
        for number in range(40):
            width = 0.01 * (number + 1)
            slope += (torch.sin(x + width) - torch.sin(x - width)) / (2 * width)
        return gradient * slope / 40

    sine = custom(torch.sin, estimated)

    class Items(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.num_embeddings = inner.num_embeddings
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return sine(self.inner(ids))

    model = recommender(context)
    return train_recommender(context, put(model, items=Items(model.items)))
