"""Processes that train together, with gloo unless they have a GPU each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import preloaded

__all__ = ["TRAINING", "train", "train_two_ranks"]

TRAINING = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=ranks,
    timeout=timedelta(seconds=90),
)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(5)))
if rank == 1:
    model[2][0].register_forward_pre_hook(lambda *_: time.sleep(0.15))
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def step():
    wrapped(torch.randn(64, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Planted in each process of rank 1: 150 ms in the module ``2.0``."""


def train(
    script: str, ranks: int, folder: Path, *before: str, **environment: str
) -> list[tuple[str, str]]:
    """Run a script on all ranks; return standard output and error of each."""
    started = [
        subprocess.Popen(
            [*preloaded.python(), *before, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "MEETING": str(folder / "meeting"),
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                **environment,
            },
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, said, strict=True):
        assert process.returncode == 0, (process.returncode, error[-3000:])
    return said


def train_two_ranks(cases: Sequence[str], folder: Path, device: str = "cpu") -> None:
    """Have two processes train one case after another, and check what they find."""
    given = {"CASES": " ".join(cases), "DEVICE": device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for output, _ in train("support.ranks", 2, folder, "-m", **given):
        if "SKIP" in output:
            pytest.skip(output.partition("SKIP")[2].strip()[:200])
        assert output.count(" is fine ") == len(cases)
