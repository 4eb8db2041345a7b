"""More remedies for ``predicted_saving.py``: layouts, tables, waits and compilation."""

from __future__ import annotations

import torch
from torch import nn

from _fixture_cases import Context, Mlp
from _remedies import Side, remedy, side_of

__all__: list[str] = []


@remedy("a stage of convolutions NCHW → channels_last", ("stage",), ("stem", "head"))
def stage_channels_last(context: Context, after: bool) -> Side:
    width = context.pick(256, 16)

    def conv() -> list[nn.Module]:
        return [
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]

    class Stage(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if after:
                x = x.contiguous(memory_format=torch.channels_last)
            return super().forward(x)

    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, width, 4, stride=4))
    stage = Stage(*(layer for _ in range(6) for layer in conv()))
    model.add_module("stage", stage.to(memory_format=torch.channels_last) if after else stage)
    model.add_module("head", nn.Conv2d(width, width, 1))
    model.to(context.device).train()
    side = context.pick(224, 32)
    images = context.randn(context.pick(128, 2), 3, side, side)
    return side_of(context, model, lambda: model(images))


@remedy(
    "a small table's embedding → one-hot product (262,144 tokens of 16 types)",
    ("types",),
    ("body", ""),
)
def embedding_one_hot(context: Context, after: bool) -> Side:
    width = context.pick(1024, 16)

    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hot = x.unsqueeze(-1) == torch.arange(16, device=x.device)
            # In the type that an embedding gives, lest what follows runs in another one.
            return (hot.to(self.weight.dtype) @ self.weight).to(self.weight.dtype)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.types = OneHot() if after else nn.Embedding(16, width)
            self.body = Mlp(width, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(self.types(x))

    model = Model().to(context.device)
    tokens = context.randint(2, context.pick(512, 4), context.pick(512, 8))
    return side_of(context, model, lambda: model(tokens))


class _Masking(nn.Module):
    """Keeps what is positive: by a boolean index, for which the host waits, or by ``where``."""

    def __init__(self, *, where: bool) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        if self.where:
            return torch.where(mask, x, torch.zeros_like(x))
        kept = torch.zeros_like(x)
        kept[mask] = x[mask]
        return kept


@remedy(
    "a boolean-mask index with its wait → where",
    ("mask0", "mask1"),
    ("body0", "body1", "body2"),
)
def mask_where(context: Context, after: bool) -> Side:
    width = context.pick(2048, 16)
    model = nn.Sequential()
    for index in range(3):
        model.add_module(f"body{index}", Mlp(width, 4))
        if index < 2:
            model.add_module(f"mask{index}", _Masking(where=after))
    model.to(context.device)
    inputs = context.randn(context.pick(16384, 4), width)
    return side_of(context, model, lambda: model(inputs))


class _Small(nn.Module):
    """Many small operations, one after another."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.sigmoid(layer(x)) * x
        return x


def _compiled_chain(context: Context, after: bool, rows: int) -> Side:
    width = context.pick(1024, 16)
    model = nn.Sequential()
    model.add_module("before", Mlp(width, 4))
    chain = _Small(width, context.pick(12, 2))
    model.add_module("chain", chain)
    model.add_module("after", Mlp(width, 4))
    model.to(context.device)
    if after:
        chain.compile()
    inputs = context.randn(rows, width)
    return side_of(context, model, lambda: model(inputs), bf16=False)


@remedy(
    "many small layers → torch.compile of the block, large batch", ("chain",), ("before", "after")
)
def chain_compiled(context: Context, after: bool) -> Side:
    return _compiled_chain(context, after, context.pick(32768, 4))


@remedy(
    "many small layers → torch.compile of the block, launch-bound",
    ("chain",),
    ("before", "after"),
)
def chain_compiled_launch_bound(context: Context, after: bool) -> Side:
    return _compiled_chain(context, after, context.pick(256, 4))
