"""A planted cause: a training step, the fault in it, and the place of the fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.models import Context, training_step

__all__ = [
    "CASES",
    "DATA",
    "OPTIMIZER",
    "Built",
    "Case",
    "Context",
    "adamw",
    "built",
    "control",
    "pinned",
    "plant",
    "settings",
]

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
    close: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Case:
    """A cause, or the same thing well done.

    Attributes:
        name: the function's name.
        about: its first line of documentation.
        rule: the rule that must find it; of a control, the one that must not.
        planted: whether it is a cause; else it is a control.
        at: patterns of paths (``blocks.*.attn``), one of which the finding's first place must
            match; ``None`` where any place is right.
        also: other rules that fire here for a reason, each with the reason.
        gpus: how many it needs; 0 for a cause that steps without a GPU have.
        ranks: processes that train together.
        build: makes it.
        steps: how many steps its trace holds.
    """

    name: str
    about: str
    rule: str
    planted: bool
    at: tuple[str, ...] | None
    also: Mapping[str, str]
    gpus: int
    ranks: int
    build: Callable[[Context], Built]
    steps: int = 2


CASES: dict[str, Case] = {}
_Build = Callable[[Context], Built]


def plant(
    rule: str,
    at: Sequence[str] | None,
    also: Mapping[str, str] | None = None,
    *,
    gpus: int = 1,
    ranks: int = 1,
) -> Callable[[_Build], _Build]:
    """Register a cause that ``rule`` must find at one of the paths ``at``."""
    return _register(rule, True, None if at is None else tuple(at), also, gpus, ranks)


def control(
    rule: str, also: Mapping[str, str] | None = None, *, gpus: int = 1, ranks: int = 1
) -> Callable[[_Build], _Build]:
    """Register the same thing well done: ``rule`` must not fire."""
    return _register(rule, False, None, also, gpus, ranks)


def _register(
    rule: str,
    planted: bool,
    at: tuple[str, ...] | None,
    also: Mapping[str, str] | None,
    gpus: int,
    ranks: int,
) -> Callable[[_Build], _Build]:
    def register(build: _Build) -> _Build:
        name = build.__name__
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        about = (build.__doc__ or "").strip().splitlines()[0]
        CASES[name] = Case(name, about, rule, planted, at, dict(also or {}), gpus, ranks, build)
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
