"""Causes in what is done with gradients and around them: accumulation, optimizer, recomputation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.causes.case import OPTIMIZER, Built, Context, adamw, plant
from benchmarks.causes.training import (
    forward_recommender,
    train_gpt,
    train_recommender,
    train_resnet,
    train_unet,
    train_vit,
    train_wide,
)
from benchmarks.models import Checkpointed, gpt, recommender, resnet, unet, vit, wide

_SMALL_STEPS = {"launch-bound": "the optimizer's many small kernels are the host's work"}


# gradient-accumulation ----------------------------------------------------------------------------


@plant("gradient-accumulation", ["layers.*"])
def accumulate_micro_batches_wide(context: Context) -> Built:
    """Eight tiny micro-batches a step of a model with large weights."""
    model = wide(context)
    optimizer = adamw(context, model)
    data = context.randn(context.pick(512, 2), model.layers[0].in_features).to(torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(8):
            (model(data).square().mean() / 8).backward()
        optimizer.step()

    return Built([(model, "")], step)


class _Tuned(nn.Module):
    """A Linear with a full-sized change to its weight, both trained."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(inner.weight.detach().clone())
        self.change = nn.Parameter(torch.zeros_like(inner.weight))
        self.in_features = inner.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight + self.change)


@plant("gradient-accumulation", ["layers.*"])
def accumulate_shared_wide(context: Context) -> Built:
    """Two parameters that get one and the same gradient: one of them needs a copy."""
    model = wide(context)
    for index, layer in enumerate(model.layers):
        model.layers[index] = _Tuned(layer)
    return train_wide(context, model, tokens=1024)


@plant("gradient-accumulation", ["layers.*"])
def accumulate_kept_wide(context: Context) -> Built:
    """A hook that keeps each gradient, so that autograd must copy it."""
    model = wide(context)
    kept: dict[int, torch.Tensor] = {}
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda g, number=number: kept.__setitem__(number, g))
    return train_wide(context, model, tokens=1024)


@plant(
    "gradient-accumulation",
    ["lstm", "tower.*", "users", "items"],
    {"dense-embedding-gradient": "the table has six million rows"},
)
def accumulate_micro_recommender(context: Context) -> Built:
    """Micro-batches whose dense table gradients are added each time."""
    model = recommender(context, users=6_000_000)
    optimizer = adamw(context, model)
    loss, forward = forward_recommender(context, model, batch=256)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(4):
            forward().backward()
        optimizer.step()

    return Built([(model, ""), (loss, "loss")], step)


# unused-gradient ----------------------------------------------------------------------------------


@plant("unused-gradient", ["*conv*", "layer*", "layer*.*", "maxpool", "bn1"])
def unused_backbone_resnet(context: Context) -> Built:
    """A backbone that is left out of the optimizer, but not frozen."""
    model = resnet(context)
    optimizer = adamw(context, model.fc)

    def drop() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    built = train_resnet(context, model, optimizer=optimizer)
    inner = built.step

    def step() -> None:
        inner()
        drop()

    return Built(built.modules, step)


@plant("unused-gradient", ["blocks.*", "blocks.*.*", "patch_embed"])
def unused_probe_vit(context: Context) -> Built:
    """A linear probe whose backbone still computes gradients."""
    model = vit(context)
    return train_vit(context, model, optimizer=adamw(context, model.head))


@plant("unused-gradient", ["wte", "h.0*", "h.1*", "h.0.*", "h.1.*"])
def unused_lower_gpt(context: Context) -> Built:
    """Only the upper blocks are trained; the lower ones' gradients are thrown away."""
    model = gpt(context)
    upper = nn.ModuleList([*list(model.h)[len(model.h) // 2 :], model.ln_f, model.lm_head])
    return train_gpt(context, model, optimizer=adamw(context, upper))


@plant("unused-gradient", ["", "down.*", "down.*.*", "mid", "mid.*"])
def unused_encoder_unet(context: Context) -> Built:
    """A U-Net whose decoder alone is in the optimizer."""
    model = unet(context)
    trained = nn.ModuleList([model.grow, model.up, model.out])
    return train_unet(context, model, optimizer=adamw(context, trained))


@plant("unused-gradient", ["lstm"])
def unused_lstm_recommender(context: Context) -> Built:
    """An encoder whose gradients are set to None before each optimizer step."""
    model = recommender(context)
    optimizer = adamw(context, model)
    built = train_recommender(context, model, optimizer)

    def drop(*_: object) -> None:
        for parameter in model.lstm.parameters():
            parameter.grad = None

    optimizer.register_step_pre_hook(drop)
    return built


# optimizer-kernels --------------------------------------------------------------------------------


@plant("optimizer-kernels", OPTIMIZER, _SMALL_STEPS)
def optimizer_loop_vit(context: Context) -> Built:
    """AdamW parameter by parameter."""
    model = vit(context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, fused=False)
    return train_vit(context, model, optimizer=optimizer)


@plant("optimizer-kernels", OPTIMIZER, _SMALL_STEPS)
def optimizer_loop_resnet(context: Context) -> Built:
    """SGD with momentum, parameter by parameter."""
    model = resnet(context)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, foreach=False
    )
    return train_resnet(context, model, optimizer=optimizer)


@plant("optimizer-kernels", OPTIMIZER, _SMALL_STEPS)
def optimizer_rmsprop_gpt(context: Context) -> Built:
    """RMSprop, parameter by parameter."""
    model = gpt(context)
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=1e-5, momentum=0.9, centered=True, foreach=False
    )
    return train_gpt(context, model, optimizer=optimizer)


class _Lion(torch.optim.Optimizer):
    """An optimizer of one's own, written as a loop."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                update = average.mul(0.9).add(parameter.grad, alpha=0.1).sign_()
                parameter.mul_(1 - 1e-5).add_(update, alpha=-1e-4)
                average.mul_(0.99).add_(parameter.grad, alpha=0.01)


@plant("optimizer-kernels", OPTIMIZER, _SMALL_STEPS)
def optimizer_own_unet(context: Context) -> Built:
    """An optimizer of one's own that loops over the parameters."""
    model = unet(context)
    return train_unet(context, model, optimizer=_Lion(model.parameters(), {}))


# zero-grad-fill -----------------------------------------------------------------------------------

_ADDS = {"gradient-accumulation": "what is filled with zeros is then added to"}


def _filling(
    context: Context, model: nn.Module, clear: Callable[[torch.optim.Optimizer], None]
) -> Built:
    optimizer = adamw(context, model)
    data = context.randn(context.pick(1024, 4), context.pick(8192, 64)).to(torch.bfloat16)

    def step() -> None:
        clear(optimizer)
        model(data).square().mean().backward()
        optimizer.step()

    return Built([(model, "")], step)


@plant("zero-grad-fill", OPTIMIZER, _ADDS)
def zeros_wide(context: Context) -> Built:
    """zero_grad(set_to_none=False) on large weights."""
    return _filling(context, wide(context), lambda o: o.zero_grad(set_to_none=False))


@plant("zero-grad-fill", None, _ADDS)
def zeros_by_model_wide(context: Context) -> Built:
    """The module's zero_grad(set_to_none=False)."""
    model = wide(context, depth=8)
    return _filling(context, model, lambda _: model.zero_grad(set_to_none=False))


@plant("zero-grad-fill", None, _ADDS)
def zeros_by_hand_wide(context: Context) -> Built:
    """Gradients zeroed in a loop of one's own."""
    model = wide(context, depth=4)

    def clear(_: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    return _filling(context, model, clear)


@plant("zero-grad-fill", OPTIMIZER, {**_ADDS, "dense-embedding-gradient": "its table is large"})
def zeros_recommender(context: Context) -> Built:
    """zero_grad(set_to_none=False) on a table of ten million rows."""
    model = recommender(context, users=10_000_000)
    optimizer = adamw(context, model)
    loss, forward = forward_recommender(context, model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        forward().backward()
        optimizer.step()

    return Built([(model, ""), (loss, "loss")], step)


# recompute ----------------------------------------------------------------------------------------


@plant("recompute", ["blocks.*", "blocks.*.inner.*", "blocks.*.inner"])
def recompute_vit(context: Context) -> Built:
    """Every block checkpointed, on a GPU with room to spare."""
    model = vit(context)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Checkpointed(block)
    return train_vit(context, model)


@plant("recompute", ["layer1", "layer1.*", "layer2", "layer2.*"])
def recompute_reentrant_resnet(context: Context) -> Built:
    """Two layers checkpointed, the reentrant way."""
    model = resnet(context)
    model.layer1 = Checkpointed(model.layer1, reentrant=True)
    model.layer2 = Checkpointed(model.layer2, reentrant=True)
    return train_resnet(context, model)


@plant("recompute", ["h.1", "h.1.*", "h.2", "h.2.*"])
def recompute_middle_gpt(context: Context) -> Built:
    """Two blocks of four checkpointed."""
    model = gpt(context)
    for index in (1, min(2, len(model.h) - 1)):
        model.h[index] = Checkpointed(model.h[index])
    return train_gpt(context, model)


@plant("recompute", ["down.0", "down.0.*", "down", "down.*"])
def recompute_sequential_unet(context: Context) -> Built:
    """checkpoint_sequential over the first layers."""

    class Parts(nn.Module):
        def __init__(self, inner: nn.Sequential) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.inner, 2, x, use_reentrant=False)

    model = unet(context)
    for index in range(2):
        model.down[index] = Parts(model.down[index])
    return train_unet(context, model)


@plant("recompute", ["tower", "tower.*"])
def recompute_tower_recommender(context: Context) -> Built:
    """The tower checkpointed."""
    model = recommender(context)
    model.tower = Checkpointed(model.tower)
    return train_recommender(context, model)
