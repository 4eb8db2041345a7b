"""Causes that a processor without a GPU has, and the same done well: ``record --device cpu``."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.causes.case import DATA, OPTIMIZER, Built, Context, built, control, plant

__all__: list[str] = []

_Function = Callable[[torch.Tensor], torch.Tensor]
_TANH = math.sqrt(2 / math.pi)


class Activation(nn.Module):
    """A function of single elements."""

    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Unrolled(nn.Module):
    """A recurrent cell for each time step, and a layer behind it."""

    def __init__(self, cell: nn.Module, outputs: int) -> None:
        super().__init__()
        self.cell, self.out = cell, nn.Linear(outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outputs = None, []
        for each in x.unbind(1):
            state = self.cell(each, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.out(torch.stack(outputs, 1))


class Whole(nn.Module):
    """The same with a whole recurrent layer."""

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0])


def _layers(function: _Function, width: int = 256, depth: int = 3) -> nn.Sequential:
    """Wide layers with the function between them."""
    blocks = [
        nn.Sequential(
            nn.Linear(width, 2 * width), Activation(function), nn.Linear(2 * width, width)
        )
        for _ in range(depth)
    ]
    return nn.Sequential(*blocks)


def _trained(
    context: Context,
    model: nn.Module,
    *shape: int,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: torch.dtype = torch.float32,
) -> Built:
    """Train a model on noise; with fused SGD by default, which takes next to nothing."""
    model = model.to(context.device, dtype)
    x = context.randn(*shape).to(dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    return built(context, model, lambda: model(x).square().mean(), optimizer=optimizer or sgd)


def _register(
    register: Callable[[Callable[[Context], Built]], object],
    name: str,
    about: str,
    build: Callable[[Context], Built],
) -> None:
    build = partial(build)
    build.__name__, build.__doc__ = name, about
    register(build)


# Functions that are written out -------------------------------------------------------------------

_WRITTEN_OUT: dict[str, tuple[str, _Function]] = {
    "gelu_pow": (
        "GELU by tanh with a power.",
        lambda x: 0.5 * x * (1 + torch.tanh(_TANH * (x + 0.044715 * torch.pow(x, 3)))),
    ),
    "gelu_mul": (
        "GELU by tanh with products.",
        lambda x: 0.5 * x * (1 + torch.tanh(x * _TANH * (1 + 0.044715 * x * x))),
    ),
    "gelu_erf": ("GELU by erf.", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
    "scaled_tanh": ("A scaled tanh, as LeCun has it.", lambda x: 1.7159 * torch.tanh(x * 2 / 3)),
    "gelu_erf_scaled": ("GELU by a scaled erf.", lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071))),
}
_AS_THEY_ARE: dict[str, tuple[str, _Function]] = {
    "gelu_function": ("GELU as one operator.", functional.gelu),
    "gated_tanh": ("A gate of tanh and sigmoid.", lambda x: torch.tanh(x) * torch.sigmoid(x)),
}
for _name, (_about, _function) in _WRITTEN_OUT.items():
    _register(
        plant("pointwise-chain", ("*.1",), gpus=0),
        _name,
        _about,
        lambda context, function=_function: _trained(context, _layers(function, 128), 512, 128),
    )
for _name, (_about, _function) in _AS_THEY_ARE.items():
    _register(
        control("pointwise-chain", gpus=0),
        _name,
        _about,
        lambda context, function=_function: _trained(context, _layers(function, 128), 512, 128),
    )

# Recurrent cells ----------------------------------------------------------------------------------

for _batch, _length, _inputs, _width in (
    (16, 20, 8, 32),
    (4, 40, 16, 64),
    (32, 12, 1, 51),
    (8, 30, 32, 32),
):
    _register(
        plant("recurrent-cells", ("cell",), gpus=0),
        f"cells_{_batch}x{_length}",
        f"An LSTM cell for each of {_length} time steps of {_batch} sequences.",
        lambda context, i=_inputs, w=_width, b=_batch, n=_length: _trained(
            context, Unrolled(nn.LSTMCell(i, w), w), b, n, i
        ),
    )
for _name, _about, _layer in (
    ("lstm_layer", "A whole LSTM.", lambda: Whole(nn.LSTM(8, 32, batch_first=True), 32)),
    ("gru_cells", "A GRU cell for each time step.", lambda: Unrolled(nn.GRUCell(8, 32), 32)),
):
    _register(
        control("recurrent-cells", gpus=0),
        _name,
        _about,
        lambda context, layer=_layer: _trained(context, layer(), 16, 20, 8),
    )
_register(
    control("recurrent-cells", gpus=0),
    "cells_double",
    "An LSTM cell in fp64, where a whole LSTM takes as long.",
    lambda context: _trained(
        context, Unrolled(nn.LSTMCell(8, 32), 32), 16, 20, 8, dtype=torch.float64
    ),
)

# Calls without a backward -------------------------------------------------------------------------


def _evaluated(context: Context, calls: int, grad: bool, of_itself: bool = True) -> Built:
    """Train layers, and call them or a frozen copy of them some more times in each step."""
    model, frozen = _layers(functional.relu), _layers(functional.relu).requires_grad_(False)
    x = context.randn(128, 256)
    made = _trained(context, model, 128, 256)
    frozen.to(context.device)

    def step() -> None:
        made.step()
        with torch.set_grad_enabled(grad):
            for _ in range(calls):
                (model if of_itself else frozen)(x)

    return Built([*made.modules, (frozen, "frozen")], step)


for _calls, _grad in ((1, False), (2, False), (1, True), (3, True)):
    _register(
        plant("forward-only", ("*.*",), gpus=0),
        f"evaluated_{_calls}{'_graph' if _grad else ''}",
        f"A model evaluated {_calls} times in each step, {'with' if _grad else 'without'} a graph.",
        lambda context, calls=_calls, grad=_grad: _evaluated(context, calls, grad),
    )
_register(
    control("forward-only", gpus=0),
    "evaluated_never",
    "A model that is only trained.",
    lambda context: _evaluated(context, 0, False),
)
_register(
    control("forward-only", gpus=0),
    "teacher",
    "A frozen model of the same kind beside the trained one.",
    lambda context: _evaluated(context, 2, False, of_itself=False),
)

# Anomaly mode -------------------------------------------------------------------------------------


def _watched(context: Context, model: nn.Module, *shape: int, watch: bool = True) -> Built:
    made = _trained(context, model, *shape)

    def step() -> None:
        with torch.autograd.set_detect_anomaly(watch):
            made.step()

    return Built(made.modules, step)


def _looked_through(context: Context) -> Built:
    """A step with a hook of its own that looks through one gradient."""
    layer = nn.Linear(256, 256)

    def look(_: nn.Module, __: object, gradients: tuple[torch.Tensor, ...]) -> None:
        if torch.isnan(gradients[0]).any().item():
            raise RuntimeError("the gradient is no number")

    layer.register_full_backward_hook(look)
    return _watched(context, nn.Sequential(_layers(functional.relu), layer), 64, 256, watch=False)


for _name, _about, _build in (
    (
        "watched_layers",
        "Layers trained in anomaly mode.",
        lambda context: _watched(context, _layers(functional.relu), 64, 256),
    ),
    (
        "watched_lstm",
        "An LSTM trained in anomaly mode.",
        lambda context: _watched(context, Whole(nn.LSTM(8, 32, batch_first=True), 32), 8, 20, 8),
    ),
    (
        "watched_cells",
        "An LSTM cell for each time step in anomaly mode.",
        lambda context: _watched(context, Unrolled(nn.LSTMCell(8, 32), 32), 8, 10, 8),
    ),
    (
        "watched_narrow",
        "Many narrow layers in anomaly mode.",
        lambda context: _watched(context, _layers(functional.relu, 32, 12), 16, 32),
    ),
):
    _cells = {"recurrent-cells": "a cell for each time step"}
    _register(plant("anomaly-mode", None, _cells, gpus=0), _name, _about, _build)
_register(
    control("anomaly-mode", gpus=0),
    "looked_through",
    "A hook that looks for NaN in the gradient of one layer.",
    _looked_through,
)
_register(
    control("anomaly-mode", gpus=0),
    "unwatched_layers",
    "The same layers without anomaly mode.",
    lambda context: _watched(context, _layers(functional.relu), 64, 256, watch=False),
)

# Known causes, as a processor has them ------------------------------------------------------------


def _updated(context: Context, **options: bool) -> Built:
    model = _layers(functional.relu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
    return _trained(context, model, 32, 256, optimizer=optimizer)


for _name, _about, _options in (
    ("adamw_loop", "AdamW as it comes.", {}),
    ("adamw_foreach", "AdamW with foreach, which is no faster on a processor.", {"foreach": True}),
):
    _register(
        plant("optimizer-kernels", OPTIMIZER, gpus=0),
        _name,
        _about,
        lambda context, options=_options: _updated(context, **options),
    )
_register(
    control("optimizer-kernels", gpus=0),
    "adamw_fused",
    "AdamW fused.",
    lambda context: _updated(context, fused=True),
)

# Loaders with workers -----------------------------------------------------------------------------


class _Rows(Dataset[Any]):
    """Batches of rows, as one tensor or in pieces, that take ``seconds`` to load."""

    def __init__(self, context: Context, rows: int, *, pieces: int = 1, seconds: float = 0) -> None:
        data = context.randn(context.pick(rows, pieces), 256).cpu()
        self.batch = data if pieces == 1 else list(data.chunk(pieces))
        self.seconds = seconds

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return copy.deepcopy(self.batch)


def _fed(context: Context, rows: _Rows, workers: int = 2) -> Built:
    """Layers trained on the batches that workers load."""
    loader: DataLoader[Any] = DataLoader(rows, batch_size=None, num_workers=workers)
    batches, model = iter(loader), _layers(functional.relu).to(context.device)

    def forward() -> torch.Tensor:
        batch = next(batches)
        x = torch.cat(batch) if isinstance(batch, list) else batch
        return model(x.to(context.device)).square().mean()

    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    stop = getattr(batches, "_shutdown_workers", lambda: None)
    return built(context, model, forward, optimizer=sgd, close=stop)


_register(
    plant("batch-handover", DATA, gpus=0),
    "pieces_handed_over",
    "Workers that are ahead hand over each batch as 240 tensors.",
    lambda context: _fed(context, _Rows(context, 480, pieces=240)),
)
_register(
    control("batch-handover", gpus=0),
    "whole_handed_over",
    "Workers that are ahead hand over each batch as one tensor.",
    lambda context: _fed(context, _Rows(context, 480)),
)
_register(
    plant("waiting-for-data", DATA, gpus=0),
    "late_layers",
    "A worker that takes longer for a batch than the step.",
    lambda context: _fed(context, _Rows(context, 256, seconds=context.pick(0.15, 0.02)), 1),
)
