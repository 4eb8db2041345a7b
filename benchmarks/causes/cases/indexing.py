"""Causes in what autograd does for indexing: waits, sorts, duplicates, dense gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.causes.case import Built, Context, built, control, plant
from benchmarks.causes.training import (
    put,
    train_detector,
    train_gpt,
    train_recommender,
    train_resnet,
    train_unet,
    train_vit,
)
from benchmarks.models import Block, Layer, detector, gpt, recommender, resnet, unet, vit

_WAITS = {
    "launch-bound": "each wait empties the queue, and the GPU idles until it fills again",
    "backward-ratio": "the waits are in this module's backward alone",
}
_RATIO = {"backward-ratio": "the forward is a cheap gather, the backward sorts"}
_DETERMINISTIC = {"deterministic-fill": "deterministic mode fills what empty() gives", **_RATIO}
_SORTS = {"sorted-indexing": "an index's backward sorts whatever it is given", **_RATIO}


# host-waits ---------------------------------------------------------------------------------


class ClipEach(torch.autograd.Function):
    """Passes on; its backward clips each group of channels, asking the host each time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: int) -> torch.Tensor:
        ctx.groups = groups
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [
            part / part.norm() if part.norm().item() > 1 else part
            for part in gradient.chunk(ctx.groups, -1)
        ]
        return torch.cat(parts, -1), None


class Clip(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ClipEach.apply(x, self.groups)


@plant("host-waits", ["tokens"], _WAITS)
def sync_clip_vit(context: Context) -> Built:
    """A Function whose backward takes .item() of 32 norms."""
    return train_vit(context, put(vit(context), tokens=Clip(32)))


@plant("host-waits", ["layer2", "layer2.*"], _WAITS)
def sync_hook_resnet(context: Context) -> Built:
    """A tensor hook that looks for values that are not finite, image by image."""
    model = resnet(context)

    class Checked(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)

            def look(gradient: torch.Tensor) -> None:
                for part in gradient.split(max(1, len(gradient) // 32)):
                    if not bool(torch.isfinite(part).all()):
                        raise FloatingPointError("a gradient is not finite")

            x.register_hook(look)
            return x

    model.layer2 = Checked(*model.layer2)
    return train_resnet(context, model)


class _Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        largest = [float(row.abs().max().cpu()) for row in gradient.chunk(24)]
        return gradient.clamp(-max(largest), max(largest))


@plant("host-waits", ["h.*.mlp.act"], _WAITS)
def sync_quantised_gpt(context: Context) -> Built:
    """Quantised activations whose backward fetches ranges with .cpu()."""
    model = gpt(context)

    def act(x: torch.Tensor) -> torch.Tensor:
        return _Quantise.apply(functional.gelu(x))

    for block in model.h:
        block.mlp.act = Layer(act)
    return train_gpt(context, model)


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros_like(gradient)
        for part, target in zip(gradient, kept, strict=True):
            chosen = torch.nonzero(part.abs().amax((1, 2)) > 0).squeeze(1)
            target[chosen] = part[chosen]
        return kept


@plant("host-waits", ["skip.1"], {**_WAITS, **_SORTS})
def sync_nonzero_unet(context: Context) -> Built:
    """A sparsified skip connection: nonzero in the backward, image by image."""
    model = unet(context)

    def sparse(x: torch.Tensor) -> torch.Tensor:
        return _Largest.apply(x)

    model.skip[1] = Layer(sparse)
    return train_unet(context, model)


@plant(
    "host-waits",
    ["blocks.*", "blocks.*.*"],
    {**_WAITS, "recompute": "the blocks are checkpointed, which is how the wait gets there"},
)
def sync_recomputed_vit(context: Context) -> Built:
    """Checkpointed blocks that take .item() in forward, and so in backward again."""
    model = vit(context)

    class Watched(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            for part in x.chunk(12):
                if part.mean().item() > 1e6:
                    raise FloatingPointError("diverged")
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=True)

    for block in model.blocks:
        block.__class__ = Watched
    return train_vit(context, model)


# sorted-indexing ----------------------------------------------------------------------------------


def drop_gather(x: torch.Tensor) -> torch.Tensor:
    """Keep a random half of the tokens with gather, as timm's PatchDropout does."""
    batch, count, width = x.shape
    kept = torch.randn(batch, count, device=x.device).argsort(-1)[:, : count // 2]
    return x.gather(1, kept[..., None].expand(-1, -1, width))


@plant("sorted-indexing", ["tokens"], _DETERMINISTIC)
def sorted_patch_drop(context: Context) -> Built:
    """Patch dropout by gather, under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return train_vit(context, put(vit(context), tokens=Layer(drop_gather)), batch=256)


def pick(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Take the chosen places."""
    return x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))


@plant("sorted-indexing", ["select"], _DETERMINISTIC)
def sorted_detector(context: Context) -> Built:
    """The best 1024 places gathered, under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return train_detector(context, detector(context, Layer(pick)))


@plant("sorted-indexing", ["extra"], _DETERMINISTIC)
def sorted_take_gpt(context: Context) -> Built:
    """Tokens reordered by take_along_dim, under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)

    def reorder(x: torch.Tensor) -> torch.Tensor:
        order = torch.randn(x.shape[:2], device=x.device).argsort(-1)
        return torch.take_along_dim(x, order[..., None], 1)

    return train_gpt(context, put(gpt(context), extra=Layer(reorder)))


@plant("sorted-indexing", ["tokens"], _RATIO)
def sorted_shuffle_vit(context: Context) -> Built:
    """Each image's tokens shuffled by indexing with a tensor: sorted in any mode."""

    def shuffle(x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(x), device=x.device)[:, None]
        for _ in range(3):
            x = x[rows, torch.randn(x.shape[:2], device=x.device).argsort(-1)]
        return x

    return train_vit(context, put(vit(context), tokens=Layer(shuffle)))


@plant(
    "sorted-indexing",
    ["skip.0"],
    {**_DETERMINISTIC, "layout-copies": "pixels are flattened for it"},
)
def sorted_pixels_unet(context: Context) -> Built:
    """Pixels of a skip connection sampled by index_select, under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)

    def jitter(x: torch.Tensor) -> torch.Tensor:
        flat = x.permute(0, 2, 3, 1).flatten(0, 2)
        near = torch.arange(len(flat), device=x.device) ^ 1
        for _ in range(3):
            flat = flat.index_select(0, near)
        return flat.view(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2)

    model = unet(context)
    model.skip[0] = Layer(jitter)
    return train_unet(context, model)


# duplicate-indices --------------------------------------------------------------------------------


class Segments(nn.Module):
    """Adds one of a few rows to each token, by indexing a parameter."""

    def __init__(self, rows: int, width: int, context: Context) -> None:
        super().__init__()
        self.rows = rows
        dtype, device = torch.bfloat16, context.device
        self.table = nn.Parameter(torch.zeros(rows, width, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        which = torch.arange(x.shape[0] * x.shape[1], device=x.device) * self.rows
        return x + self.table[(which // len(which)).view(x.shape[:2])]


@plant("duplicate-indices", ["extra"], _SORTS)
def duplicates_segments_gpt(context: Context) -> Built:
    """Four segment rows for 24,576 tokens."""
    model = gpt(context)
    model.extra = Segments(4, model.width, context)
    return train_gpt(context, model)


@plant("duplicate-indices", ["tokens"], _SORTS)
def duplicates_rows_vit(context: Context) -> Built:
    """A row embedding of 14 rows, indexed by every token."""
    model = vit(context)
    model.tokens = Segments(14, model.width, context)
    return train_vit(context, model)


@plant("duplicate-indices", ["items"], _SORTS)
def duplicates_skewed_recommender(context: Context) -> Built:
    """A table indexed by hand, where half of all items are the padding."""
    model = recommender(context)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_embeddings = model.items.num_embeddings
            self.weight = nn.Parameter(model.items.weight.detach().clone())

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.weight[ids * (ids % 2)]

    model.items = Table()
    return train_recommender(context, model)


@plant("duplicate-indices", ["out"], _SORTS)
def duplicates_palette_unet(context: Context) -> Built:
    """A palette of 16 colours, indexed by every pixel."""
    model = unet(context)

    class Palette(nn.Module):
        def __init__(self, out: nn.Module) -> None:
            super().__init__()
            self.out = out
            self.colours = nn.Parameter(torch.zeros(16, 16, device=context.device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.out(x)
            colours = self.colours[y[:, :, ::2, ::2].argmax(1)].permute(0, 3, 1, 2)
            return y + functional.interpolate(colours, scale_factor=2)

    model.out = Palette(model.out)
    return train_unet(context, model)


# masked-indexing ----------------------------------------------------------------------------


class Chosen(nn.Module):
    """Applies one of several layers to each row: to those that a mask picks, or to all."""

    def __init__(self, width: int, parts: int, *, put: bool = True, all_rows: bool = False) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(width, width) for _ in range(parts))
        self.put, self.all_rows = put, all_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        kind, total = torch.arange(len(rows), device=x.device) % len(self.each), rows
        for number, layer in enumerate(self.each):
            mask = kind == number
            if self.all_rows:
                total = torch.where(mask[:, None], layer(rows), total)
            elif self.put:
                total = total.index_put((mask,), layer(rows[mask]))
            else:
                total = total + layer(rows[mask]).sum(0)
        return total.view_as(x)


_MASKED = {
    **_WAITS,
    "host-waits": "the host waits for the number of indices",
    "small-batch": "each layer has few tokens",
    "operator-loop": "a layer after the other",
}
_SHORT = {"launch-bound": "a small model on a large GPU"}


def _chosen(context: Context, parts: int, batch: int = 8, **options: Any) -> Built:
    model = gpt(context)
    model.extra = Chosen(model.width, parts, **options).to(context.device, torch.bfloat16)
    return train_gpt(context, model, batch=batch)


@plant("masked-indexing", ["extra"], _MASKED)
def masks_of_experts_gpt(context: Context) -> Built:
    """Eight layers, each for the tokens that a mask picks."""
    return _chosen(context, 8)


@plant("masked-indexing", ["extra"], _MASKED)
def masks_of_many_gpt(context: Context) -> Built:
    """Thirty-two layers, each for the tokens that a mask picks."""
    return _chosen(context, 32)


@plant("masked-indexing", ["extra"], _MASKED)
def masks_read_gpt(context: Context) -> Built:
    """Rows that masks pick are read, and not written."""
    return _chosen(context, 16, put=False)


@plant("masked-indexing", ["extra"], _MASKED)
def masks_of_a_small_batch_gpt(context: Context) -> Built:
    """Eight layers for few tokens."""
    return _chosen(context, 8, batch=2)


@control("masked-indexing", _SHORT)
def chosen_rows_gpt(context: Context) -> Built:
    """All layers for all tokens, of which a mask chooses one."""
    return _chosen(context, 8, all_rows=True)


@control("masked-indexing", {**_SHORT, "sorted-indexing": "an index's backward sorts"})
def one_mask_gpt(context: Context) -> Built:
    """One mask picks the tokens of the loss."""
    model, loss = gpt(context), nn.CrossEntropyLoss()
    length = model.wpe.num_embeddings
    tokens = context.randint(model.vocabulary, context.pick(8, 2), length)
    mask = tokens % 8 == 0
    return built(context, model, lambda: loss(model(tokens)[mask], tokens[mask]), loss=loss)
