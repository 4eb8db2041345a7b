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

from backspot.labels import Kind, Label, format_label
from backspot.live import gates
from backspot.live.owners import Scope
from backspot.live.walking import class_name, find_modules

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
            if model is None:
                continue
            modules = list(find_modules(model))
            # An optimizer may hold copies of its own (of another precision): that tells nothing.
            if not any(id(p) in held for _, m, _ in modules for p in m._parameters.values()):
                continue
            for path, module, _ in modules:
                path = ".".join(part for part in (scope.name, path) if part)
                if path in scope.paths and any(
                    p is not None and p.grad is not None and id(p) not in held
                    for p in module._parameters.values()
                ):
                    gates.emit(format_label(Label(Kind.UNUSED, path, class_name(module))))
