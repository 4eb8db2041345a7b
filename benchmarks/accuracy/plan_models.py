"""Trainings for ``plan_truth.py``, and the settings of a plan as a user makes them in the script.

Nothing here is of the plan's own code: a setting is made by its axis and its name, where a reader
of the report would write it. AdamW, gradients dropped and not zeroed, the batch in place before the
step, float32 unless the case says otherwise. Each training has its own model, made with one seed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.accuracy.healthy import GraphNetwork, LstmLanguageModel
from benchmarks.models import (
    Context,
    DiffusionUnet,
    Gpt,
    ResidualMlp,
    Unet,
    Vit,
    made,
    with_instance_norms,
)

Sizes = tuple[int, int, int]
"""A size on a GPU, on a CPU, and in a small run."""
Run = Callable[..., Any]
"""Runs the model: the model itself, or what ``torch.compile`` made of it."""


@dataclass(frozen=True)
class Setting:
    """A setting of a plan.

    Attributes:
        axis: that of the rung.
        name: that of the rung.
    """

    axis: str
    name: str


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        make: makes the model.
        data: makes the batch, so many times as large as it is.
        loss: the loss of a batch, by what runs the model.
        amp: whether it runs under bf16 autocast as it is.
        accumulate: batches a step.
        devices: where it makes sense.
        about: what it stands for.
    """

    make: Callable[[Context], nn.Module]
    data: Callable[[Context, int], tuple[Any, ...]]
    loss: Callable[[Run, tuple[Any, ...]], torch.Tensor]
    about: str
    amp: bool = False
    accumulate: int = 1
    devices: tuple[str, ...] = ("cuda",)


class CannotMakeError(Exception):
    """There is no way here to make a setting in a real training."""


@dataclass
class Training:
    """A training with some settings made, or as it is.

    Raises:
        CannotMakeError: If a setting has no maker.
    """

    context: Context
    case: Case
    settings: Sequence[Setting] = ()
    steps: int = 0
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self._around: list[Callable[[], Any]] = []
        self.times, self._scaler = 1, None
        self.model = self.case.make(self.context)
        self._run: Run = self.model
        form: dict[str, Any] = {}
        if self.case.amp:
            self._around.append(self.context.bf16)
        if any(one.axis == "batch" for one in self.settings):
            self.times = 2  # what a plan tries
        self.data = self.case.data(self.context, self.times)
        for one in self.settings:
            if one.axis == "optimizer":
                form |= _form(one.name)
            elif one.axis != "batch":
                _maker(one)(self, one)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **form)

    def step(self) -> None:
        """Train one batch, or as many as the case accumulates."""
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        with _all(self._outside):
            for _ in range(self.case.accumulate):
                with _all(self._around):
                    loss = self.case.loss(self._run, self.data) / self.case.accumulate
                (self._scaler.scale(loss) if self._scaler else loss).backward()
            if self._scaler:
                self._scaler.step(self.optimizer)
                self._scaler.update()
            else:
                self.optimizer.step()

    _outside: list[Callable[[], Any]] = field(default_factory=list)
    _scaler: Any = None

    def fingerprint(self) -> str:
        """A hash of parameters, buffers, the optimizer's state and random numbers."""
        digest = hashlib.sha256()
        held = [*self.model.state_dict().values()]
        held += [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        held.append(torch.get_rng_state())
        if self.context.device != "cpu":
            held.append(torch.cuda.get_rng_state())
        for one in held:
            digest.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


@contextmanager
def _all(around: Sequence[Callable[[], Any]]) -> Iterator[None]:
    if not around:
        yield
        return
    with around[0](), _all(around[1:]):
        yield


# The settings, as a script has them --------------------------------------------------------------


def _precision(training: Training, setting: Setting) -> None:
    device = training.context.device
    if setting.name == "TF32":
        training._outside.append(_tf32)
        return
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if setting.name not in kinds:
        raise CannotMakeError(setting.name)
    training._around.append(lambda: torch.autocast(device, kinds[setting.name]))
    if setting.name == "fp16":
        training._scaler = torch.amp.GradScaler(device)


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _layout(training: Training, setting: Setting) -> None:
    dims, layout = {
        "channels_last": (4, torch.channels_last),
        "channels_last_3d": (5, torch.channels_last_3d),
    }[setting.name]
    training.model.to(memory_format=layout)
    training.data = tuple(
        one.to(memory_format=layout) if isinstance(one, torch.Tensor) and one.dim() == dims else one
        for one in training.data
    )


def _compile(training: Training, setting: Setting) -> None:
    mode = re.search(r'mode="?([\w-]+)', setting.name)
    training._run = torch.compile(training.model, mode=mode[1] if mode else None)


def _checkpointing(training: Training, _: Setting) -> None:
    for part in training.model.modules():
        if isinstance(part, Kept):
            part.active = False


def _cudnn(training: Training, setting: Setting) -> None:
    training._outside.append(lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True))


def _form(name: str) -> dict[str, Any]:
    found = dict(re.findall(r"(fused|foreach)=(True|False)", name))
    if not found:
        raise CannotMakeError(name)
    return {key: value == "True" for key, value in found.items()}


_MAKERS: dict[str, Callable[[Training, Setting], None]] = {
    "precision": _precision,
    "layout": _layout,
    "compile": _compile,
    "checkpoint": _checkpointing,
    "cudnn": _cudnn,
}


def _maker(setting: Setting) -> Callable[[Training, Setting], None]:
    if setting.axis not in _MAKERS:
        raise CannotMakeError(f"{setting.name} ({setting.axis}) is not made here")
    return _MAKERS[setting.axis]


# The models --------------------------------------------------------------------------------------


class Kept(nn.Module):
    """A part whose activations are computed again in the backward while it is ``active``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.active = inner, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.active else self.inner(x)


class Cells(nn.Module):
    """A recurrent network written as a loop over its cell: bound by the host."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], x.shape[2])
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
        return self.head(state)


def _size(context: Context, sizes: Sizes) -> int:
    return sizes[2] if context.small else sizes[1] if context.device == "cpu" else sizes[0]


def _classify(run: Run, data: tuple[Any, ...]) -> torch.Tensor:
    *given, labels = data
    return functional.cross_entropy(run(*given), labels)


def _next_word(run: Run, data: tuple[Any, ...]) -> torch.Tensor:
    return functional.cross_entropy(run(data[0]).flatten(0, 1), data[0].flatten())


def _squares(run: Run, data: tuple[Any, ...]) -> torch.Tensor:
    *given, wanted = data
    return functional.mse_loss(run(*given).float(), wanted)


def _of_output(run: Run, data: tuple[Any, ...]) -> torch.Tensor:
    return run(input_ids=data[0], labels=data[0]).loss


def _of_losses(run: Run, data: tuple[Any, ...]) -> torch.Tensor:
    return torch.stack(list(run(*data).values())).sum()


def _images(
    batch: Sizes, side: Sizes, classes: int = 1000
) -> Callable[[Context, int], tuple[Any, ...]]:
    def data(context: Context, times: int) -> tuple[Any, ...]:
        rows, long = times * _size(context, batch), _size(context, side)
        return context.randn(rows, 3, long, long), context.randint(classes, rows)

    return data


def _words(
    words: Sizes, batch: Sizes, length: Sizes
) -> Callable[[Context, int], tuple[torch.Tensor]]:
    def data(context: Context, times: int) -> tuple[torch.Tensor]:
        shape = times * _size(context, batch), _size(context, length)
        return (context.randint(_size(context, words), *shape),)

    return data


def _torchvision(name: str, **options: Any) -> Callable[[Context], nn.Module]:
    def make(context: Context) -> nn.Module:
        import torchvision.models

        return made(context, lambda: getattr(torchvision.models, name)(**options))

    return make


def _timm(name: str, side: Sizes | None = None) -> Callable[[Context], nn.Module]:
    def make(context: Context) -> nn.Module:
        import timm

        options = {"img_size": _size(context, side)} if side else {}
        return made(context, lambda: timm.create_model(name, num_classes=1000, **options))

    return make


def _transformers(
    family: str, kind: str, words: Sizes, **options: Any
) -> Callable[[Context], nn.Module]:
    def make(context: Context) -> nn.Module:
        import transformers

        width, layers = _size(context, (768, 192, 32)), _size(context, (8, 2, 1))
        heads = _size(context, (12, 4, 2))
        config = getattr(transformers, f"{family}Config")(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            vocab_size=_size(context, words),
            **options,
        )
        model = getattr(transformers, family + kind)(config)
        return model.to(context.device).train()

    return make


def _gpt(words: Sizes, width: Sizes, depth: Sizes, length: Sizes) -> Callable[[Context], nn.Module]:
    def make(context: Context) -> nn.Module:
        sizes = (_size(context, one) for one in (width, depth, length, words))
        return made(context, lambda: Gpt(*sizes))

    return make


def _vit(
    width: Sizes, depth: Sizes, side: Sizes, patch: Sizes, *, kept: bool = False
) -> Callable[[Context], nn.Module]:
    def make(context: Context) -> nn.Module:
        sizes = [_size(context, one) for one in (width, depth, side, patch)]
        model = made(context, lambda: Vit(*sizes))
        if kept:
            model.blocks = nn.ModuleList(Kept(block) for block in model.blocks)
        return model

    return make


def _video(context: Context, times: int) -> tuple[Any, ...]:
    batch, side = times * _size(context, (12, 2, 2)), _size(context, (112, 40, 16))
    return context.randn(batch, 3, 8, side, side), context.randint(400, batch)


def _make_video(context: Context) -> nn.Module:
    from torchvision.models.video import r3d_18

    return made(context, lambda: r3d_18(num_classes=400))


def _boxes(context: Context, times: int) -> tuple[Any, ...]:
    side, batch = _size(context, (320, 160, 64)), times * _size(context, (16, 2, 1))
    places = torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.4, 0.3, 0.9, 0.8]], device=context.device)
    targets = [{"boxes": places * side, "labels": context.randint(9, 2) + 1} for _ in range(batch)]
    return [context.randn(3, side, side) for _ in range(batch)], targets


def _make_detector(context: Context) -> nn.Module:
    from torchvision.models import detection

    options = {"num_classes": 10, "weights": None, "weights_backbone": None}
    return made(context, lambda: detection.retinanet_resnet50_fpn(**options))


def _noisy(context: Context, times: int) -> tuple[Any, ...]:
    batch, side = times * _size(context, (32, 4, 1)), _size(context, (64, 32, 16))
    images = context.randn(batch, 3, side, side)
    return images, context.randint(1000, batch), torch.randn_like(images)


def _maps(context: Context, times: int) -> tuple[Any, ...]:
    batch, side = times * _size(context, (16, 2, 1)), _size(context, (256, 64, 16))
    return context.randn(batch, 3, side, side), context.randint(16, batch, side, side)


def _edges(context: Context, times: int) -> tuple[Any, ...]:
    nodes = times * _size(context, (60_000, 4000, 50))
    edges = (context.randint(nodes, 8 * nodes) for _ in range(2))
    return (
        context.randn(nodes, _size(context, (256, 64, 16))),
        *edges,
        context.randint(16, nodes),
    )


def _make_graph(context: Context) -> nn.Module:
    return made(context, lambda: GraphNetwork(_size(context, (256, 64, 16)), 3))


def _make_lstm(context: Context) -> nn.Module:
    words, width = _size(context, (32_768, 4096, 99)), _size(context, (1024, 128, 16))
    return made(context, lambda: LstmLanguageModel(words, width))


def _rows(width: Sizes, batch: Sizes) -> Callable[[Context, int], tuple[Any, ...]]:
    def data(context: Context, times: int) -> tuple[Any, ...]:
        shape = times * _size(context, batch), _size(context, width)
        return context.randn(*shape), context.randn(*shape)

    return data


def _sequence(context: Context, times: int) -> tuple[Any, ...]:
    width, batch = _size(context, (128, 64, 8)), times * _size(context, (64, 16, 2))
    length = _size(context, (64, 16, 4))
    return context.randn(batch, length, width), context.randn(batch, width)


_BOTH = ("cuda", "cpu")
_SIDE: Sizes = (224, 96, 32)
_IMAGES = _images((128, 4, 2), _SIDE)
_WORDS: Sizes = (32_000, 4096, 99)
_TEXT = _words(_WORDS, (16, 2, 1), (512, 64, 8))
_MANY: Sizes = (128_000, 8192, 99)
_NARROW: Sizes = (128, 32, 16)
_SMALL_VIT = (192, 96, 16), (8, 4, 1), _SIDE, (16, 16, 16)
_LARGE_VIT = (768, 128, 16), (8, 4, 2), _SIDE, (16, 16, 16)
_LARGE = _torchvision("resnet50")
_UNET: Callable[[Context], nn.Module] = lambda context: made(  # noqa: E731
    context, lambda: Unet(_size(context, (64, 16, 8)))
)

CASES: dict[str, Case] = {
    # Convolutions
    "resnet18": Case(
        _torchvision("resnet18"), _images((256, 4, 2), _SIDE), _classify, "torchvision",
        devices=_BOTH,
    ),
    "resnet50": Case(_LARGE, _IMAGES, _classify, "torchvision"),
    "convnext": Case(_timm("convnext_tiny"), _images((64, 2, 1), _SIDE), _classify, "timm"),
    "efficientnet": Case(_timm("efficientnet_b0"), _IMAGES, _classify, "timm, depthwise"),
    "video": Case(_make_video, _video, _classify, "torchvision, three dimensions"),
    "unet": Case(_UNET, _maps, _classify, "segmentation"),
    "instance_norms": Case(
        lambda context: with_instance_norms(_UNET(context)), _maps, _classify,
        "segmentation, instance norms",
    ),
    "group_norms": Case(
        _torchvision("resnet50", norm_layer=partial(nn.GroupNorm, 32)), _IMAGES, _classify,
        "torchvision, group norms",
    ),
    "diffusion": Case(
        lambda context: made(context, lambda: DiffusionUnet(_size(context, (128, 32, 16)))),
        _noisy, _squares, "a U-Net that predicts noise", devices=_BOTH,
    ),
    "detector": Case(_make_detector, _boxes, _of_losses, "torchvision, losses in the output"),
    # Attention
    "vit": Case(_timm("vit_small_patch16_224", _SIDE), _IMAGES, _classify, "timm"),
    "swin": Case(_timm("swin_tiny_patch4_window7_224"), _images((64, 1, 1), (224, 224, 224)),
                 _classify, "timm, windows"),
    "mixer": Case(_timm("mixer_s32_224"), _images((256, 1, 1), (224, 224, 224)), _classify,
                  "timm"),
    "own_vit": Case(
        _vit(*_LARGE_VIT), _images((64, 2, 1), _SIDE), _classify, "own", devices=("cpu",)
    ),
    "checkpointed": Case(
        _vit(*_LARGE_VIT, kept=True), _images((64, 2, 1), _SIDE), _classify,
        "each block is checkpointed", devices=_BOTH,
    ),
    "gpt": Case(
        _gpt(_WORDS, (768, 128, 16), (8, 2, 1), (512, 64, 8)), _TEXT, _next_word,
        "own language model", devices=_BOTH,
    ),
    "many_words": Case(
        _gpt(_MANY, (512, 64, 16), (4, 1, 1), (512, 32, 8)),
        _words(_MANY, (8, 2, 1), (512, 32, 8)), _next_word,
        "a large vocabulary: the loss is much of the step", devices=_BOTH,
    ),
    "llama": Case(
        _transformers("Llama", "ForCausalLM", _WORDS), _TEXT, _of_output,
        "transformers, the loss in the output",
    ),
    "bert": Case(
        _transformers("Bert", "ForMaskedLM", _WORDS), _TEXT, _of_output, "transformers, dropout",
        devices=_BOTH,
    ),
    # Others
    "lstm": Case(
        _make_lstm, _words((32_768, 4096, 99), (64, 4, 1), (128, 16, 4)), _next_word, "recurrent",
        devices=_BOTH,
    ),
    "graph": Case(_make_graph, _edges, _classify, "sums over neighbours"),
    "wide": Case(
        lambda context: made(context, lambda: ResidualMlp(_size(context, (8192, 256, 16)), 4)),
        _rows((8192, 256, 16), (64, 16, 2)), _squares, "few rows, large weights: the optimizer",
    ),
    # Bound by the host
    "deep_and_narrow": Case(
        lambda context: made(
            context, lambda: ResidualMlp(_size(context, _NARROW), _size(context, (200, 20, 2)))
        ),
        _rows(_NARROW, (32, 8, 2)), _squares, "bound by the host", devices=_BOTH,
    ),
    "cells": Case(
        lambda context: made(context, lambda: Cells(_size(context, (128, 64, 8)))), _sequence,
        _squares, "bound by the host: a loop over time",
    ),
    "few_images": Case(
        _vit(*_SMALL_VIT), _images((4, 1, 1), _SIDE), _classify, "bound by the host"
    ),
    # Trained with care already
    "amp": Case(_LARGE, _IMAGES, _classify, "bf16 autocast already", amp=True),
    "accumulating": Case(
        _vit(*_SMALL_VIT), _images((32, 1, 1), _SIDE), _classify, "four batches a step",
        accumulate=4,
    ),
}  # fmt: skip
