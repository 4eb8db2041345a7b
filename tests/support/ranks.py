"""One rank of a distributed run: trains plainly and instrumented, and checks what it found.

``python -m support.ranks`` prints ``fine`` for each of the environment's ``CASES``, or ``SKIP``
and why. Ranks on ``cuda`` have a GPU each.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import backspot
from support.gpu_models import gpu_profile
from support.leftovers import hooks_on, left_in_torch
from support.training import cpu_profile, owners, said

STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.fc(x))
        return y + x


class Net(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.spare = nn.Linear(8, 8) if case == "ddp-unused" else None
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.case == "ddp-checkpoint":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


LINEAR = {"AddmmBackward0", "TBackward0"}
EXPECTED = {
    "stem": LINEAR,
    "head": LINEAR,
    **{f"blocks.{i}": {"AddBackward0"} for i in range(2)},
    **{f"blocks.{i}.fc": LINEAR for i in range(2)},
    **{f"blocks.{i}.act": {"ReluBackward0"} for i in range(2)},
}


def wrap(model: Net, case: str, device: str) -> nn.Module:
    if case.startswith("fsdp"):
        try:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
        except ImportError as error:
            print("SKIP fully_shard is not in this PyTorch:", error)
            raise SystemExit(0) from None
        mesh = init_device_mesh(device, (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    if case == "ddp-compiled":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    return DistributedDataParallel(
        model,
        find_unused_parameters=case == "ddp-unused",
        static_graph=case == "ddp-static",
    )


def train(
    case: str, rank: int, device: str, *, instrumented: bool
) -> tuple[list[torch.Tensor], Any, frozenset[str]]:
    torch.manual_seed(0)
    plain = Net(case).to(device)
    handle = profiler = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if instrumented and case.endswith("-before"):
            handle = backspot.instrument(plain)
        model = wrap(plain, case, device)
        if instrumented and handle is None:
            handle = backspot.instrument(plain if case == "ddp-inner" else model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(rank)

        def step(sync: bool = True) -> torch.Tensor:
            if case == "ddp-late" and rank == 1:
                time.sleep(0.05)
            x = torch.randn(4, 8, generator=generator).to(device)
            quiet = model.no_sync() if not sync else nullcontext()
            with quiet:
                loss = model(x).square().mean()
                loss.backward()
            return loss.detach()

        losses = [step(), step()]
        profiled = cpu_profile if device == "cpu" else gpu_profile
        with profiled() if instrumented else nullcontext() as profiler:
            for number in range(STEPS):
                losses.append(step(case != "ddp-no-sync" or number == STEPS - 1))
                optimizer.step()
        if handle is not None:
            handle.remove()
    assert hooks_on(model) == left_in_torch() == []
    gradients = [
        p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        for p in model.parameters()
        if p.grad is not None
    ]
    return [*losses, *gradients], profiler, said(caught)


def main(case: str, rank: int, meeting: str, device: str) -> None:
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{meeting}-{case}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        plain, _, before = train(case, rank, device, instrumented=False)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        if case.startswith("fsdp") and device == "cpu":
            print("SKIP fully_shard does not run on the CPU here:", str(error)[:100])
            return
        raise
    results, profiler, now = train(case, rank, device, instrumented=True)
    assert len(plain) == len(results)
    assert all(map(torch.equal, plain, results)), "the same training"
    assert now <= before, now - before
    report = backspot.locate(profiler)
    found = owners(report)
    if case == "ddp-compiled":
        for index in range(2):
            assert found[f"blocks.{index}"].keys() == {"CompiledFunctionBackward"}, found
        assert set(found["stem"]) == set(found["head"]) == LINEAR
    else:
        for path, nodes in EXPECTED.items():
            assert nodes <= found[path].keys(), (path, found)
            assert {found[path][name] for name in nodes} == {1}, (path, found)
        extra = {p: n for p, n in found.items() if p not in EXPECTED and not p.startswith("(")}
        allowed = {""} | ({"blocks.0", "blocks.1"} if case.startswith("fsdp") else set())
        assert extra.keys() <= allowed, extra
    assert "(ambiguous thread)" not in found
    assert len(report.passes) == STEPS, len(report.passes)
    if case == "ddp-late":
        exchange = report["(gradient exchange)"].row
        assert {node.name for node in exchange.nodes} <= {"(all_reduce)"}, exchange.nodes
        if rank == 0:
            assert exchange.wall_ns > report.wall_ns / 2, (exchange.wall_ns, report.wall_ns)
            assert str(report).startswith("Waiting for other ranks: (gradient exchange)")
            assert any(found.rule == "exposed-communication" for found in report.findings)
    if device == "cuda":
        kernels = {kernel.name for row in report.modules for kernel in row.kernels}
        assert any("nccl" in name.lower() for name in kernels), kernels
    assert not any(row.path.startswith("module") for row in report.modules)
    print(case, "is fine", sorted(found), report.coverage.cpu, report.warnings)
    dist.destroy_process_group()


if __name__ == "__main__":
    number, device = int(os.environ["RANK"]), os.environ["DEVICE"]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(number)
    for name in os.environ["CASES"].split():
        print(name, file=sys.stderr)
        main(name, number, os.environ["MEETING"], device)
