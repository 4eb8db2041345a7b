"""Causes that need two GPUs: communication that nothing hides, and copies between devices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.causes.case import Built, Context, adamw, built, control, plant
from benchmarks.causes.training import images
from benchmarks.models import Layer, ResidualMlp, Vit, resnet, vit, wide

_BUCKETS = {"gradient-accumulation": "gradients are copied into buckets, which are no views"}
_WAITS = {"launch-bound": "the GPU waits for the other rank"}


def _parallel(context: Context, model: nn.Module, **options: object) -> DistributedDataParallel:
    devices = None if context.device == "cpu" else [context.device]
    return DistributedDataParallel(model, device_ids=devices, **options)  # type: ignore[arg-type]


def _train_wide(
    context: Context, model: ResidualMlp, outer: nn.Module, tokens: int = 1024
) -> Built:
    width = model.layers[0].in_features
    data = context.randn(context.pick(tokens, 4), width).to(torch.bfloat16)
    return built(context, model, lambda: outer(data).square().mean())


@plant("exposed-communication", None, {**_WAITS, **_BUCKETS}, ranks=2, gpus=2)
def exchange_wide(context: Context) -> Built:
    """Data-parallel training of large weights on few tokens."""
    model = wide(context)
    return _train_wide(context, model, _parallel(context, model))


@plant("exposed-communication", None, {**_WAITS, **_BUCKETS}, ranks=2, gpus=2)
def exchange_one_bucket(context: Context) -> Built:
    """One bucket for all gradients: nothing is sent before the backward's end."""
    model = wide(context)
    outer = _parallel(context, model, bucket_cap_mb=4000, static_graph=True)
    return _train_wide(context, model, outer, tokens=4096)


@plant("exposed-communication", None, _WAITS, ranks=2, gpus=2)
def exchange_by_hand(context: Context) -> Built:
    """Gradients reduced one by one after the backward."""
    model = wide(context)
    optimizer = adamw(context, model)
    data = context.randn(context.pick(4096, 4), model.layers[0].in_features).to(torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    return Built([(model, "")], step)


@plant("exposed-communication", None, _WAITS, ranks=2, gpus=2)
def exchange_sharded(context: Context) -> Built:
    """Weights sharded, gathered again for each layer's few tokens."""
    from torch.distributed.fsdp import fully_shard

    model = wide(context)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return _train_wide(context, model, model)


@plant(
    "exposed-communication",
    None,
    {
        **_WAITS,
        **_BUCKETS,
        "host-waits": "the statistics are waited for",
        "small-batch": "16 images",
    },
    ranks=2,
    gpus=2,
)
def exchange_statistics_resnet(context: Context) -> Built:
    """Synchronised BatchNorm with few images a rank."""
    model = resnet(context)
    if context.device != "cpu":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    outer = _parallel(context, model)
    data = images(context, 64, 224)
    return built(context, model, lambda: outer(data).float().square().mean(), autocast=True)


@control("exposed-communication", ranks=2, gpus=2)
def exchange_hidden_vit(context: Context) -> Built:
    """Data-parallel training with enough work to hide the exchange."""
    model = vit(context, depth=6)
    outer = _parallel(context, model, gradient_as_bucket_view=True)
    data = images(context, 192, 224, torch.bfloat16)
    return built(context, model, lambda: outer(data).float().square().mean())


# Two devices of one process -----------------------------------------------------------------------


class _On(nn.Module):
    """What it holds runs on a device of its own."""

    def __init__(self, inner: nn.Module, device: str) -> None:
        super().__init__()
        self.inner = inner.to(device)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.device))


def _spread(context: Context, model: Vit, devices: list[str]) -> Built:
    for index, device in enumerate(devices):
        model.blocks[index] = _On(model.blocks[index], device)
    model.norm, model.head = _On(model.norm, "cuda:0"), _On(model.head, "cuda:0")
    data = images(context, 192, 224, torch.bfloat16)
    return built(context, model, lambda: model(data).float().square().mean())


@plant(
    "device-copies",
    ["blocks.*", "norm"],
    {"launch-bound": "one of two devices always waits", "small-batch": "half of them idle"},
    gpus=2,
)
def copies_to_and_fro_vit(context: Context) -> Built:
    """Blocks on two GPUs in turns: the tokens cross at each."""
    return _spread(context, vit(context), ["cuda:0", "cuda:1", "cuda:0", "cuda:1"])


@plant(
    "device-copies",
    ["tokens"],
    {"launch-bound": "one of two devices always waits", "small-batch": "half of them idle"},
    gpus=2,
)
def copies_parked_vit(context: Context) -> Built:
    """Tokens that go to the other GPU and back four times, for nothing."""

    def visit(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.to("cuda:1").to("cuda:0")
        return x

    model = vit(context)
    model.tokens = Layer(visit)
    data = images(context, 192, 224, torch.bfloat16)
    return built(context, model, lambda: model(data).float().square().mean())
