"""Is the slow one of two ranks named, with its module, and is nothing claimed of even ranks?

Two processes train a model with DistributedDataParallel or FSDP2. Something slow is planted on rank
1: in a module on the host, in a module as a kernel, in the loader, or longer sequences. Between the
plants, the same training runs with nothing planted. On GPUs, the time that rank 0 waits in a
collective is then compared with CUDA events of each rank's own.

    python -m benchmarks planted_ranks
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import backspot
from benchmarks.common import (
    choose,
    command_line,
    parse,
    print_machine,
    print_table,
    script,
    write_results,
)
from benchmarks.ranks import distributed, gpt, member, run_ranks

_PLANTS = (
    ("host", "h.2.mlp.fc2"),
    ("kernel", "h.2.mlp.fc2"),
    ("data", ""),
    ("length", ""),
    ("host", "h.1.attn"),
    ("kernel", "h.3.attn"),
)
CASES = {
    f"{how}/{number}-{plant}": (how, plant, path)
    for how in ("ddp", "fsdp2")
    for number, (plant, path) in enumerate(
        one for planted in _PLANTS for one in (("even", ""), planted)
    )
}
_KERNEL_S, _HOST_S = 0.010, 0.040
"""The host is ahead of the GPU, so what holds it up has to take longer to cost anything."""
_TICKS = 1.98e9
"""``torch.cuda._sleep`` in one second, at the clock of an H200."""


def _spin(seconds: float, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * _TICKS))
    else:
        time.sleep(seconds)


def _slow_down(module: nn.Module, plant: str, device: torch.device) -> None:
    forward = module.forward

    def slow(x: torch.Tensor) -> torch.Tensor:
        if plant == "host":
            time.sleep(_HOST_S)
        else:
            _spin(_KERNEL_S, device)
        return forward(x)

    module.forward = slow  # type: ignore[method-assign]


def _record(how: str, plant: str, path: str, device: torch.device, small: bool) -> backspot.Report:
    slow = plant if dist.get_rank() == 1 else "even"
    model = gpt(device, small)
    if slow in ("host", "kernel"):
        _slow_down(model.get_submodule(path), slow, device)
    trained = distributed(model, how)
    optimizer = torch.optim.AdamW(trained.parameters(), fused=device.type == "cuda")
    batch, length = (2, 32) if small else (32, 512)
    length = length * 3 // 2 if slow == "length" else length
    tokens = torch.randint(128, (batch, length), device=device)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            if slow == "data":
                time.sleep(_HOST_S)
            yield tokens

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        scores = trained(tokens)
        functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return backspot.profile(
        step, trained, data=batches(), steps=6, warmup=4, unprofiled=0, ranks="all"
    )


def _judge(job: backspot.JobReport, plant: str, path: str, device: torch.device) -> dict[str, Any]:
    said = [
        {"rule": one.rule, "kind": one.kind, "rank": one.rank, "path": one.path, "ns": one.cost_ns}
        for one in job.findings
    ]
    first = said[0] if said else {}
    on_gpu = plant in ("kernel", "length") and device.type == "cuda"
    expected: dict[str, Any] = {"rank": 1, "kind": "gpu" if on_gpu else "host"}
    if plant == "data":
        expected = {"rank": 1, "rule": "slow-data"}
    elif path:
        expected["path"] = path
    right = not said if plant == "even" else expected.items() <= first.items()
    return {"right": right, "findings": said, "step_ns": job.step_ns}


def _wait(seconds: float, device: torch.device) -> dict[str, float] | None:
    """Return how long rank 0 waits for rank 1, by Backspot and by the ranks' own events."""
    linear = nn.Linear(1024, 1024).to(device)
    x, moved = torch.randn(64, 1024, device=device), torch.zeros(1 << 22, device=device)
    events: list[Any] = []

    def step() -> None:
        linear(x).square().mean().backward()
        _spin(seconds if dist.get_rank() == 1 else 0.0005, device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        dist.all_reduce(moved)
        end.record()
        events.append((begin, end))

    report = backspot.profile(step, linear, steps=8, warmup=4, unprofiled=0, ranks="all")
    torch.cuda.synchronize()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, [begin.elapsed_time(end) for begin, end in events[-8:]])
    if report.job is None:
        return None
    # The last rank to enter does not wait: what it takes is the transfer.
    real = median(ours - min(ours, theirs) for ours, theirs in zip(*every, strict=True))
    return {"planted": seconds * 1e3, "real": real, "found": report.job.ranks[0].wait_ns / 1e6}


def _train(rank: int, kind: str, folder: str, names: Sequence[str], small: bool) -> None:
    """What each of the two processes does; rank 0 writes the records."""
    done: dict[str, Any] = {}
    with member(rank, kind, folder) as device:
        for name in names:
            how, plant, path = CASES[name]
            job = _record(how, plant, path, device, small).job
            if kind == "cuda":
                torch.cuda.empty_cache()
            if job is not None:
                done[name] = {"plant": plant, "path": path, **_judge(job, plant, path, device)}
                print(name, "right" if done[name]["right"] else "WRONG", flush=True)
        waits = [_wait(seconds, device) for seconds in (0.003, 0.010) if kind == "cuda"]
        if rank == 0:
            records = {"cases": done, "waits": waits}
            (Path(folder) / "records.json").write_text(json.dumps(records))


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "planted_ranks")
    arguments = parse(parser, argv)
    names = choose(arguments, dict.fromkeys(CASES, ""), ("ddp/0-even", "ddp/1-host"))
    print_machine(arguments.device)
    records = json.loads(run_ranks(_train, arguments.device, names, arguments.small))
    cases = records["cases"]
    print_table(
        ("case", "right", "first finding", "its ms", "step ms"),
        [
            (
                name,
                "yes" if one["right"] else "NO",
                " ".join(str(one["findings"][0][key]) for key in ("rule", "rank", "path"))
                if one["findings"]
                else "",
                one["findings"][0]["ns"] / 1e6 if one["findings"] else 0.0,
                one["step_ns"] / 1e6,
            )
            for name, one in cases.items()
        ],
    )
    for wait in records["waits"]:
        print(f"rank 0 waits {wait['real']:.3f} ms, and is said to wait {wait['found']:.3f} ms")
    write_results(arguments, records)
    return 0
