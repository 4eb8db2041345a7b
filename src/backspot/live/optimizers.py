"""Which parameters no optimizer updates: their gradients are computed for nothing.

A trace does not tell which parameters an optimizer holds. So after each step that a profiler
records, modules whose parameters have gradients and stand in no optimizer that took a step get a
label.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import optimizer as _optimizer

from backspot.live import gates
from backspot.live.owners import Scope

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

    def _after_step(self, optimizer: Any, *_: object) -> None:  # noqa: ANN401 - torch's optimizer
        if gates.is_compiling():
            return
        try:
            self._known.add(optimizer)
            if gates.recording():
                self._label_unused()
        except Exception:
            return  # a label is never worth a failed step

    def _label_unused(self) -> None:
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
                for parameter in module._parameters.values():
                    if (
                        id(parameter) not in held
                        and parameter is not None
                        and parameter.grad is not None
                    ):
                        gates.emit(owner.unused)
                        break
