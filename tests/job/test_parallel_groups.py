"""Real processes that train in parallel in several ways, with gloo."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")
if find_spec("torch.distributed.tensor") is None:  # an import takes a second
    pytest.skip("this PyTorch has no DTensor", allow_module_level=True)

import backspot  # noqa: E402
from support.gloo import train  # noqa: E402

if not distributed.is_gloo_available():
    pytest.skip("built without gloo", allow_module_level=True)

MODELS = """
import os, sys, time, warnings
from datetime import timedelta
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel, SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, schedule
import backspot

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=ranks,
    timeout=timedelta(seconds=90),
)

class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x.contiguous())
        return found
    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad)

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return self.down(self.up(x).relu())

class Routed(nn.Module):
    "Each rank has an expert, and each sends a part of its tokens to each."
    def __init__(self):
        super().__init__()
        self.local = Mlp()
    def forward(self, x):
        return Exchange.apply(self.local(Exchange.apply(x)))

class Attention(nn.Module):
    "All heads of a part of the sequence, or of all of it a part of the heads."
    def __init__(self, exchanges=False):
        super().__init__()
        self.projection, self.exchanges = nn.Linear(32, 32), exchanges
    def forward(self, x):
        y = self.projection(x).view(len(x), 8, 4, -1).transpose(1, 2)
        y = Exchange.apply(y) if self.exchanges else y
        y = functional.scaled_dot_product_attention(y, y, y)
        y = Exchange.apply(y) if self.exchanges else y
        return y.transpose(1, 2).reshape(x.shape)

class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(32), Attention(kind == "heads")
        self.mlp = Routed() if kind == "routed" else Mlp()
    def forward(self, x):
        x = x + self.mix(x)
        return x + self.mlp(self.norm(x))

def blocks(kind=""):
    torch.manual_seed(0)
    return nn.Sequential(Block(kind), Block(kind))

def split(model, mesh):
    plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh, plan)
    return model

def split_sequence(model, mesh):
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {
        "mix": PrepareModuleInput(**whole, use_local_output=True),
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(**whole),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    part = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    for block in model:
        parallelize_module(block, mesh, plan)
        parallelize_module(block.mix, mesh, part)
    return model

def sharded(model, **kwargs):
    for block in model:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)

def record(name, model, label=None):
    x = torch.randn(8, 8, 32)
    def step():
        model(x).square().mean().backward()
        dist.all_reduce(torch.zeros(1))
        model.zero_grad()
    with backspot.instrument(label or model), profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=5, repeat=1)
    ) as profiler:
        for _ in range(6):
            step()
            profiler.step()
    os.makedirs(name, exist_ok=True)
    profiler.export_chrome_trace(f"{name}/rank{rank}.json")
"""
TWO = """
whole = blocks()
record("data", nn.parallel.DistributedDataParallel(whole), whole)
record("sharded", sharded(blocks()))
mesh = init_device_mesh("cpu", (ranks,))
record("tensor", split(blocks(), mesh))
record("sequence", split_sequence(blocks(), mesh))
record("expert_or_context", blocks("routed"))
record("context", blocks("heads"))
whole = split(blocks(), mesh)
for block in whole:  # and gradients in the same group
    weight = block.mix.projection.weight
    weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
record("unknown", whole)
waiting = split(blocks(), mesh)
if rank == 1:
    waiting[1].mlp.register_forward_pre_hook(lambda *_: time.sleep(0.3))
record("late", waiting)
dist.destroy_process_group()
"""
FOUR = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
record("grid", sharded(split(blocks(), mesh["tp"]), mesh=mesh["dp_shard"]))
dist.destroy_process_group()
"""


def _job(folder: Path) -> backspot.JobReport:
    return backspot.ranks(sorted(folder.glob("rank*.json")))


@pytest.mark.slow
def test_each_kind_of_parallelism_of_two_ranks_is_recognised(tmp_path: Path) -> None:
    """Their only process group has no description, and its statistics of the loss are no hint."""
    train(MODELS + TWO, 2, tmp_path, "-c")
    roles = ("data", "sharded", "tensor", "sequence", "expert_or_context", "context", "unknown")
    for role in roles:
        (group,) = _job(tmp_path / role).groups
        expected = "tensor" if role == "sequence" else role
        assert (role, group.role, group.ranks) == (role, expected, (0, 1))
        assert group.collectives >= 2
    # One rank reaches the collective of the last module 300 ms after the other. On a busy machine
    # each waits for the other now and then.
    job = _job(tmp_path / "late")
    first, *rest = job.modules
    assert (first.path, first.worst_rank, first.part) == ("1.mlp", 1, "forward_host")
    assert first.cost_ns > 150_000_000 > max(one.cost_ns for one in rest)
    assert [one.rank for one in job.slowest] == [1] * len(job.slowest)
    waits = {one.rank: one.wait_ns for one in job.ranks}
    assert waits[0] > 150_000_000 > waits[1]


@pytest.mark.slow
def test_collectives_of_gloo_are_not_matched_where_ranks_have_several_groups(
    tmp_path: Path,
) -> None:
    train(MODELS + FOUR, 4, tmp_path, "-c")
    job = _job(tmp_path / "grid")
    assert job.groups == ()
    (warning,) = job.warnings
    assert "several process groups" in warning
