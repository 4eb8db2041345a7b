"""Two processes that train a model together, for benchmarks of several ranks."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.harness import CannotRunError
from benchmarks.models import Gpt

RANKS = 2


def gpt(device: torch.device, small: bool) -> Gpt:
    """A GPT of four layers of width 2048 in bfloat16."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(64, 4, 48, 128) if small else Gpt(2048, 4, 768, 8000)
    return model if small else model.bfloat16()


def distributed(model: Gpt, how: str) -> nn.Module:
    """Distribute a model: ``ddp`` replicates it, ``fsdp2`` shards it by block."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    return model


CASES = {
    "ddp": "DistributedDataParallel: every rank has the whole model",
    "fsdp2": "FSDP2: every rank has a part of each block",
}


def training(how: str, device: torch.device, small: bool) -> tuple[nn.Module, Callable[[], None]]:
    """A distributed model, and a step of its training."""
    model = distributed(gpt(device, small), how)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    tokens = torch.randint(128, (2, 32) if small else (16, 512), device=device)

    def step() -> None:
        optimizer.zero_grad()
        scores = model(tokens)
        functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return model, step


@contextmanager
def member(rank: int, kind: str, folder: str, ranks: int = RANKS) -> Iterator[torch.device]:
    """Be one of the ranks, on a device of its own."""
    warnings.simplefilter("ignore")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=90),
        device_id=device if kind == "cuda" else None,
    )
    yield device
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(train: Callable[..., None], device: str, *arguments: Any, ranks: int = RANKS) -> str:
    """Run ``train(rank, device, folder, *arguments)`` in a process a rank.

    Returns:
        What rank 0 wrote to ``folder/records.json``.

    Raises:
        CannotRunError: If there are fewer GPUs than ranks, or no ``torch.distributed``.
    """
    if not dist.is_available() or (device == "cuda" and torch.cuda.device_count() < ranks):
        raise CannotRunError(f"this benchmark needs torch.distributed, and on GPUs {ranks} of them")
    # One process imports PyTorch for the ranks of all runs, also what the first optimizer imports.
    get_context("forkserver").set_forkserver_preload(
        ["torch.distributed", "torch._dynamo", "benchmarks.models", "backspot.live.profiling"]
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            train, (device, folder, *arguments), nprocs=ranks, start_method="forkserver"
        )
        return (Path(folder) / "records.json").read_text()
