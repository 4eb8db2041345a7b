"""Causes on the host: too little to launch, too many launches, work that stays on the CPU."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.causes.case import Built, Context, plant
from benchmarks.causes.training import (
    put,
    train_detector,
    train_gpt,
    train_recommender,
    train_resnet,
    train_unet,
    train_vit,
)
from benchmarks.models import Attention, Layer, detector, gpt, recommender, resnet, unet, vit

_TINY = {
    "small-batch": "its kernels are too small for the GPU",
    "optimizer-kernels": "the host is what the optimizer waits for too",
    "backward-ratio": "where the host decides, ratios are those of Python and C++",
    "casts": "a tiny step spends much of it on the borders of autocast",
    "layout-copies": "tiny copies are launches too",
}
_FEW = {**_TINY, "launch-bound": "with so little to do, the host decides"}
_FETCHED = {
    "pageable-copy": "what is computed there is fetched from pageable memory",
    "device-copies": "and goes back",
    "launch-bound": "the GPU waits for the host",
    "host-waits": "the gradient is fetched too",
    "backward-ratio": "the backward of the part on the host is slow",
}


# launch-bound -------------------------------------------------------------------------------------


class _Cells(nn.Module):
    """An LSTM as a loop over its cell."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, hidden)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        state, outputs = None, []
        for part in x.unbind(1):
            state = self.cell(part, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), None


@plant("launch-bound", ["lstm", "lstm.cell"], _TINY)
def launch_cells_recommender(context: Context) -> Built:
    """An LSTM written as a loop of 50 steps over nn.LSTMCell."""
    model = recommender(context)
    lstm = model.lstm
    with torch.device(context.device):
        model.lstm = _Cells(lstm.input_size, lstm.hidden_size).to(torch.bfloat16)
    return train_recommender(context, model, batch=64)


class _EachHead(Attention):
    """A loop over the heads."""

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [
            super(_EachHead, self).mix(*(t[:, i : i + 1] for t in (q, k, v)))
            for i in range(self.heads)
        ]
        return torch.cat(heads, 1)


@plant("launch-bound", ["blocks.*.attn"], {**_TINY, "layout-copies": "each head is cut out"})
def launch_heads_vit(context: Context) -> Built:
    """Attention head by head, batch 8."""
    model = vit(context)
    for block in model.blocks:
        block.attn.__class__ = _EachHead
    return train_vit(context, model, batch=8)


@plant("launch-bound", ["extra"], _TINY)
def launch_chain_gpt(context: Context) -> Built:
    """Eight hundred operations on a vector of 1,024 numbers, in a model that is large otherwise."""

    class Chain(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.scale
            for _ in range(400):
                scale = torch.sin(scale) * 0.99
            return x + scale

    model = gpt(context)
    model.extra = Chain(model.width).to(context.device, torch.bfloat16)
    return train_gpt(context, model, batch=12)


@plant("launch-bound", ["select"], {**_TINY, "sorted-indexing": "each picture is indexed"})
def launch_pictures_detector(context: Context) -> Built:
    """Boxes picked picture by picture, in a loop."""

    def each_picture(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        picked = []
        for places, best in zip(x, chosen, strict=True):
            taken = places.index_select(0, best)
            taken = taken - taken.mean(0)
            picked.append(taken / (taken.square().mean() + 1e-6).sqrt())
        return torch.stack(picked)

    return train_detector(context, detector(context, Layer(each_picture), best=256))


# small-batch --------------------------------------------------------------------------------------


@plant("small-batch", None, _FEW)
def small_vit(context: Context) -> Built:
    """A batch of one image."""
    return train_vit(context, vit(context, depth=8), batch=1)


@plant("small-batch", None, _FEW)
def small_gpt(context: Context) -> Built:
    """One sequence of 64 tokens."""
    return train_gpt(context, gpt(context, depth=8), batch=1, length=context.pick(64, 16))


@plant("small-batch", None, _FEW)
def small_resnet(context: Context) -> Built:
    """A batch of two images."""
    return train_resnet(context, resnet(context), batch=2)


@plant("small-batch", None, {**_FEW, "dense-embedding-gradient": "four users of 100,000"})
def small_recommender(context: Context) -> Built:
    """Four users' histories of ten items."""
    model = recommender(context, users=1000, items=1000)
    return train_recommender(context, model, batch=4, length=10)


# cpu-operators ------------------------------------------------------------------------------------


@plant("cpu-operators", ["select"], _FETCHED)
def cpu_suppression_detector(context: Context) -> Built:
    """Overlaps of the best places computed on the host."""

    def suppress(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        places = chosen.cpu().float()
        near = (places[:, :, None] - places[:, None, :]).abs().sort(-1).values[..., 1]
        order = near.argsort(-1, descending=True).to(x.device)
        chosen = chosen.gather(1, order)
        return x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))

    return train_detector(context, detector(context, Layer(suppress), best=256))


@plant("cpu-operators", ["items", "items.inner"], _FETCHED)
def cpu_table_recommender(context: Context) -> Built:
    """A table that stays on the host: looked up, and its gradient added, there."""
    model = recommender(context)

    class OnHost(nn.Module):
        def __init__(self, inner: nn.Embedding) -> None:
            super().__init__()
            self.num_embeddings = inner.num_embeddings
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids.cpu()).to(ids.device)

    model.items = OnHost(model.items.cpu())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train_recommender(context, model, optimizer)


@plant("cpu-operators", ["extra"], _FETCHED)
def cpu_statistics_gpt(context: Context) -> Built:
    """A quantile of the embeddings found by sorting them on the host."""

    def quantile(x: torch.Tensor) -> torch.Tensor:
        seen = x.detach()[:, ::64].float().cpu().flatten().sort().values
        return x.clamp(max=float(seen[-1]) + 1)

    return train_gpt(context, put(gpt(context), extra=Layer(quantile)))


@plant("cpu-operators", ["out"], _FETCHED)
def cpu_weights_unet(context: Context) -> Built:
    """Weights of pixels computed on the host from what the model says."""
    model = unet(context)

    class Weighted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            best = y.detach().argmax(1).cpu()
            count = torch.bincount(best.flatten(), minlength=y.shape[1])
            weight = torch.softmax(-count[best].float() / best.numel(), -1)
            return y * (1 + weight.to(y.device)[:, None]).to(y.dtype)

    model.out = Weighted(model.out)
    return train_unet(context, model)
