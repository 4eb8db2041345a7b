"""Warnings and words that the recording itself contradicts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import backspot
from support.synthetic import Trace

TICK = 100_000  # nanoseconds


class Late(torch.autograd.Function):
    """The identity, whose backward sleeps when it runs for the third time."""

    passes = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Late.passes += 1
        time.sleep(0.3 if Late.passes == 3 else 0)
        return gradient


@pytest.mark.parametrize("warmup", [0, 2])
def test_after_a_warm_up_none_is_asked_for(warmup):
    Late.passes = 2 - warmup
    model = torch.nn.Linear(4, 4)

    def step() -> None:
        Late.apply(model(torch.ones(2, 4))).sum().backward()

    warnings = backspot.profile(step, model, warmup=warmup, unprofiled=0).warnings
    asked = any(warning.startswith("The first step's backward took") for warning in warnings)
    assert asked is (warmup == 0)


@pytest.mark.parametrize("gpu", [True, False])
def test_only_a_trace_with_a_gpu_has_copies_to_it(tmp_path: Path, gpu):
    trace = Trace()
    trace.annotation("ProfilerStep#1", 0, 100 * TICK)
    trace.annotation("[pl][profile][Strategy]S.batch_to_device", 2 * TICK, 30 * TICK)
    trace.forward("", "Model", 40 * TICK, 50 * TICK)
    trace.operator("aten::mul", 41 * TICK, 42 * TICK, seq=0)
    trace.node("MulBackward0", 60 * TICK, 90 * TICK, seq=0)
    if gpu:
        trace.kernel(61 * TICK, 90 * TICK, launch=61 * TICK)
    report = backspot.locate(trace.save(tmp_path / "trace.json"))
    assert ("copies to the GPU" in str(report)) is gpu
    assert ("copies of the batch" in str(report)) is not gpu
