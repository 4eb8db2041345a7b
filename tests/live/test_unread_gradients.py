"""Gradients that a Function's backward returns although nobody reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

import backspot
from backspot import Report

ROWS, COLUMNS = 1024, 1024


class Scaled(torch.autograd.Function):
    """Takes most of a step: on a busy machine, it is interrupted as often as the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, asks: bool) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.asks = asks
        return x * scale.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        if ctx.asks and not ctx.needs_input_grad[1]:
            return gradient * scale.exp(), None, None
        return gradient * scale.exp(), gradient * x * scale.exp(), None


class Scale(nn.Module):
    def __init__(self, *, asks: bool, learned: bool) -> None:
        super().__init__()
        self.asks = asks
        self.scale = nn.Parameter(torch.ones(ROWS, COLUMNS), requires_grad=learned)

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.scale, self.asks)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that share an operator wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def profiled(*, asks: bool, learned: bool = False) -> Report:
    model = nn.Sequential(nn.Linear(8, COLUMNS), Scale(asks=asks, learned=learned))
    x = torch.randn(ROWS, 8)
    return backspot.profile(
        lambda: model(x).sum().backward(), model, steps=9, warmup=1, unprofiled=0, stacks=False
    )


def test_a_gradient_of_an_input_that_needs_none_is_found_at_its_module() -> None:
    (found,) = [one for one in profiled(asks=False).findings if one.rule == "unread-gradient"]
    assert found.path == "1"
    assert found.nodes == ("ScaledBackward",)
    assert "needs_input_grad" in found.remedy


@pytest.mark.parametrize("options", [{"asks": True}, {"asks": False, "learned": True}])
def test_what_asks_and_what_is_needed_is_left_alone(options: dict[str, bool]) -> None:
    assert "unread-gradient" not in {one.rule for one in profiled(**options).findings}


def test_autograd_is_as_it_was_after_the_recording() -> None:
    before = {name: getattr(BackwardCFunction, name, None) for name in ("apply", "apply_boxed")}
    profiled(asks=False)
    assert before == {name: getattr(BackwardCFunction, name, None) for name in before}


def test_an_error_of_a_backward_is_the_users_own() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("mine")

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Fails.apply(super().forward(x))

    model = Failing(4, 4)
    with pytest.raises(ArithmeticError, match="mine"):
        backspot.profile(
            lambda: model(torch.ones(2, 4)).sum().backward(), model, warmup=0, unprofiled=0
        )
