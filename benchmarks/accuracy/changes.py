"""Real changes for ``what_if.py``: models of which parts can be switched, and what each switch is.

The switches change one model in place, so that before and after can be timed in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.replay.saving import Change, free_spans, owners_within, scaled_owners
from benchmarks.models import Context, ResidualMlp, TwoStreams, gpt, resnet, training_step, vit


@dataclass
class Switch:
    """One change.

    Attributes:
        about: in words.
        paths: gives the subtrees that change.
        set: makes the change (true) or takes it back.
        predict: the change as a replay is asked for it.
        forward: whether the forward of the subtrees changes, too.
    """

    about: str
    paths: Callable[[], tuple[str, ...]]
    set: Callable[[bool], None]
    predict: Callable[[Ownership], Change]
    forward: bool = False


@dataclass
class Case:
    """A model, its step and what can be switched."""

    model: nn.Module
    step: Callable[[], None]
    switches: list[Switch]


def _case(
    model: nn.Module, inputs: torch.Tensor, switches: list[Switch], called: Any = None, **step: Any
) -> Case:
    """A case whose step makes the output of ``called``, by default the model, small."""
    run = called or model
    loss = training_step(model, lambda: run(inputs).float().square().mean(), **step)
    return Case(model, loss, switches)


# Switches ----------------------------------------------------------------------------------------


class _FreeBackward(torch.autograd.Function):
    """Runs a module of which the backward hands on the gradient and does nothing else."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        return module(x)  # a Function's forward records no graph

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Part(nn.Module):
    """A part of a model with a free backward, or left out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mode = inner, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "removed":
            return x
        return _FreeBackward.apply(x, self.inner) if self.mode == "free" else self.inner(x)


def _owners(ownership: Ownership, paths: Sequence[str]) -> list[int]:
    return [owner for owners in owners_within(ownership, paths).values() for owner in owners]


def _scaled(
    paths: Callable[[], Sequence[str]], factor: float = 0.0, *, forward: bool = False
) -> Callable[[Ownership], Change]:
    return lambda ownership: scaled_owners(
        ownership, dict.fromkeys(_owners(ownership, paths()), factor), forward=forward
    )


def _part(model: nn.Module, path: str, mode: str) -> Switch:
    parent, _, name = path.rpartition(".")
    part = _Part(model.get_submodule(path))
    setattr(model.get_submodule(parent), name, part)

    def switch(on: bool) -> None:
        part.mode = mode if on else ""

    def paths() -> tuple[str, ...]:  # parts around this one may be switched, too
        return tuple(path for path, module in model.named_modules() if module is part)

    removed = mode == "removed"
    about = f"{path} removed" if removed else f"{path}: free backward"
    return Switch(about, paths, switch, _scaled(paths, forward=removed), removed)


def _frozen(model: nn.Module, *paths: str, also: Sequence[nn.Parameter] = ()) -> Switch:
    """No gradient for the first parts of a model: their whole backward is gone."""

    def parameters() -> Iterator[nn.Parameter]:
        yield from also
        for path in paths:
            yield from model.get_submodule(path).parameters()

    def switch(on: bool) -> None:
        for parameter in parameters():
            parameter.requires_grad_(not on)
            parameter.grad = None

    about = f"{paths[-1]} and all before: no gradient"
    return Switch(about, lambda: paths, switch, _scaled(lambda: paths))


# Models ------------------------------------------------------------------------------------------


def _images(context: Context, batch: int, side: int) -> torch.Tensor:
    return context.randn(context.pick(batch, 2), 3, side, side)


def _vit(context: Context, large: bool) -> Case:
    model = vit(context, depth=6)
    images = _images(context, 48 if large else 2, context.pick(224, 32)).to(torch.bfloat16)
    last = len(model.blocks) - 1
    switches = [
        _part(model, "blocks.1.mlp", "free"),
        _part(model, f"blocks.{last}.attn", "free"),
        _part(model, f"blocks.{max(0, last - 1)}", "free"),
        _part(model, f"blocks.{last}", "removed"),
        _frozen(model, "patch_embed", "blocks.0", also=(model.pos,)),
    ]
    return _case(model, images, switches)


def _tokens(context: Context, batch: int, length: int) -> torch.Tensor:
    shape = context.pick(batch, 2), context.pick(length, 16)
    return context.randint(context.pick(8192, 128), *shape)


def _gpt(context: Context, large: bool) -> Case:
    model = gpt(context, depth=5)
    last = len(model.h) - 1
    switches = [
        _part(model, "h.1.mlp", "free"),
        _part(model, f"h.{last}.attn", "free"),
        _part(model, f"h.{max(0, last - 1)}", "removed"),
        _frozen(model, "wte", "wpe", "h.0"),
    ]
    return _case(model, _tokens(context, *((8, 1024) if large else (1, 128))), switches)


def _resnet(context: Context, large: bool) -> Case:
    model = resnet(context, 18 if context.small else 50)
    images = _images(context, 128 if large else 4, context.pick(224, 64))
    switches = [
        _part(model, "layer1.1", "free"),
        _part(model, "layer3.1", "free"),
        _part(model, "layer2.1", "removed"),
        _frozen(model, "conv1", "bn1", "maxpool", "layer1"),
    ]
    images = images.contiguous(memory_format=torch.channels_last)
    return _case(model, images, switches, around=context.bf16)


def _compiled(context: Context, what: str) -> Case:
    """A compiled model without some of its parts: each time it is another graph."""
    if what == "vit":
        model, parts = vit(context, depth=6), ("0.attn", "1.mlp", "2", "3.attn", "4.mlp")
        data = _images(context, 48, context.pick(224, 32)).to(torch.bfloat16)
    else:
        model, parts = gpt(context, depth=5), ("0.attn", "1.mlp", "2", "3.attn", "3.mlp")
        data = _tokens(context, 8, 1024)
    blocks = "blocks" if what == "vit" else "h"
    some = parts[: context.pick(5, 1)]
    switches = [_part(model, f"{blocks}.{path}", "removed") for path in some]
    return _case(model, data, switches, torch.compile(model))


class _Repeated(torch.autograd.Function):
    """A backward that multiplies again and again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, times: int) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.times = times
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        for _ in range(ctx.times):
            torch.mm(gradient, weight)
        return gradient, None, None


class Repeating(nn.Module):
    """A layer of which the backward has ``times`` needless products."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(width, width))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Repeated.apply(x, self.weight, self.times)


def _repeated(context: Context, large: bool) -> Case:
    width, rows = context.pick(2048 if large else 256, 16), context.pick(8192 if large else 32, 4)
    times = context.pick(16 if large else 200, 8)
    parts = [ResidualMlp(width, 4), Repeating(width, times), ResidualMlp(width, 4)]
    model = nn.Sequential(*parts).to(context.device)

    def faster(factor: float) -> Switch:
        def switch(on: bool) -> None:
            model[1].times = int(times * factor) if on else times

        about = f"a backward of many products: {1 / factor:g} times as fast"
        return Switch(about, lambda: ("1",), switch, _scaled(lambda: ("1",), factor))

    return _case(model, context.randn(rows, width), [faster(0.5), faster(0.25)])


class _Checked(torch.autograd.Function):
    """A backward that looks at its gradient, for which the host waits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, looks: bool) -> torch.Tensor:
        ctx.looks = looks
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.sum()
        return gradient * (total.item() * 0.0 + 1.0 if ctx.looks else 1.0), None


class _Checking(nn.Module):
    looks = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Checked.apply(x, self.looks)


def _sync(context: Context, large: bool) -> Case:
    width, rows = context.pick(2048 if large else 512, 16), context.pick(4096 if large else 256, 4)
    model = nn.Sequential()
    for number in range(3):
        model.add_module(f"mlp{number}", ResidualMlp(width, 6))
        model.add_module(f"check{number}", _Checking())
    model.to(context.device)

    def without(*paths: str) -> Switch:
        def switch(on: bool) -> None:
            for path in paths:
                model.get_submodule(path).looks = not on

        def predict(ownership: Ownership) -> Change:
            waits = ownership.waits
            mine = np.isin(ownership.owner[waits.span], _owners(ownership, paths))
            spans = np.zeros(len(ownership.spans.start), bool)
            work = np.zeros(len(ownership.work.start), bool)
            return free_spans(ownership, spans, work, waits=waits.event[mine])

        return Switch(f"{len(paths)} of 3 waits removed", lambda: paths, switch, predict)

    switches = [without("check1"), without("check0", "check1", "check2")]
    return _case(model, context.randn(rows, width), switches)


def _streams(context: Context, large: bool) -> Case:
    width, rows = context.pick(2048 if large else 256, 16), context.pick(8192 if large else 64, 4)
    model = TwoStreams(width, context.pick(6, 2), context.device).to(context.device)
    model.side = ResidualMlp(width, 2).to(context.device)
    switches = [_part(model, "side", "free"), _part(model, "main", "free")]
    return _case(model, context.randn(rows, width), switches)


_MADE = {
    "vit": _vit, "gpt": _gpt, "resnet": _resnet, "repeated": _repeated, "sync": _sync,
    "streams": _streams,
}  # fmt: skip
CASES: dict[str, Callable[[Context], Case]] = {
    # Each at two sizes: one waits for the GPU, the other for the host.
    **{
        f"{name}_{size}": partial(make, large=size == "large")
        for name, make in _MADE.items()
        for size in ("large", "tiny")
    },
    "compiled_vit": partial(_compiled, what="vit"),
    "compiled_gpt": partial(_compiled, what="gpt"),
}
