"""More cases for ``record_fixtures.py``: streams, graphs, compilation, schedules, several GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from _fixture_cases import Context, Mlp, Recipe, case, sgd_step

__all__ = ["TwoStreams"]


class TwoStreams(nn.Module):
    """Two branches, the second on a stream of its own; autograd keeps to these in backward."""

    def __init__(self, width: int, depth: int, device: str) -> None:
        super().__init__()
        self.main = Mlp(width, depth)
        self.side = Mlp(width, depth)
        self.stream = torch.cuda.Stream() if device.startswith("cuda") else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stream is None:
            return self.main(x) + self.side(x)
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            y = self.side(x)
        z = self.main(x)
        current.wait_stream(self.stream)
        y.record_stream(current)
        return z + y


@case("cuda")
def two_streams(context: Context) -> Recipe:
    width = context.pick(1024, 16)
    model = TwoStreams(width, 4, context.device).to(context.device)
    inputs = context.randn(context.pick(1024, 4), width)
    expect = {"backward_streams": 2, "node_counts": {"AddmmBackward0": 16}}
    return Recipe([(model, "")], sgd_step(model, lambda: model(inputs).square().mean()), expect)


# Several passes, schedules, other labels ---------------------------------------------------------


@case(shapes=False)
def double_backward(context: Context) -> Recipe:
    """A gradient penalty: the second pass runs through the first."""
    model = Mlp(context.pick(1024, 16), 3).to(context.device)
    inputs = context.randn(context.pick(2048, 4), context.pick(1024, 16)).requires_grad_()

    def compute() -> torch.Tensor:
        out = model(inputs)
        (gradient,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        return out.square().mean() + (gradient.norm(dim=1) - 1).square().mean()

    return Recipe([(model, "")], sgd_step(model, compute), {"passes": 4})


@case(shapes=False)
def scheduled(context: Context) -> Recipe:
    model = Mlp(context.pick(1024, 16), 4).to(context.device)
    inputs = context.randn(context.pick(2048, 4), context.pick(1024, 16))
    expect = {"cycles": 2, "schedule": {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}}
    step = sgd_step(model, lambda: model(inputs).square().mean())
    return Recipe([(model, "")], step, expect, how="scheduled")


@case(shapes=False)
def python_stack(context: Context) -> Recipe:
    """Not instrumented: the profiler's own names of modules."""
    model = Mlp(context.pick(1024, 16), 3).to(context.device)
    inputs = context.randn(context.pick(2048, 4), context.pick(1024, 16))
    step = sgd_step(model, lambda: model(inputs).square().mean())
    return Recipe([(model, "")], step, {"source": "python"}, how="stack")


# Compiled and graphed ----------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(self.norm(x)))


class _Stack(nn.Module):
    """Blocks of a norm and a linear layer, and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@case(shapes=False)
def compiled_whole(context: Context) -> Recipe:
    model = _Stack(context.pick(2048, 16), 3).to(context.device)
    compiled = torch.compile(model)
    inputs = context.randn(context.pick(4096, 4), context.pick(2048, 16))
    expect = {"owners": {"CompiledFunctionBackward": [""]}, "node_counts_at_least": 2}
    step = sgd_step(model, lambda: compiled(inputs).square().mean())
    return Recipe([(compiled, "")], step, expect, warmup=5)


@case(shapes=False)
def compiled_regional(context: Context) -> Recipe:
    model = _Stack(context.pick(2048, 16), 3).to(context.device)
    for block in model.blocks:
        block.compile()
    inputs = context.randn(context.pick(4096, 4), context.pick(2048, 16))
    expect = {
        "owners": {
            "CompiledFunctionBackward": [f"blocks.{index}" for index in range(3)],
            "AddmmBackward0": ["head"],
        },
        "node_counts": {"CompiledFunctionBackward": 6},
    }
    step = sgd_step(model, lambda: model(inputs).square().mean())
    return Recipe([(model, "")], step, expect, warmup=5)


@case("cuda", shapes=False)
def cuda_graph_part(context: Context) -> Recipe:
    """One block's forward and backward are graphs that are replayed; the rest runs as ever."""
    width = context.pick(2048, 16)
    model = nn.Sequential()
    model.add_module("before", Mlp(width, 2))
    model.add_module("graphed", Mlp(width, 3))
    model.add_module("after", Mlp(width, 2))
    model.to(context.device)
    sample = context.randn(context.pick(2048, 4), width).requires_grad_()
    torch.cuda.make_graphed_callables(model.graphed, (sample,))
    inputs = context.randn(context.pick(2048, 4), width)
    expect = {
        "owners": {"GraphedBackward": ["graphed"]},
        "node_counts": {"GraphedBackward": 2},
        "inside_graph": [f"graphed.layers.{index}" for index in range(3)],
    }
    return Recipe([(model, "")], sgd_step(model, lambda: model(inputs).square().mean()), expect)


@case("cuda", shapes=False)
def cuda_graph_step(context: Context) -> Recipe:
    """The whole step is one graph: there is no backward on the host to find."""
    width = context.pick(1024, 16)
    model = Mlp(width, 4).to(context.device)
    inputs = context.randn(context.pick(1024, 4), width)
    plain = sgd_step(model, lambda: model(inputs).square().mean())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            plain()
    torch.cuda.current_stream().wait_stream(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(inputs).square().mean().backward()
        optimizer.step()
    return Recipe([(model, "")], graph.replay, {"passes": 0, "graph_launches": 2})


# Several GPUs ------------------------------------------------------------------------------------


@case("2 gpus", shapes=False)
def model_parallel(context: Context) -> Recipe:
    """Two devices in one process and one trace."""
    width = context.pick(2048, 16)

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = Mlp(width, 3).to("cuda:0")
            self.right = Mlp(width, 3).to("cuda:1")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.right(self.left(x).to("cuda:1"))

    model = Split()
    inputs = torch.randn(context.pick(2048, 4), width, device="cuda:0")
    expect = {"devices": [0, 1], "device_of": {"left": 0, "right": 1}}
    return Recipe([(model, "")], sgd_step(model, lambda: model(inputs).square().mean()), expect)


@case("2 ranks", shapes=False)
def ddp(context: Context) -> Recipe:
    width = context.pick(4096, 16)
    model = Mlp(width, 4).to(context.device)
    ids = [torch.device(context.device)] if context.device.startswith("cuda") else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=70)
    inputs = context.randn(context.pick(2048, 4), width)
    expect = {"communication": "allreduce", "ranks": 2, "wrapper": "DistributedDataParallel"}
    step = sgd_step(wrapped, lambda: wrapped(inputs).square().mean())
    return Recipe([(wrapped, "")], step, expect)


@case("2 ranks", shapes=False)
def fsdp2(context: Context) -> Recipe:
    from torch.distributed.device_mesh import init_device_mesh

    shard: Callable[..., object]
    try:
        from torch.distributed.fsdp import fully_shard as shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard as shard
    width = context.pick(4096, 16)
    model = Mlp(width, 4).to(context.device)
    mesh = init_device_mesh(context.device.partition(":")[0], (context.world,))
    for layer in model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    inputs = context.randn(context.pick(2048, 4), width)
    expect = {"communication": "reduce_scatter", "ranks": 2}
    return Recipe([(model, "")], sgd_step(model, lambda: model(inputs).square().mean()), expect)
