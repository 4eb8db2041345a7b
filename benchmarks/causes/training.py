"""A training step for each model in which a cause is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.causes.case import Built, Context, built
from benchmarks.models import Detector, Gpt, Recommender, ResidualMlp, Unet, Vit

__all__ = [
    "forward_recommender",
    "images",
    "train_detector",
    "train_gpt",
    "train_recommender",
    "train_resnet",
    "train_unet",
    "train_vit",
    "train_wide",
]


def images(
    context: Context, batch: int, side: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Random images on the device."""
    data = context.randn(context.pick(batch, 2), 3, *(2 * (context.pick(side, 32),)))
    return data.to(dtype, memory_format=torch.channels_last)


def _feed(source: Iterator[torch.Tensor] | torch.Tensor) -> Callable[[], torch.Tensor]:
    if isinstance(source, torch.Tensor):
        return lambda: source
    return lambda: next(source)


def train_vit(
    context: Context,
    model: Vit,
    source: Iterator[torch.Tensor] | torch.Tensor | None = None,
    *,
    batch: int = 192,
    dtype: torch.dtype = torch.bfloat16,
    autocast: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    close: Callable[[], None] = lambda: None,
) -> Built:
    """Train on ``source``: images, or an iterator that gives a step's images on the device."""
    loss = nn.CrossEntropyLoss()
    feed = _feed(images(context, batch, 224, dtype) if source is None else source)

    def forward() -> torch.Tensor:
        data = feed()
        labels = torch.zeros(len(data), dtype=torch.long, device=data.device)
        return loss(model(data), labels)

    return built(
        context, model, forward, loss=loss, optimizer=optimizer, autocast=autocast, close=close
    )


def train_resnet(
    context: Context,
    model: nn.Module,
    source: Iterator[torch.Tensor] | torch.Tensor | None = None,
    *,
    batch: int = 256,
    autocast: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    close: Callable[[], None] = lambda: None,
) -> Built:
    """As ``train_vit``, under autocast."""
    source = images(context, batch, 224) if source is None else source
    return train_vit(context, model, source, autocast=autocast, optimizer=optimizer, close=close)  # type: ignore[arg-type]


def train_gpt(
    context: Context,
    model: Gpt,
    *,
    batch: int = 24,
    length: int = 0,
    autocast: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> Built:
    loss = nn.CrossEntropyLoss()
    length = length or model.wpe.num_embeddings
    tokens = context.randint(model.vocabulary, context.pick(batch, 2), length)
    follow = context.randint(model.vocabulary, len(tokens) * length)

    def forward() -> torch.Tensor:
        return loss(model(tokens).flatten(0, 1), follow)

    return built(context, model, forward, loss=loss, optimizer=optimizer, autocast=autocast)


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


def train_unet(
    context: Context,
    model: Unet,
    source: Iterator[torch.Tensor] | torch.Tensor | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    close: Callable[[], None] = lambda: None,
) -> Built:
    loss = nn.CrossEntropyLoss()
    feed = _feed(images(context, 32, 256) if source is None else source)
    side = context.pick(256, 32)
    masks = context.randint(16, context.pick(32, 2), side, side)

    def forward() -> torch.Tensor:
        return loss(model(feed()), masks)

    return built(
        context, model, forward, loss=loss, optimizer=optimizer, autocast=True, close=close
    )


def train_detector(context: Context, model: Detector) -> Built:
    loss = nn.SmoothL1Loss()
    data = images(context, 64, 256)
    boxes = context.randn(len(data), model.best, 4)

    def forward() -> torch.Tensor:
        return loss(model(data), boxes)

    return built(context, model, forward, loss=loss, autocast=True)


def train_wide(
    context: Context,
    model: ResidualMlp,
    *,
    tokens: int = 2048,
    optimizer: torch.optim.Optimizer | None = None,
) -> Built:
    weight = model.layers[0].weight
    data = context.randn(context.pick(tokens, 4), weight.shape[1]).to(weight.dtype)
    return built(context, model, lambda: model(data).square().mean(), optimizer=optimizer)
