"""A case: a training step, and what is planted in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import backspot
from benchmarks.models import Context, training_step

OPTIMIZER, DATA = ("(optimizer)",), ("(data)",)


@dataclass
class Built:
    """A case ready to run.

    Attributes:
        modules: what to instrument, with names.
        step: one training step.
        close: called when the case is over (stops a loader's workers, say).
    """

    modules: list[tuple[nn.Module, str]]
    step: Callable[[], None]
    close: Callable[[], None] = lambda: None


Build = Callable[[Context], Built]


@dataclass(frozen=True)
class Case:
    """A cause, or the same thing well done.

    Attributes:
        build: makes it.
        about: its first line of documentation.
        rule: the rule that must find it; of a control, the one that must not.
        planted: whether it is a cause; else it is a control.
        at: patterns of paths (``blocks.*.attn``), one of which the finding's first place must
            match; ``None`` where any place is right.
        also: other rules that fire here for a reason, each with the reason.
        gpus: how many it needs; 0 for a cause that steps without a GPU have.
        ranks: processes that train together.
    """

    build: Build
    about: str
    rule: str = ""
    planted: bool = False
    at: tuple[str, ...] | None = None
    also: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    ranks: int = 1


CASES: dict[str, Case] = {}
"""The planted causes and their controls, by name."""


def plant(
    rule: str,
    at: Sequence[str] | None,
    also: Mapping[str, str] | None = None,
    *,
    gpus: int = 1,
    ranks: int = 1,
) -> Callable[[Build], Build]:
    """Register a cause that ``rule`` must find at one of the paths ``at``."""
    places = None if at is None else tuple(at)
    return _register(rule=rule, planted=True, at=places, also=also or {}, gpus=gpus, ranks=ranks)


def control(
    rule: str, also: Mapping[str, str] | None = None, *, gpus: int = 1, ranks: int = 1
) -> Callable[[Build], Build]:
    """Register the same thing well done: ``rule`` must not fire."""
    return _register(rule=rule, also=also or {}, gpus=gpus, ranks=ranks)


def _register(**facts: Any) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        name = build.__name__
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Case(build, (build.__doc__ or "").strip().partition("\n")[0], **facts)
        return build

    return register


def settings() -> None:
    """PyTorch's defaults, whatever the case before has changed."""
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)


def prepare(device: str) -> None:
    """Take one thread on a CPU; on a GPU, do now what the first profile of a process takes.

    Else it would take that beside the turns of other processes.
    """
    if device == "cpu":
        torch.set_num_threads(1)
        return
    tiny, ones = nn.Linear(8, 8, device=device), torch.ones(8, 8, device=device)
    step = lambda: tiny(ones).sum().backward()  # noqa: E731
    backspot.profile(step, tiny, steps=1, warmup=1, unprofiled=0, trials="none")


def adamw(context: Context, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer as it should be."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=context.device != "cpu")


def pinned(context: Context, tensor: torch.Tensor) -> torch.Tensor:
    """On the host, in memory from which a copy need not wait."""
    tensor = tensor.cpu()
    return tensor if context.device == "cpu" else tensor.pin_memory()


def built(
    context: Context,
    model: nn.Module,
    forward: Callable[[], torch.Tensor],
    *,
    loss: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: bool = False,
    close: Callable[[], None] = lambda: None,
) -> Built:
    """A step as it should be: gradients dropped, not zeroed; the fused optimizer.

    Args:
        context: where it runs.
        model: what to instrument.
        forward: computes the loss.
        loss: a module that ``forward`` calls, instrumented as ``loss``.
        optimizer: another than AdamW, fused.
        autocast: run ``forward`` under bf16 autocast.
        close: see ``Built``.
    """
    optimizer = optimizer or adamw(context, model)
    step = training_step(model, forward, optimizer, around=lambda: context.bf16(autocast))
    named = [(model, "")] + ([(loss, "loss")] if loss is not None else [])
    return Built(named, step, close)
