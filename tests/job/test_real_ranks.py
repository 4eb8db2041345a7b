"""Real processes that train together with gloo, one of them with a slow module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

import backspot  # noqa: E402

RANKS = 4
SCRIPT = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
import backspot

rank, ranks, folder, slow = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks,
    timeout=timedelta(seconds=60),
)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(5)))
if rank == slow:
    model[2][0].register_forward_pre_hook(lambda *_: time.sleep(0.05))
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with backspot.instrument(model), profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=2, active=5, repeat=1)
) as profiler:
    for _ in range(7):
        wrapped(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_slow_rank_of_four_processes_is_named_with_its_module(tmp_path: Path) -> None:
    """Planted: 50 ms in one module of rank 2, of steps that take a few milliseconds otherwise."""
    if not distributed.is_gloo_available():
        pytest.skip("built without gloo")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(RANKS), str(tmp_path), "2"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        for process in started:
            assert process.wait(150) == 0, process.stderr and process.stderr.read()[-3000:]
    finally:
        for process in started:
            process.kill()
            if process.stderr:
                process.stderr.close()
    job = backspot.ranks(sorted(tmp_path.glob("rank*.json")))
    first = job.findings[0]
    assert (first.rank, first.path, first.kind) == (2, "2.0", "host")
    assert "exposed-transfer" not in {finding.rule for finding in job.findings}
    if not any("too busy" in warning for warning in job.warnings):
        waits = {one.rank: one.wait_ns for one in job.ranks}
        assert waits.pop(2) < min(waits.values())
