"""Real processes that train together with gloo, one of them with a slow module."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

import backspot  # noqa: E402
from support.gloo import TRAINING, train  # noqa: E402

RECORDED = """
from torch.profiler import ProfilerActivity, profile, schedule
import backspot
with backspot.instrument(model), profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=2, active=5, repeat=1)
) as profiler:
    for _ in range(7):
        step()
        profiler.step()
profiler.export_chrome_trace(f"rank{rank}.json")
dist.destroy_process_group()
"""

LOOP = """
def step():
    wrapped(torch.randn(64, 64)).square().mean().backward()
    if rank == 2:
        time.sleep(0.25)
    optimizer.step()
    optimizer.zero_grad()
"""
"""Planted besides: 250 ms in no module of rank 2."""


@pytest.mark.slow
def test_python_in_the_training_loop_of_one_rank_is_found_beside_a_slow_module(
    tmp_path: Path,
) -> None:
    if not distributed.is_gloo_available():
        pytest.skip("built without gloo")
    train(TRAINING + LOOP + RECORDED, 3, tmp_path, "-c")
    job = backspot.ranks(sorted(tmp_path.glob("rank*.json")))
    first, second = job.findings[:2]
    assert (first.rule, first.rank) == ("slow-loop", 2)
    assert "between backward and optimizer step" in first.title
    assert "Python" in first.seen
    assert (second.rule, second.rank, second.path) == ("slow-module", 1, "2.0")
    assert second.kind == "host"
    if not any("too busy" in warning for warning in job.warnings):
        waits = {one.rank: one.wait_ns for one in job.ranks}
        assert waits.pop(0) > max(waits.values())
