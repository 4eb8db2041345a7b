"""Quantization-aware training whose observers and fake quantizers are separate modules."""

import warnings

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, TokenLoss, sized, stepping
from benchmarks.models import Context, Gpt, made

CASE = Published(
    source="pytorch/executorch#14740",
    because="Each quantizer observes, computes its scale and quantizes by many small operators.",
    cause=("fused", "fuse", "launch", "small kernels", "short kernels"),
    half=("small operators", "python", "host", "pointwise"),
    place=("**.quantize_input", "**.quantize_weight", "**.fc1", "**.fc2", "**.quantize_*.**"),
    fix="FusedMovingAvgObsFakeQuantize, one operator for all three",
    gain="about 4 times faster training of a Llama (5 times for the module, pytorch#61691)",
)


def quantizer(fixed: bool, signed: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import (
            FakeQuantize,
            FusedMovingAvgObsFakeQuantize,
            MovingAverageMinMaxObserver,
        )

        kind = FusedMovingAvgObsFakeQuantize if fixed else FakeQuantize
        low, high, dtype = (-128, 127, torch.qint8) if signed else (0, 255, torch.quint8)
        made: nn.Module = kind(
            observer=MovingAverageMinMaxObserver, quant_min=low, quant_max=high, dtype=dtype
        )
        return made


class Quantized(nn.Linear):
    def __init__(self, inner: int, outer: int, fixed: bool) -> None:
        super().__init__(inner, outer)
        self.quantize_input = quantizer(fixed, False)
        self.quantize_weight = quantizer(fixed, True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.quantize_weight(self.weight)
        return functional.linear(self.quantize_input(x), weight, self.bias)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 512, 96, 32), sized(context, 12, 4, 2)
    length, batch, words = sized(context, 256, 64, 8), sized(context, 4, 2, 2), 512

    def make() -> Gpt:
        model = Gpt(width, depth, length, words)
        for block in model.h:
            block.mlp.fc1 = Quantized(width, 4 * width, fixed)
            block.mlp.fc2 = Quantized(4 * width, width, fixed)
        return model

    model, criterion = made(context, make), TokenLoss()
    tokens, follow = (context.randint(words, batch, length) for _ in range(2))

    def loss() -> torch.Tensor:
        value: torch.Tensor = criterion(model(tokens), follow)
        return value

    return stepping(model, loss), {"": model, "loss": criterion}
