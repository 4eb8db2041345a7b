"""A backward that sleeps, so that a test knows the least time that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Sleep(torch.autograd.Function):
    """The identity, whose backward sleeps for the seconds that a function returns then."""

    @staticmethod
    def forward(ctx, x, seconds: Callable[[], float]):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if seconds := ctx.seconds():  # a sleep of nothing gives the processor away
            time.sleep(seconds)
        return gradient.clone(), None
