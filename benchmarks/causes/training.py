"""A training step for each model in which a cause is planted; options are those of ``built``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from benchmarks.causes.case import Built, Context, built
from benchmarks.models import Detector, Gpt, Recommender, ResidualMlp, Unet, Vit

Source = Iterator[torch.Tensor] | torch.Tensor | None
"""A step's images on the device: always the same, the next ones, or random ones."""

_Model = TypeVar("_Model", bound=nn.Module)


def put(model: _Model, **parts: nn.Module) -> _Model:
    """Return the model with other parts."""
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def put_each(model: _Model, blocks: nn.ModuleList, **parts: Callable[[Any], nn.Module]) -> _Model:
    """Return the model with other parts in each block: what a function makes of the part."""
    for block in blocks:
        put(block, **{name: make(getattr(block, name)) for name, make in parts.items()})
    return model


def images(
    context: Context, batch: int, side: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Random images on the device."""
    data = context.randn(context.pick(batch, 2), 3, *(2 * (context.pick(side, 32),)))
    return data.to(dtype, memory_format=torch.channels_last)


def _feed(source: Iterator[torch.Tensor] | torch.Tensor) -> Callable[[], torch.Tensor]:
    return (lambda: source) if isinstance(source, torch.Tensor) else (lambda: next(source))


def train_vit(
    context: Context,
    model: Vit | nn.Module,
    source: Source = None,
    *,
    batch: int = 192,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Built:
    loss = nn.CrossEntropyLoss()
    feed = _feed(images(context, batch, 224, dtype) if source is None else source)

    def forward() -> torch.Tensor:
        data = feed()
        return loss(model(data), torch.zeros(len(data), dtype=torch.long, device=data.device))

    return built(context, model, forward, loss=loss, **options)


def train_resnet(
    context: Context, model: nn.Module, source: Source = None, *, batch: int = 256, **options: Any
) -> Built:
    """As ``train_vit``, under autocast."""
    source = images(context, batch, 224) if source is None else source
    return train_vit(context, model, source, **{"autocast": True, **options})


def train_gpt(
    context: Context, model: Gpt, *, batch: int = 24, length: int = 0, **options: Any
) -> Built:
    loss = nn.CrossEntropyLoss()
    length = length or model.wpe.num_embeddings
    tokens = context.randint(model.vocabulary, context.pick(batch, 2), length)
    follow = context.randint(model.vocabulary, len(tokens) * length)
    return built(
        context, model, lambda: loss(model(tokens).flatten(0, 1), follow), loss=loss, **options
    )


def forward_recommender(
    context: Context, model: Recommender, batch: int = 2048, length: int = 50
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The loss as a module, and what computes it."""
    loss = nn.BCEWithLogitsLoss()
    rows, length = context.pick(batch, 4), context.pick(length, 5)
    user = context.randint(model.users.num_embeddings, rows)
    history = context.randint(model.items.num_embeddings, rows, length)
    clicked = context.randint(2, rows, length).to(model.head.weight.dtype)
    return loss, lambda: loss(model(user, history), clicked)


def train_recommender(
    context: Context,
    model: Recommender,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    batch: int = 2048,
    length: int = 50,
) -> Built:
    loss, forward = forward_recommender(context, model, batch, length)
    return built(context, model, forward, loss=loss, optimizer=optimizer)


def train_unet(context: Context, model: Unet, source: Source = None, **options: Any) -> Built:
    loss = nn.CrossEntropyLoss()
    feed = _feed(images(context, 32, 256) if source is None else source)
    side = context.pick(256, 32)
    masks = context.randint(16, context.pick(32, 2), side, side)
    return built(
        context, model, lambda: loss(model(feed()), masks), loss=loss, autocast=True, **options
    )


def train_detector(context: Context, model: Detector) -> Built:
    loss = nn.SmoothL1Loss()
    data = images(context, 64, 256)
    boxes = context.randn(len(data), model.best, 4)
    return built(context, model, lambda: loss(model(data), boxes), loss=loss, autocast=True)


def train_wide(
    context: Context, model: ResidualMlp, *, tokens: int = 2048, **options: Any
) -> Built:
    weight = next(model.parameters())
    data = context.randn(context.pick(tokens, 4), weight.shape[1]).to(weight.dtype)
    return built(context, model, lambda: model(data).square().mean(), **options)
