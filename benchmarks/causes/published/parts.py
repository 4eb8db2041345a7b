"""Sizes and a training step, for the published cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published import Models as Models, Published as Published, Step as Step
from benchmarks.models import Context, Gpt, Mlp, made


def sized(context: Context, cuda: int, cpu: int, small: int) -> int:
    """Return a size for the device, or the one of a small run."""
    return context.pick(cuda if context.device != "cpu" else cpu, small)


def half(context: Context) -> torch.dtype:
    """Return bf16 on a GPU; on a CPU, where it is slower, fp32."""
    return torch.bfloat16 if context.device != "cpu" else torch.float32


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def stepping(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    set_to_none: bool = True,
    after: Callable[[torch.Tensor], object] = lambda _: None,
) -> Step:
    """Return a training step that returns its loss.

    Args:
        model: what is trained.
        loss: computes the loss.
        optimizer: default: AdamW, fused.
        set_to_none: whether gradients are dropped, not filled with zeros.
        after: takes the loss when the step has ended.
    """
    optimizer = optimizer or adamw(model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        value = loss()
        value.backward()
        optimizer.step()
        after(value)
        return value.detach()

    return step


class TokenLoss(nn.Module):
    """Cross-entropy of logits whose last dimension is the vocabulary."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def gpt(
    context: Context,
    cuda: tuple[int, int, int, int, int],
    cpu: tuple[int, int, int, int, int],
    alter: Callable[[Gpt], object] = lambda _: None,
) -> tuple[Gpt, torch.Tensor, torch.Tensor]:
    """Return a language model, tokens, and the tokens that follow them.

    Args:
        context: where it runs.
        cuda: width, depth, length of a text, texts and words on a GPU.
        cpu: the same on a CPU.
        alter: changes the model before it is moved to the device's number format.
    """
    full = cuda if context.device != "cpu" else cpu
    width, depth, length, batch, words = (32, 2, 8, 2, 64) if context.small else full

    def make() -> Gpt:
        model = Gpt(width, depth, length, words)
        alter(model)
        return model

    tokens, follow = (context.randint(words, batch, length) for _ in range(2))
    return made(context, make).to(half(context)), tokens, follow


def learning(
    model: nn.Module, tokens: torch.Tensor, follow: torch.Tensor, **options: Any
) -> tuple[Step, Models]:
    """Return the step of a language model, with the options of ``stepping``."""
    criterion = TokenLoss()
    step = stepping(model, lambda: criterion(model(tokens), follow), **options)
    return step, {"": model, "loss": criterion}


def sizes(context: Context, full: tuple[int, ...], small: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes for a GPU, or those for a CPU and a small run."""
    return full if context.device != "cpu" and not context.small else small


def trained(context: Context, model: nn.Module, *shape: int) -> tuple[Step, Models]:
    """Return the step that makes the outputs of a model for random inputs small."""
    model, x = model.to(context.device), context.randn(*shape)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    return stepping(model, lambda: model(x).float().square().mean(), optimizer=sgd), {"": model}


class Pre(nn.Module):
    """A norm, a layer of features and what is added to."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = norm, Mlp(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))
