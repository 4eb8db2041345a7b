"""Modules that are sharded over two ranks one by one, and the same model sharded well.

On a processor with gloo: ``record --device cpu --jobs 1``. With two GPUs the cases end in ``_gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.causes.case import Build, Built, Context, built, control, plant
from benchmarks.causes.training import images
from benchmarks.models import Vit, vit

__all__: list[str] = []

_RULE = "sharded-small-modules"
_ON_GPUS = {
    "launch-bound": "the hooks keep the GPU waiting",
    "exposed-communication": "each module waits for its own parameters",
    "small-batch": "the GPU has little to do between the hooks",
}


class _Block(nn.Module):
    """A residual block of a norm and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Experts(nn.Module):
    """Experts that each take their part of the tokens."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self.experts))
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


def _blocks(depth: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(_Block(width) for _ in range(depth)))


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules that have parameters of their own."""
    return [one for one in model.modules() if [*one.parameters(recurse=False)]]


def _sharded(
    context: Context, model: nn.Module, units: Iterable[nn.Module | list[nn.Module]]
) -> nn.Module:
    """Return the model with each unit sharded by itself, and the rest with the root."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(context.device.partition(":")[0], (context.world,))
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _trained(context: Context, model: nn.Module, *shape: int) -> Built:
    x = context.randn(*shape)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    return built(context, model, lambda: model(x).float().square().mean(), optimizer=sgd)


def _on(context: Context, model: nn.Module) -> nn.Module:
    return model.to(context.device)


# With gloo, or with GPUs that have little to do ---------------------------------------------------


def sharded_layers(context: Context) -> Built:
    """Each norm and layer of small residual blocks sharded by itself."""
    model = _on(context, _blocks(6, 64))
    return _trained(context, _sharded(context, model, _layers(model)), 32, 64)


def sharded_chain(context: Context) -> Built:
    """Each of 24 small layers sharded by itself."""
    layers = (nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(24))
    model = _on(context, nn.Sequential(*layers))
    return _trained(context, _sharded(context, model, list(model.children())), 16, 48)


def sharded_experts(context: Context) -> Built:
    """Each expert of two mixtures sharded by itself."""
    model = _on(context, nn.Sequential(_Experts(64, 8), nn.ReLU(), _Experts(64, 8)))
    return _trained(context, _sharded(context, model, _layers(model)), 64, 64)


def sharded_convolutions(context: Context) -> Built:
    """Each convolution and norm of a small network sharded by itself."""
    stages = (
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        for _ in range(8)
    )
    model = _on(context, nn.Sequential(*stages))
    return _trained(context, _sharded(context, model, _layers(model)), 2, 8, 12, 12)


def sharded_groups(context: Context) -> Built:
    """Small residual blocks, sharded in two groups."""
    model = _blocks(6, 64)
    blocks = [*_on(context, model).children()]
    return _trained(context, _sharded(context, model, [blocks[:3], blocks[3:]]), 32, 64)


def sharded_large(context: Context) -> Built:
    """Large residual blocks, each sharded by itself."""
    model = _on(context, _blocks(10, 512))
    return _trained(context, _sharded(context, model, list(model.children())), 512, 512)


def replicated_layers(context: Context) -> Built:
    """Small residual blocks that are not sharded, and that the host's launches limit."""
    model = _on(context, _blocks(6, 64))
    outer = DistributedDataParallel(model)
    x = context.randn(32, 64)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    return built(context, model, lambda: outer(x).square().mean(), optimizer=sgd)


# A model of a size for GPUs -----------------------------------------------------------------------


def _train_vit(context: Context, model: Vit, units: Iterable[nn.Module], batch: int) -> Built:
    for one in model.parameters():  # FSDP2 takes no other layout
        one.data = one.data.contiguous()
    outer = _sharded(context, model, units)
    data = images(context, batch, 224, torch.bfloat16)
    return built(context, model, lambda: outer(data).float().square().mean())


def sharded_layers_vit(context: Context) -> Built:
    """Each layer of a vision transformer sharded by itself."""
    model = vit(context)
    return _train_vit(context, model, _layers(model.blocks), 16)


def sharded_blocks_vit(context: Context) -> Built:
    """Each block of a vision transformer sharded by itself, with enough images for a GPU."""
    model = vit(context, depth=12)
    return _train_vit(context, model, model.blocks, 192)


def _register(build: Build, name: str, register: Callable[[Build], Build]) -> None:
    def made(context: Context) -> Built:
        return build(context)

    made.__name__, made.__doc__ = name, build.__doc__
    register(made)


for _build, _at in (
    (sharded_layers, ["?.norm", "?.up", "?.down"]),
    (sharded_chain, ["*"]),
    (sharded_experts, ["?.experts.*"]),
    (sharded_convolutions, ["?.0", "?.1"]),
):
    _register(_build, _build.__name__, plant(_RULE, _at, gpus=0, ranks=2))
    _register(_build, f"{_build.__name__}_gpu", plant(_RULE, _at, _ON_GPUS, gpus=2, ranks=2))
for _build in (sharded_groups, replicated_layers):
    _register(_build, _build.__name__, control(_RULE, gpus=0, ranks=2))
    _register(_build, f"{_build.__name__}_gpu", control(_RULE, _ON_GPUS, gpus=2, ranks=2))
_register(sharded_large, "sharded_large", control(_RULE, gpus=0, ranks=2))
_register(
    sharded_layers_vit, "sharded_layers_vit", plant(_RULE, ["blocks.*"], _ON_GPUS, gpus=2, ranks=2)
)
_register(sharded_blocks_vit, "sharded_blocks_vit", control(_RULE, _ON_GPUS, gpus=2, ranks=2))
