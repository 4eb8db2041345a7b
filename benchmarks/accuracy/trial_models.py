"""Trainings with and without a remedy, for ``trial_truth.py``: each builds the same step both ways.

Sizes are such that a step takes some tens of milliseconds on the device. A pair is a remedy as a
user writes it; a trial replaces single operators, on copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.models import Context

AS_IT_IS = "as it is"
FUSED = "scaled_dot_product_attention"
CAUSAL = f"{FUSED}(is_causal=True)"
SCORES = f"{FUSED}, the scores as a mask"
PINNED = "pinned memory, non_blocking=True"
CHANNELS_LAST = "channels_last"
TF32, BF16 = "float32_matmul_precision('high')", "autocast, bf16"
NO_CHECKPOINTS = "no checkpointing, for more memory"
COMPILED = "torch.compile"
LABELLED = "only positions with a label"
DENSE, FRAMES = "a dense convolution", "2-D depthwise convolutions of its frames"


@dataclass
class Built:
    """A training."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[], None]


@dataclass(frozen=True)
class Pair:
    """A remedy and a model.

    Attributes:
        rule: whose advice it is.
        variants: how a trial names the ways to write it.
        build: makes the training in one of these ways, or as it is.
        devices: where it makes sense.
    """

    rule: str
    variants: tuple[str, ...]
    build: Callable[[Context, str], Built]
    devices: tuple[str, ...] = ("cpu", "cuda")


def _training(
    model: nn.Module,
    given: Callable[[], torch.Tensor] | torch.Tensor,
    optimizer: torch.optim.Optimizer,
    *more: torch.optim.Optimizer,
    clip: bool | None = None,
    none: bool = True,
    around: Callable[[], Any] = nullcontext,
    run: Callable[..., torch.Tensor] | None = None,
) -> Built:
    """Return the training of a model on one tensor, or on what a function gives, for small squares.

    Args:
        around: what the forward runs in.
        run: what runs the model, if not itself.
    """

    def step() -> None:
        for one in (optimizer, *more):
            one.zero_grad(set_to_none=none)
        with around():
            x = given if isinstance(given, torch.Tensor) else given()
            loss = (run or model)(x).float().square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=clip)
        for one in (optimizer, *more):
            one.step()

    return Built(model, [optimizer, *more], step)


def _form(way: str) -> dict[str, bool]:
    return {way.partition("=")[0]: True} if way.startswith(("foreach", "fused")) else {}


def _fast(context: Context) -> dict[str, bool]:
    return {"fused": True} if context.device.startswith(("cpu", "cuda")) else {}


# Optimizers --------------------------------------------------------------------------------------


def _perceptron(context: Context, width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*parts).to(context.device)


def _optimized(
    cls: type[torch.optim.Optimizer], width: tuple[int, int], layers: int, **options: Any
) -> Callable[[Context, str], Built]:
    def build(context: Context, way: str) -> Built:
        model = _perceptron(context, context.pick(width[context.device != "cpu"], 16), layers)
        x = context.randn(context.pick(256, 8), next(model.parameters()).shape[1])
        form = _form(way)
        if way == AS_IT_IS and context.device != "cpu":
            form = {"foreach": False}
        optimizer = cls(model.parameters(), lr=1e-4, **options, **form)
        return _training(model, x, optimizer)

    return build


def _clipped(context: Context, way: str) -> Built:
    model = _perceptron(context, context.pick(128, 16), 24)
    x = context.randn(64, next(model.parameters()).shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **_fast(context))
    return _training(model, x, optimizer, clip=way != AS_IT_IS)


def _zeroed(context: Context, way: str) -> Built:
    model = _perceptron(context, context.pick(256, 16), 24)
    x = context.randn(64, next(model.parameters()).shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **_fast(context))
    return _training(model, x, optimizer, none=way != AS_IT_IS)


# Attention ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention by hand or in one kernel, with one of several masks."""

    def __init__(self, width: int, heads: int, length: int, kind: str, way: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.kind, self.way = heads, kind, way
        keep = torch.ones(length, length, dtype=torch.bool)
        if kind == "causal":
            keep = keep.tril()
        elif kind == "window":
            keep = keep.tril(16).triu(-16)
        self.register_buffer("keep", keep)
        self.bias = nn.Parameter(torch.zeros(heads, length, length)) if kind == "bias" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.way == CAUSAL:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.way == FUSED:
            mask = self.bias if self.bias is not None else self.keep
            mask = None if self.kind == "none" else mask
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            if self.bias is not None:
                scores = scores + self.bias
            elif self.kind != "none":
                scores = scores.masked_fill(~self.keep, float("-inf"))
            y = functional.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


def _attending(
    kind: str, length: tuple[int, int], batch: tuple[int, int], *, bf16: bool = False
) -> Callable[[Context, str], Built]:
    def build(context: Context, way: str) -> Built:
        torch.manual_seed(0)
        on_gpu = context.device != "cpu"
        tokens, width = context.pick(length[on_gpu], 8), context.pick((128, 512)[on_gpu], 16)
        layers = [Attention(width, 4, tokens, kind, way) for _ in range(context.pick(3, 1))]
        model = nn.Sequential(*layers).to(context.device)
        x = context.randn(context.pick(batch[on_gpu], 2), tokens, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **_fast(context))
        return _training(model, x, optimizer, around=lambda: context.bf16(bf16))

    return build


class GraphAttention(nn.Module):
    """Attention over the neighbours of a graph, whose scores are sums of two columns."""

    def __init__(self, width: int, heads: int, way: str, near: torch.Tensor) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.left = nn.Parameter(0.1 * torch.randn(heads, width // heads, 1))
        self.right = nn.Parameter(0.1 * torch.randn(heads, width // heads, 1))
        self.heads, self.way, self.near = heads, way, near

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(x).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        scores = functional.leaky_relu(h @ self.left + (h @ self.right).mT, 0.2)
        scores = torch.where(self.near, scores, torch.full_like(scores, -1e9))
        if self.way == SCORES:
            none = torch.zeros(1, *h.shape[:2], 8, device=x.device, dtype=x.dtype)
            y = functional.scaled_dot_product_attention(none, none, h[None], attn_mask=scores[None])
            return y[0].transpose(0, 1).flatten(1)
        return (functional.softmax(scores, dim=-1) @ h).transpose(0, 1).flatten(1)


def _graph(context: Context, way: str) -> Built:
    torch.manual_seed(0)
    count = context.pick(800 if context.device == "cpu" else 4000, 16)
    near = torch.rand(count, count, device=context.device) < 0.01
    near |= torch.eye(count, dtype=torch.bool, device=context.device)
    model = nn.Sequential(*[GraphAttention(64, 8, way, near) for _ in range(2)]).to(context.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **_fast(context))
    return _training(model, context.randn(count, 64), optimizer)


# Tables ------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A table of embeddings before a small recurrent or deep part."""

    def __init__(self, rows: int, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=sparse)
        self.rest = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 10))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.rest(self.table(index))


def _words(rows: tuple[int, int], tokens: tuple[int, int]) -> Callable[[Context, str], Built]:
    def build(context: Context, way: str) -> Built:
        torch.manual_seed(0)
        on_gpu = context.device != "cpu"
        sparse, count = way != AS_IT_IS, context.pick(rows[on_gpu], 40)
        model = Words(count, 64, sparse=sparse).to(context.device)
        batches = [context.randint(count, context.pick(tokens[on_gpu], 8)) for _ in range(4)]
        turn = cycle(batches)
        if sparse:
            first: torch.optim.Optimizer = torch.optim.SparseAdam(model.table.parameters(), lr=1e-3)
            more = [torch.optim.Adam(model.rest.parameters(), lr=1e-3)]
        else:
            first, more = torch.optim.Adam(model.parameters(), lr=1e-3), []
        return _training(model, lambda: next(turn), first, *more)

    return build


_HOT, _KEPT_HOT = "a one-hot matrix", "a one-hot matrix that is kept"
_WAYS = ("index_select", "F.embedding", _HOT, _KEPT_HOT)


class Looked(nn.Module):
    """``table[index]`` in several ways, before a small network."""

    def __init__(self, rows: int, index: torch.Tensor, width: int, way: str) -> None:
        super().__init__()
        self.table, self.way = nn.Parameter(0.1 * torch.randn(rows, width)), way
        self.net = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 8))
        self.register_buffer("index", index)
        hot = functional.one_hot(index, rows).float() if way == _KEPT_HOT else None
        self.register_buffer("hot", hot)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table, index = self.table, self.index
        if self.way == "index_select":
            found = table.index_select(0, index)
        elif self.way == "F.embedding":
            found = functional.embedding(index, table)
        elif self.way == _HOT:
            found = functional.one_hot(index, len(table)).to(table.dtype) @ table
        elif self.way == _KEPT_HOT:
            found = self.hot @ table
        else:
            found = table[index]
        return self.net(x + found)


def _looked(rows: int, positions: tuple[int, int], width: int) -> Callable[[Context, str], Built]:
    def build(context: Context, way: str) -> Built:
        torch.manual_seed(0)
        count = context.pick(positions[context.device != "cpu"], 16)
        index = context.randint(rows, count)
        model = Looked(rows, index, context.pick(width, 8), way).to(context.device)
        x = context.randn(count, model.table.shape[1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **_fast(context))
        return _training(model, x, optimizer)

    return build


def _copied(context: Context, way: str) -> Built:
    model = _perceptron(context, context.pick(1024, 16), 4)
    batch = torch.randn(context.pick(16384, 8), context.pick(1024, 16))
    pinned = way == PINNED
    source = batch.pin_memory() if pinned else batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **_fast(context))
    given = lambda: source.to(context.device, non_blocking=pinned)  # noqa: E731
    return _training(model, given, optimizer)


# Modules -----------------------------------------------------------------------------------------


class Kept(nn.Module):
    """Layers that are checkpointed, or not."""

    def __init__(self, layers: nn.Module, *, again: bool) -> None:
        super().__init__()
        self.layers, self.again = layers, again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


class Written(nn.Module):
    """A function written out, or called by its name."""

    def __init__(self, kind: str, width: int, *, called: bool) -> None:
        super().__init__()
        self.kind, self.called, self.width = kind, called, width
        self.weight = nn.Parameter(torch.ones(width)) if kind != "gelu" else None
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "layer_norm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "gelu":
            if self.called:
                return functional.gelu(x, approximate="tanh")
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
            return 0.5 * x * (1 + torch.tanh(inner))
        if self.kind == "rms_norm":
            if self.called:
                return functional.rms_norm(x, (self.width,), self.weight, 1e-6)
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        if self.called:
            return functional.layer_norm(x, (self.width,), self.weight, self.bias, 1e-5)
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return self.weight * centred / torch.sqrt(variance + 1e-5) + self.bias


def _written(kind: str) -> Callable[[Context, str], Built]:
    def build(context: Context, way: str) -> Built:
        torch.manual_seed(0)
        width, called = context.pick(256, 16), way not in (AS_IT_IS, COMPILED)
        parts = [
            nn.Sequential(nn.Linear(width, width), Written(kind, width, called=called))
            for _ in range(4)
        ]
        model = nn.Sequential(*parts).to(context.device)
        run: Callable[..., torch.Tensor] = torch.compile(model) if way == COMPILED else model
        x = context.randn(context.pick(1024 if context.device == "cpu" else 32768, 8), width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **_fast(context))
        return _training(model, x, optimizer, run=run)

    return build


class Turned(nn.Module):
    """Pairs of numbers that are turned by angles, as products of 2x2 matrices or written out."""

    def __init__(self, length: int, width: int, way: str) -> None:
        super().__init__()
        angle = torch.rand(length, width // 2)
        cos, sin = angle.cos(), angle.sin()
        table = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
        self.register_buffer("table", table)
        self.way, self.linear = way, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = self.linear(x).unflatten(-1, (-1, 2)).unsqueeze(-1)
        if self.way == AS_IT_IS:
            return torch.matmul(self.table, pairs).flatten(-3)
        table = self.table
        turned = table[..., :1] * pairs[..., :1, :] + table[..., 1:] * pairs[..., 1:, :]
        return turned.flatten(-3)


def _turned(context: Context, way: str) -> Built:
    torch.manual_seed(0)
    length, width = context.pick(256 if context.device == "cpu" else 1024, 8), context.pick(128, 8)
    model = nn.Sequential(*[Turned(length, width, way) for _ in range(3)]).to(context.device)
    x = context.randn(context.pick(4 if context.device == "cpu" else 32, 2), length, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **_fast(context))
    return _training(model, x, optimizer)


class Depthwise(nn.Module):
    """A 3-D depthwise convolution, as it is or in another form."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Conv3d(width, width, 3, padding=1, groups=width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        if self.way == AS_IT_IS:
            return self.layer(x)
        if self.way == DENSE:
            full = torch.diag_embed(weight.squeeze(1).permute(1, 2, 3, 0)).permute(3, 4, 0, 1, 2)
            return functional.conv3d(x, full, bias, padding=1)
        x = functional.pad(x, (0, 0, 0, 0, 1, 1)).transpose(1, 2)
        frames = x.shape[1] - 2
        parts = [
            functional.conv2d(x[:, at : at + frames].flatten(0, 1), one, None, 1, 1, 1, len(weight))
            for at, one in enumerate(weight.unbind(2))
        ]
        summed = parts[0] + parts[1] + parts[2]
        return summed.unflatten(0, (-1, frames)).transpose(1, 2) + bias.view(-1, 1, 1, 1)


def _depthwise(width: int, side: int) -> Callable[[Context, str], Built]:
    def build(context: Context, way: str) -> Built:
        torch.manual_seed(0)
        channels, length = context.pick(width, 8), context.pick(side, 6)
        parts = [nn.Conv3d(2, channels, 1), Depthwise(channels, way), nn.ReLU()]
        model = nn.Sequential(*parts, nn.Conv3d(channels, 4, 1)).to(context.device)
        x = context.randn(4, 2, *[length] * 3)
        return _training(model, x, torch.optim.SGD(model.parameters(), lr=1e-4))

    return build


def _labelled(context: Context, way: str) -> Built:
    torch.manual_seed(0)
    words, width = context.pick(8_000 if context.device == "cpu" else 50_304, 50), 512
    count = context.pick(512 if context.device == "cpu" else 8192, 20)
    body, head = nn.Sequential(nn.Linear(width, width), nn.ReLU()), nn.Linear(width, words)
    model = nn.Sequential(body, head).to(context.device)
    x, target = context.randn(count, width), context.randint(words, count)
    target[: 3 * count // 4] = -100
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        made, labels = body(x), target
        if way == LABELLED:
            kept = (target != -100).nonzero().squeeze(1)
            made, labels = made.index_select(0, kept), target[kept]
        functional.cross_entropy(head(made), labels).backward()
        optimizer.step()

    return Built(model, [optimizer], step)


_ADAM, _SGD = torch.optim.AdamW, torch.optim.SGD
_FORMS = ("foreach=True", "fused=True")
_SPARSE = ("sparse=True and SparseAdam",)
_CHAIN = "pointwise-chain"
_GPU, _OPTIMIZER = ("cuda",), "optimizer-kernels"
_LOOKUP, _TABLE, _ATTENTION = "duplicate-indices", "dense-embedding-gradient", "attention-math"

PAIRS = {
    "adamw_small": Pair(_OPTIMIZER, _FORMS, _optimized(_ADAM, (64, 64), 24)),
    "adamw_large": Pair(_OPTIMIZER, _FORMS, _optimized(_ADAM, (512, 2048), 6)),
    "copies": Pair("pageable-copy", (PINNED,), _copied, _GPU),
    "sgd_small": Pair(_OPTIMIZER, _FORMS, _optimized(_SGD, (64, 64), 24, momentum=0.9)),
    "sgd_large": Pair(_OPTIMIZER, _FORMS, _optimized(_SGD, (512, 2048), 6, momentum=0.9)),
    "clipping": Pair("clipping", ("foreach=True",), _clipped),
    "zero_grad": Pair("zero-grad-fill", ("set_to_none=True",), _zeroed),
    "attention": Pair(_ATTENTION, (FUSED,), _attending("none", (256, 1024), (4, 16))),
    "attention_causal": Pair(
        _ATTENTION, (FUSED, CAUSAL), _attending("causal", (256, 1024), (4, 16))
    ),
    "attention_short": Pair(_ATTENTION, (FUSED, CAUSAL), _attending("causal", (32, 32), (8, 256))),
    "gelu": Pair(_CHAIN, ('F.gelu(approximate="tanh")',), _written("gelu")),
    "rms_norm": Pair(_CHAIN, ("F.rms_norm",), _written("rms_norm")),
    "layer_norm": Pair(_CHAIN, ("F.layer_norm",), _written("layer_norm")),
    "tiny_products": Pair("tiny-products", ("element-wise products and sums",), _turned),
    "depthwise_wide": Pair("slow-convolution", (DENSE, FRAMES), _depthwise(256, 16), _GPU),
    "depthwise_narrow": Pair("slow-convolution", (DENSE, FRAMES), _depthwise(32, 64), _GPU),
    "labels_few": Pair("loss-passes", (LABELLED,), _labelled),
    "attention_window": Pair(_ATTENTION, (FUSED,), _attending("window", (256, 1024), (4, 16))),
    "attention_bias": Pair(_ATTENTION, (FUSED,), _attending("bias", (128, 512), (4, 16))),
    "attention_bf16": Pair(
        _ATTENTION, (FUSED, CAUSAL), _attending("causal", (256, 2048), (4, 8), bf16=True), _GPU
    ),
    "attention_graph": Pair(_ATTENTION, (SCORES,), _graph),
    "embedding_few": Pair(_TABLE, _SPARSE, _words((50_000, 2_000_000), (256, 4096))),
    "embedding_many": Pair(_TABLE, _SPARSE, _words((2000, 20_000), (2048, 65_536))),
    "lookup_few_rows": Pair(_LOOKUP, _WAYS, _looked(20, (4096, 65_536), 256)),
    "lookup_many_rows": Pair(_LOOKUP, _WAYS, _looked(2000, (2048, 32_768), 64)),
}
