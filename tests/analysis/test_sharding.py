"""The host's time in FSDP2's hooks, on a GPU: traces as `fully_shard` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

import backspot
from backspot.results.findings import Finding
from support.synthetic import Trace

US = 1_000
RULE = "sharded-small-modules"
HOST, ENGINE = 1, 2


def step(trace: Trace, number: int, at: int, modules: int, hook: int, kernel: int) -> int:
    """One step of ``modules`` layers, each sharded by itself; return when it has ended.

    The model has labels from its own root, and is sharded from the one around it.
    """
    begin, time, running = at, at, at

    def computes(thread: int) -> None:
        nonlocal time, running
        running = max(running, time + 5 * US)
        trace.kernel(running, running + kernel, launch=time + 2 * US, launch_thread=thread)
        running += kernel
        time += 10 * US

    def hooked(name: str, layer: int, thread: int) -> None:
        nonlocal time
        trace.annotation(f"FSDP::{name} (inner.layers.{layer})", time, time + hook, thread)
        time += hook

    for layer in range(modules):
        called, numbered = time, number * 1000 + layer
        hooked("pre_forward", layer, HOST)
        trace.operator("aten::linear", time, time + 9 * US, seq=numbered)
        computes(HOST)
        hooked("post_forward", layer, HOST)
        trace.forward(f"layers.{layer}", "Linear", called, time)
        time += US
    for layer in reversed(range(modules)):
        start = time
        hooked("pre_backward", layer, ENGINE)
        computes(ENGINE)
        numbered = number * 1000 + layer
        trace.node("AddmmBackward0", start, time, seq=numbered, thread=ENGINE)
        start = time + US
        time = start
        hooked("post_backward_reduce", layer, ENGINE)
        trace.node("RegisterPostBackwardFunctionBackward", start, time, thread=ENGINE)
        time += US
    end = max(time, running) + 10 * US
    trace.annotation(f"ProfilerStep#{number}", begin, end)
    return end + US


def found(folder: Path, modules: int, hook: int, kernel: int) -> Finding | None:
    trace, at = Trace(), 100 * US
    for number in range(3):
        at = step(trace, number, at, modules, hook, kernel)
    report = backspot.locate(trace.save(folder / "trace.json"))
    assert report.has_gpu
    assert report.steps == 3
    return next((one for one in report.findings if one.rule == RULE), None)


def test_hooks_that_keep_a_gpu_waiting_are_found_at_their_modules(tmp_path):
    finding = found(tmp_path, modules=10, hook=200 * US, kernel=20 * US)
    assert finding is not None
    assert {place.path for place in finding.places} == {f"layers.{n}" for n in range(10)}
    assert all(place.count == 1 for place in finding.places)
    hooks = 10 * 4 * 200 * US
    assert 0.8 * hooks < finding.wall_ns <= hooks
    assert finding.saves is None
    assert "10 modules, and the GPU computes nothing" in finding.seen


@pytest.mark.parametrize(
    ("modules", "hook", "kernel"),
    [
        pytest.param(10, 200 * US, 2000 * US, id="the GPU computes meanwhile"),
        pytest.param(6, 200 * US, 20 * US, id="few modules"),
        pytest.param(10, 1 * US, 20 * US, id="hooks that take little"),
    ],
)
def test_hooks_are_no_cause_where(tmp_path, modules, hook, kernel):
    assert found(tmp_path, modules, hook, kernel) is None
