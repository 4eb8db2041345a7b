"""Which parameters no optimizer updates: their gradients are computed for nothing.

A trace does not tell which parameters an optimizer holds. So after each step that a profiler
records, modules whose parameters have gradients and stand in no optimizer that took a step get a
label. So do modules whose gradients are gone by the time that their optimizer takes its step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import optimizer as _optimizer

from backspot.live import torch_internals
from backspot.live.owner import Scope

__all__ = ["OptimizerWatch"]


class OptimizerWatch:
    """Sees every optimizer of the process take its steps.

    Args:
        scopes: gives the instrumentations at work.
    """

    def __init__(self, scopes: Callable[[], list[Scope]]) -> None:
        self._scopes = scopes
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handle: Any = None

    def start(self) -> None:
        """Begin to watch."""
        register = getattr(_optimizer, "register_optimizer_step_post_hook", None)
        if register is not None and self._handle is None:
            self._handle = register(self._after_step)

    def stop(self) -> None:
        """End it, and forget the optimizers seen."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._known.clear()

    def _after_step(self, optimizer: Any, *_: object) -> None:
        if torch_internals.is_dynamo_compiling():
            return
        try:
            self._known.add(optimizer)
            if torch_internals.recording():
                self._label_unused(optimizer)
        except Exception:
            return  # a label is never worth a failed step

    def _label_unused(self, stepped: Any) -> None:
        mine = {id(p) for group in stepped.param_groups for p in group["params"]}
        held = {
            id(parameter)
            for optimizer in self._known
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for scope in self._scopes():
            model = scope.model()
            # An optimizer may hold copies of its own (of another precision): that tells nothing.
            if model is None or not any(id(p) in held for p in model.parameters()):
                continue
            # Asked for anew after each step: parameters come and go and are frozen.
            for owner, module in scope.live_modules():
                if _is_unused(module, held, mine):
                    torch_internals.emit(owner.unused)


def _is_unused(module: Any, held: set[int], mine: set[int]) -> bool:
    """Whether a gradient of the module's own goes nowhere.

    It has one that no optimizer holds; or none is left of those that the optimizer just asked for,
    which tells something only where the trace shows that they were computed.
    """
    parameters = [p for p in module._parameters.values() if p is not None]
    if any(p.grad is not None and id(p) not in held for p in parameters):
        return True
    asked = [p for p in parameters if id(p) in mine and p.requires_grad]
    return bool(asked) and all(p.grad is None for p in asked)
