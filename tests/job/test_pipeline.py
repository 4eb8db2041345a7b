"""Real processes that train as the stages of a pipeline, with gloo."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")
if find_spec("torch.distributed.pipelining") is None:  # an import takes a second
    pytest.skip("this PyTorch has no pipelines", allow_module_level=True)

import backspot  # noqa: E402
from support.gloo import train  # noqa: E402

STAGES = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.profiler import ProfilerActivity, profile, schedule
import backspot

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=ranks,
    timeout=timedelta(seconds=90),
)
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)
class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        for layer in (2 * rank, 2 * rank + 1):
            setattr(self, f"layer{layer}", Slow(64, 64))
    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x
model = Stage()
microbatch = torch.randn(32, 64)
stage = PipelineStage(model, rank, ranks, torch.device("cpu"), input_args=(microbatch,))
pipeline = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output - target).square().mean())
def step():
    x = torch.randn(64, 64)
    pipeline.step(x) if rank == 0 else pipeline.step(target=x)
with backspot.instrument(model), profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=2, active=4, repeat=1)
) as profiler:
    for _ in range(6):
        step()
        profiler.step()
profiler.export_chrome_trace(f"rank{rank}.json")
dist.destroy_process_group()
"""
"""Two stages and two microbatches: each stage waits for the other for a third of the step."""


@pytest.mark.slow
def test_bubbles_of_a_pipeline_are_found_and_its_stages_are_not_compared(tmp_path: Path) -> None:
    if not distributed.is_gloo_available():
        pytest.skip("built without gloo")
    train(STAGES, 2, tmp_path, "-c")
    job = backspot.ranks(sorted(tmp_path.glob("rank*.json")))
    assert {one.rule for one in job.findings} == {"pipeline-bubble"}
    layers = {spread.path: spread.cost_ns for spread in job.modules if spread.path[:1].isalpha()}
    assert layers == {f"layer{number}": 0 for number in range(4)}
    for one in job.ranks:  # while the other stage sleeps for 40 ms, and both are delayed
        assert 20_000_000 < one.stalled_ns < one.step_ns
