"""Real changes for ``what_if.py``: models of which parts can be switched, and what each switch is.

The switches change one model in place, so that before and after can be timed in turn. A part is
removed, or halved: it then consists of two equal ones, of which one is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import (
    Block,
    Checkpointed,
    Context,
    DiffusionUnet,
    Gpt,
    Recommender,
    ResidualMlp,
    TwoStreams,
    Unet,
    Vit,
    made,
    resnet,
)
from benchmarks.workers import short


@dataclass
class Switch:
    """One change.

    Attributes:
        about: in words.
        kind: what kind of change.
        asked: what ``Report.what_if`` is asked for.
        set: makes the change (true) or takes it back.
    """

    about: str
    kind: str
    asked: dict[str, Any]
    set: Callable[[bool], None]


@dataclass
class Case:
    """A model, its step and what can be switched."""

    model: nn.Module
    step: Callable[[], None]
    switches: list[Switch]


# Switches ----------------------------------------------------------------------------------------


class _Part(nn.Module):
    """A part of a model that can be left out, or the second of its two equal halves."""

    def __init__(self, inner: nn.Module, *, twice: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.second = copy.deepcopy(inner) if twice else None
        self.less = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.second is None:
            return x if self.less else self.inner(x)
        x = self.inner(x)
        return x if self.less else self.second(x)


def _part(model: nn.Module, path: str, *, twice: bool = False) -> Switch:
    parent, _, name = path.rpartition(".")
    part = _Part(model.get_submodule(path), twice=twice)
    setattr(model.get_submodule(parent), name, part)

    def switch(on: bool) -> None:
        part.less = on
        for parameter in (part.inner if part.second is None else part.second).parameters():
            parameter.grad = None

    kind = "halved" if twice else "removed"
    return Switch(f"{path} {kind}", kind, {"factors": {path: 0.5 if twice else 0.0}}, switch)


class _Either(nn.Module):
    """A layer in two forms that compute the same."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other, self.less = one, other, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x) if self.less else self.one(x)


def _fused(model: nn.Module, path: str) -> Switch:
    return Switch(
        f"{path} fused",
        "fuse",
        {"fuse": [path]},
        partial(setattr, model.get_submodule(path), "less"),
    )


def _tf32(on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = on


_TF32 = Switch("products in TF32", "dtype", {"dtype": "tf32"}, _tf32)
_SGD, _ADAM = partial(torch.optim.SGD, lr=1e-4), partial(torch.optim.AdamW, lr=1e-4)


@dataclass
class _Training:
    """A training step whose optimizer, passes and clipping can be chosen.

    Attributes:
        passes: how many backward passes come before each update.
        clip: whether gradients are clipped.
        fused: whether the optimizer with ``fused=True`` takes the step.
        reads: whether the loss is read in each step.
        graphed: whether a graph of the step is replayed, which was captured before.
    """

    model: nn.Module
    loss: Callable[[], torch.Tensor]
    make: Callable[..., torch.optim.Optimizer] = _SGD
    passes: int = 1
    clip: bool = False
    around: Callable[[], Any] = nullcontext
    fused: bool = False
    reads: bool = False
    graphed: bool = False
    _optimizers: dict[bool, torch.optim.Optimizer] = field(default_factory=dict)
    _graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graphed and self._graph is not None:
            self._graph.replay()
            return
        if self.fused not in self._optimizers:
            options = {"fused": True} if self.fused else {}
            self._optimizers[self.fused] = self.make(self.model.parameters(), **options)
        optimizer = self._optimizers[self.fused]
        optimizer.zero_grad(set_to_none=True)
        self._train(optimizer)

    def _train(self, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(self.passes):
            with self.around():
                value = self.loss()
            value.backward()
            if self.reads:
                value.item()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()

    def fuse(self) -> Switch:
        return Switch(
            "a fused optimizer",
            "optimizer",
            {"optimizer": "fused"},
            partial(setattr, self, "fused"),
        )

    def graph(self) -> Switch:
        """Capture the step as PyTorch's notes on CUDA graphs do, and the tests on a GPU.

        A node that holds gradients belongs to the stream on which it was made, so nothing of the
        step has run on the stream of all others before; nothing reads from the device; and the
        gradients, which are gone before, are made within the graph, in its memory.

        Raises:
            RuntimeError: If the step cannot be captured, with what failed first. The process is
                then of no use: PyTorch's allocator still waits for the capture to end.
        """
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(aside)
        optimizer = self._optimizers[self.fused]
        optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._train(optimizer)
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            first: BaseException = error
            while first.__context__ is not None:  # the end of a failed capture fails, too
                first = first.__context__
            raise RuntimeError(f"CUDA error: the step is not captured: {short(first)}") from error
        self._graph = graph
        return Switch("a CUDA graph", "graph", {"graph": True}, partial(setattr, self, "graphed"))

    def wait(self) -> Switch:
        """The step reads its loss until this is switched on."""
        self.reads = True

        def switch(on: bool) -> None:
            self.reads = not on

        return Switch("the loss is not read", "no_waits", {"no_waits": True}, switch)


def _case(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    removed: Sequence[str] = (),
    halved: Sequence[str] = (),
    *,
    fuse: bool = False,
    wait: bool = False,
    tf32: bool = False,
    graph: bool = False,
    **options: Any,
) -> Case:
    switches = [_part(model, path) for path in removed]
    switches += [_part(model, path, twice=True) for path in halved]
    step = _Training(model, loss, **options)
    switches += [step.fuse()] * fuse
    if next(model.parameters()).is_cuda:
        if graph:
            switches.append(step.graph())
        else:
            unread = step.wait()  # all others read their loss, as most trainings do
            switches += [unread] * wait + [_TF32] * tf32
    return Case(model, step, switches)


def _small(value: torch.Tensor) -> torch.Tensor:
    return value.float().square().mean()


# Models ------------------------------------------------------------------------------------------


def _sizes(context: Context, cuda: Sequence[int], cpu: Sequence[int]) -> list[int]:
    """The sizes on this device; a quarter of the CPU's in a small run."""
    on_gpu = context.device.startswith("cuda")
    return [
        context.pick(a if on_gpu else b, max(2, b // 4)) for a, b in zip(cuda, cpu, strict=True)
    ]


def _half(context: Context) -> torch.dtype:
    return torch.bfloat16 if context.device.startswith("cuda") else torch.float32


def _vit(context: Context, large: bool, **options: Any) -> Case:
    width, batch, side = _sizes(
        context, (1024, 192 if large else 2, 224), (192 if large else 64, 2, 64)
    )
    model = made(context, lambda: Vit(width, 6, side, side // 8)).to(_half(context))
    images = context.randn(batch, 3, side, side).to(_half(context))
    removed = (
        "blocks.1.mlp",
        "blocks.5.attn",
        "blocks.4",
        "blocks.2.norm1",
        "blocks.2.attn",
        "blocks.1.norm2",
    )
    return _case(
        model,
        lambda: _small(model(images)),
        removed,
        ("blocks.0", "blocks.3.mlp"),
        **options,
    )


def _gpt(context: Context, large: bool, **options: Any) -> Case:
    width, batch, length, words = _sizes(
        context, (1024, 24 if large else 1, 1024, 8192), (192 if large else 64, 2, 64, 1024)
    )
    model = made(context, lambda: Gpt(width, 5, length, words)).to(_half(context))
    tokens = context.randint(words, batch, length if large else length // 4)
    removed = ("h.1.mlp", "h.4.attn", "h.3", "h.0.norm2")
    return _case(model, lambda: _small(model(tokens)), removed, ("h.2", "h.0.mlp"), **options)


def _resnet(context: Context, large: bool) -> Case:
    depth, batch = 50 if context.device.startswith("cuda") else 18, 256 if large else 4
    (batch, side) = _sizes(context, (batch, 224), (4 if large else 2, 64))
    model = resnet(context, depth)
    images = context.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    removed = ("layer1.1", "layer3.1", "layer2.1", "layer4.1")
    on_gpu = context.device.startswith("cuda")
    return _case(
        model,
        lambda: _small(model(images)),
        removed,
        around=context.bf16 if on_gpu else nullcontext,
        make=partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
        fuse=True,
    )


def _compiled(context: Context) -> Case:
    """A compiled model without some of its parts: each time it is another graph."""
    width, batch, side = _sizes(context, (1024, 64, 224), (128, 4, 64))
    model = made(context, lambda: Vit(width, 3, side, side // 8)).to(_half(context))
    images = context.randn(batch, 3, side, side).to(_half(context))
    removed = ("blocks.1.mlp", "blocks.2", "blocks.0.attn")
    case = _case(model, lambda: _small(run(images)), removed[: context.pick(3, 1)])
    run = torch.compile(model)
    return case


def _unet(context: Context) -> Case:
    width, batch, side = _sizes(context, (64, 96, 128), (8, 2, 64))
    model = made(context, lambda: Unet(width))
    images = context.randn(batch, 3, side, side)
    removed = [
        f"{path}.{number}" for path in ("up.2", "up.1", "mid", "down.2") for number in (3, 4)
    ]
    return _case(model, lambda: _small(model(images)), removed, make=_ADAM, fuse=True)


def _checkpointed(context: Context) -> Case:
    width, batch, length = _sizes(context, (1024, 64, 512), (256, 2, 128))
    blocks = [Checkpointed(Block(width)) for _ in range(6)]
    model = nn.Sequential(*blocks).to(context.device, _half(context))
    x = context.randn(batch, length, width).to(_half(context)).requires_grad_()
    return _case(
        model, lambda: _small(model(x)), ("1", "4", "2.inner.mlp", "3.inner.attn"), ("0", "5"),
        wait=True,
    )  # fmt: skip


def _accumulating(context: Context) -> Case:
    width, batch, length = _sizes(context, (1024, 8, 512), (256, 2, 64))
    model = nn.Sequential(*(Block(width) for _ in range(6))).to(context.device, _half(context))
    x = context.randn(batch, length, width).to(_half(context)).requires_grad_()
    removed = ("1", "4", "2.mlp", "3.attn")
    return _case(
        model, lambda: _small(model(x)), removed, ("0", "5"), passes=2, make=_ADAM, fuse=True
    )


def _trainer(context: Context) -> Case:
    """What a trainer does in each step: clipping, AdamW, a loss that is read."""
    return _gpt(context, False, clip=True, make=_ADAM, fuse=True, wait=True)


class _Teaching(nn.Module):
    """A student behind a teacher that is not trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.teacher, self.student = ResidualMlp(width, 8), ResidualMlp(width, 4)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aim = self.teacher(x)
        return self.student(x) - aim


def _forward_heavy(context: Context) -> Case:
    width, rows = _sizes(context, (2048, 8192), (256, 256))
    model = _Teaching(width).to(context.device)
    x = context.randn(rows, width).requires_grad_()
    removed = ("teacher.layers.1", "teacher.layers.3", "student.layers.1", "teacher.layers.6")
    halved = ("student.layers.2", "teacher.layers.5")
    return _case(model, lambda: _small(model(x)), removed, halved, tf32=True)


class _Words(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(words, width), ResidualMlp(width, 3)
        self.head, self.extra = nn.Linear(width, words, bias=False), ResidualMlp(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.extra(self.body(self.words(tokens))))


def _loss_heavy(context: Context) -> Case:
    """A loss over a large vocabulary."""
    words, width, rows = _sizes(context, (65_536, 1024, 4096), (8192, 128, 128))
    model = _Words(words, width).to(context.device)
    tokens = context.randint(words, rows)
    removed = ("extra", "body.layers.1")
    return _case(
        model,
        lambda: functional.cross_entropy(model(tokens), tokens),
        removed,
        ("body.layers.2",),
        make=_ADAM,
        fuse=True,
        tf32=True,
    )


def _tables(context: Context) -> Case:
    """Large tables under AdamW."""
    users, items, width, rows = _sizes(context, (50_000, 20_000, 256, 4096), (20_000, 5000, 64, 64))
    model = Recommender(users, items, width, width).to(context.device)
    user, history = context.randint(users, rows), context.randint(items, rows, 16)
    return _case(model, lambda: _small(model(user, history)), ("tower",), make=_ADAM, fuse=True)


def _streams(context: Context, large: bool) -> Case:
    width, rows = _sizes(context, (2048 if large else 256, 8192 if large else 64), (256, 128))
    model = TwoStreams(width, 6, context.device).to(context.device)
    x = context.randn(rows, width).requires_grad_()
    removed = ("side", "main.layers.1", "main.layers.3")
    halved = ("main.layers.4",)
    return _case(model, lambda: _small(model(x)), removed, halved, wait=True, tf32=large)


def _graphed(context: Context, model: nn.Module, *size: int) -> Case:
    """Steps that wait for the host, and can be one graph."""
    inputs = context.randint(256, *size) if isinstance(model, Gpt) else context.randn(*size)
    make = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
    run = model.to(context.device)
    return _case(run, lambda: _small(run(inputs)), make=make, clip=True, graph=True)


def _chain(width: int, depth: int) -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))
    )


class _Norm(nn.Module):
    """LayerNorm written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)


class _Gelu(nn.Module):
    """GELU written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3))))


def _written(context: Context, large: bool) -> Case:
    """Norms and activations that are written out."""
    width, batch, length = _sizes(
        context, (1024 if large else 256, 64 if large else 4, 512 if large else 128), (256, 2, 64)
    )
    blocks = nn.Sequential(*(Block(width) for _ in range(4)))
    for block in blocks:
        block.norm1 = _Either(_Norm(), nn.LayerNorm(width, elementwise_affine=False))
        block.mlp.act = _Either(_Gelu(), nn.GELU("tanh"))
    model = blocks.to(context.device, _half(context))
    x = context.randn(batch, length, width).to(_half(context)).requires_grad_()
    case = _case(model, lambda: _small(model(x)), ("2.attn", "1.mlp"), ("3",))
    paths = ("0.norm1", "1.norm1", "0.mlp.act", "2.mlp.act")
    case.switches += [_fused(model, path) for path in paths]
    return case


def _diffusion(context: Context) -> Case:
    width, batch, side = _sizes(context, (128, 64, 64), (32, 2, 32))
    model = made(context, lambda: DiffusionUnet(width))
    images, when = context.randn(batch, 3, side, side), context.randint(1000, batch)
    around = context.bf16 if context.device.startswith("cuda") else nullcontext
    removed = ("attention", "down.0.conv2", "down.2.conv2", "up.1.conv2", "up.2.norm2")
    return _case(
        model,
        lambda: _small(model(images, when)),
        removed,
        around=around,
        make=_ADAM,
        clip=True,
        fuse=True,
        wait=True,
    )


CASES: dict[str, Callable[[Context], Case]] = {
    "forward_heavy": _forward_heavy,
    "loss_heavy": _loss_heavy,
    "tables": _tables,
    # Some at two sizes: one waits for the GPU, the other for the host.
    **{
        f"{name}_{size}": partial(make, large=size == "large")
        for name, make in {
            "vit": _vit,
            "gpt": _gpt,
            "resnet": _resnet,
            "streams": _streams,
            "written": _written,
        }.items()
        for size in ("large", "tiny")
    },
    "unet": _unet,
    "diffusion": _diffusion,
    "checkpointed": _checkpointed,
    "accumulating": _accumulating,
    "trainer": _trainer,
    "vit_adamw": partial(_vit, large=False, make=_ADAM, fuse=True, wait=True),
    "graphed_chain": lambda context: _graphed(context, _chain(256, 24), 64, 256),
    "graphed_mlp": lambda context: _graphed(context, ResidualMlp(256, 16), 64, 256),
    "graphed_gpt": lambda context: _graphed(context, Gpt(256, 4, 64, 256), 4, 64),
    "compiled": _compiled,
}
