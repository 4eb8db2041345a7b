"""Warnings and words that the recording itself contradicts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import backspot
from backspot.trace.compiled import KEY, Compilation, format_compiled
from support.synthetic import Trace

torch = pytest.importorskip("torch")

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


@pytest.mark.slow
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


def compiling(folder: Path, *compilations: Compilation) -> str:
    """The warning of a trace whose step compiles twice, with a table of these compilations."""
    trace = Trace()
    trace.forward("", "Model", 0, 50 * TICK)
    for number, begin in enumerate((5 * TICK, 15 * TICK)):
        name = "_compile.compile_inner (dynamo_timed)"
        trace.operator(name, begin, begin + 5 * TICK)
        trace.operator(f"Torch-Compiled Region: {number}/1", begin + 6 * TICK, begin + 7 * TICK)
    trace.operator("aten::mul", 41 * TICK, 42 * TICK, seq=0)
    trace.node("MulBackward0", 60 * TICK, 90 * TICK, seq=0)
    if compilations:
        trace.metadata[KEY] = json.loads(format_compiled([], compilations=compilations))
    report = backspot.locate(trace.save(folder / "trace.json"))
    (warning,) = (w for w in report.warnings if "compile code" in w)
    return warning


def test_code_that_is_compiled_again_in_the_steps_is_named_with_the_reason(tmp_path: Path):
    inner = Compilation("0/1", "forward", "model.py", 5, "")
    broken = Compilation("1/1", "torch_dynamo_resume_in_forward_at_8", "model.py", 8, "flag == 1")
    assert compiling(tmp_path, inner, broken) == (
        "The recorded steps compile code 2 times, which took 1.0 ms: "
        "torch_dynamo_resume_in_forward_at_8 (model.py:8) again, because flag == 1; and 1 more."
    )
    assert compiling(tmp_path, inner).endswith("forward (model.py:5) for the first time.")


def test_without_a_table_the_report_says_how_to_learn_why_code_is_compiled(tmp_path: Path):
    assert "torch._logging.set_logs(recompiles=True)" in compiling(tmp_path)
