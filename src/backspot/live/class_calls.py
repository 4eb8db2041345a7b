"""The wrapper around module calls, on the classes of modules instead of on ``torch.nn.Module``.

The guards of compiled code check ``torch.nn.Module.__call__`` where a layer calls
``super().__call__``. They do not check whether the class of a plain module has a ``__call__``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from types import CodeType
from typing import Any
from weakref import ref

import torch

from backspot.interrupts import contained
from backspot.live.hooks import Enter, Leave
from backspot.live.owner import Owner, Scope
from backspot.live.torch_internals import dynamo
from backspot.live.torch_internals.modules import (
    MODULE_CALL,
    NAMES_OF_CALLS,
    put_before,
    take_away,
)

_CALL = "__call__"


def passes_to_common(module: torch.nn.Module) -> bool:
    """Return whether a call of the module is one of ``torch.nn.Module.__call__`` and no more."""
    call: Any = type(module).__call__
    # The class of a graph module has a ``__call__`` of its own, which calls that of its base.
    return (
        call is MODULE_CALL.get() or call in _wrappers or isinstance(module, torch.fx.GraphModule)
    )


_wrappers: set[Any] = set()


def _reaches_common(cls: type) -> bool:
    """Return whether calls of a class with a ``__call__`` of its own get to PyTorch's.

    Only there are hooks called. A ``__call__`` that goes on names the next one, as in
    ``super().__call__``; what is not Python is not known, and taken for one that does.
    """
    for base in cls.__mro__:
        if base is torch.nn.Module:
            return True
        if _CALL in vars(base):
            call = vars(base)[_CALL]
            if not inspect.isfunction(call):
                return True
            if NAMES_OF_CALLS.isdisjoint(_names_in(inspect.unwrap(call).__code__)):
                return False
    return True


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a function and those inside of it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def put_hook(owner: Owner, module: torch.nn.Module) -> None:
    """Label calls of a module by a hook."""
    put_before(module, Enter(owner, Leave(owner)).__call__)


class ClassCalls:
    """The classes that have the wrapper, from the start of a profiler until it stops.

    Args:
        compiled: called with an instance of ``torch.compile(module)``, the original call and the
            arguments.
        own: likewise with an instance of a class whose own ``__call__`` calls no hooks.
    """

    def __init__(
        self,
        wrapper: Callable[..., Any],
        compiled: Callable[[torch.nn.Module, Callable[..., Any], Any, Any], Any],
        own: Callable[[torch.nn.Module, Callable[..., Any], Any, Any], Any],
    ) -> None:
        self._wrapper = wrapper
        self._compiled = compiled
        self._own = own
        self._ended = False
        self._owns: set[type] = set()
        self._calls: dict[type, tuple[Any, Callable[..., Any]]] = {}  # what was there, what is
        self._hooked: list[tuple[Owner, ref[torch.nn.Module]]] = []
        self._compilations = 0  # that are running
        _wrappers.add(wrapper)
        self._stop_loading = dynamo.when_dynamo_loads(self._put_compiled)
        self._stop_watching = dynamo.watch_compilations(self._step_aside, self._step_back)

    def put(self, module: torch.nn.Module) -> bool:
        """Have calls of a module and its class go through the wrapper; return whether they can."""
        is_graph = isinstance(module, torch.fx.GraphModule)
        cls = torch.fx.GraphModule if is_graph else type(module)
        if cls in self._calls:
            return True
        if cls is torch.nn.Module:
            return False
        if passes_to_common(module):
            self._put(cls, self._wrapper)
            return True
        if _reaches_common(cls) or cls in self._compiled_classes:
            return False
        self._put_own(cls)
        return True

    def has_own(self, cls: type) -> bool:
        """Return whether a class has a ``__call__`` of its own, which has a wrapper."""
        return cls in self._owns

    @cached_property
    def _compiled_classes(self) -> set[type]:
        """The classes of what is inside of compiled modules: guards check their ``__call__``."""
        return {
            type(module_inside)
            for module in dynamo.compiled_modules()
            for module_inside in module.modules()
        }

    def hook(self, owner: Owner, module: torch.nn.Module) -> None:
        """Put a hook on a module that cannot have the wrapper; the caller takes it away."""
        self._hooked.append((owner, ref(module)))
        if not self._compilations:
            put_hook(owner, module)

    def end(self) -> None:
        """Take the wrapper off; this can be repeated after an interrupt."""
        self._ended = True
        self._stop_watching()
        self._stop_loading()
        self._take()

    def inside(self, scope: Scope) -> set[int]:
        """Return the modules that may have no hooks, by ``id``, as guards check them.

        These are the modules inside compiled ones that have a ``__call__`` of their own.
        """
        if not dynamo.guards_check_hooks:
            return set()
        compiled = dynamo.compiled_modules()
        inside = {id(module_inside) for module in compiled for module_inside in module.modules()}
        for _, module in scope.live_modules():
            if dynamo.compiles_itself(module):
                inside |= {
                    id(module_inside)
                    for module_inside in module.modules()
                    if module_inside is not module
                }
        return {
            id(module)
            for _, module in scope.live_modules()
            if id(module) in inside and not passes_to_common(module)
        }

    def _put(self, cls: type, call: Callable[..., Any]) -> None:
        if cls not in self._calls:
            self._calls[cls] = vars(cls).get(_CALL), call
            if not self._compilations:
                setattr(cls, _CALL, call)

    def _take(self) -> None:
        for cls, (before, call) in self._calls.items():
            if vars(cls).get(_CALL) is not call:
                continue
            if before is None:
                delattr(cls, _CALL)
            else:
                setattr(cls, _CALL, before)

    def _put_own(self, cls: type) -> None:
        original, own = getattr(cls, _CALL), self._own
        self._owns.add(cls)

        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if type(self) is not cls:  # a class that inherits from it has a wrapper of its own
                return original(self, *args, **kwargs)
            return own(self, original, args, kwargs)

        self._put_new(cls, call)

    def _put_compiled(self) -> None:
        cls = dynamo.compiled_class()
        if cls is None:
            return
        original, compiled = getattr(cls, _CALL, MODULE_CALL.get()), self._compiled

        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return compiled(self, original, args, kwargs)

        self._put_new(cls, call)

    def _put_new(self, cls: type, call: Callable[..., Any]) -> None:
        """Put on a class a function that was made for it."""
        call.__name__ = _CALL  # by which pickle finds a bound method
        dynamo.keep_from_dynamo(call)
        self._put(cls, call)

    def _step_aside(self, *_: object) -> None:
        """Leave module calls to PyTorch: Dynamo is about to trace some."""
        self._compilations += 1
        with contained():  # at worst the code is compiled once more
            self._take()
            # Where guards check hooks, the next profile needs what is compiled with them.
            for _owner, reference in () if dynamo.guards_check_hooks else self._hooked:
                if (module := reference()) is not None:
                    take_away(module, keep_after=True)  # the call can be running

    def _step_back(self, *_: object) -> None:
        self._compilations -= 1
        if self._compilations > 0 or self._ended:
            return
        with contained():  # at worst some calls have no label
            for cls, (before, call) in self._calls.items():
                if vars(cls).get(_CALL) is before:
                    setattr(cls, _CALL, call)
            for owner, reference in self._hooked:
                if owner.scope.active and (module := reference()) is not None:
                    put_hook(owner, module)
