"""Modules: how they are called, their hooks, children and parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any

import torch

from backspot.live.torch_internals.lookup import Location

# What a call of any module runs, unless its class has a ``__call__`` of its own.
MODULE_CALL = Location(torch.nn.Module, "__call__")
# What a ``__call__`` of a class's own names where it goes on to that.
NAMES_OF_CALLS = frozenset(("__call__", "_call_impl", "_wrapped_call_impl"))

# Makes the copies of a module that data parallelism calls. Without it they have no label.
REPLICATE = Location(torch.nn.Module, "_replicate_for_data_parallel")


_globals: Any = sys.modules[torch.nn.Module.__module__]
_module_file: str = _globals.__file__ or ""


def only_chooses(call: Any) -> bool:
    """Return whether a ``__call__`` does nothing but call one of two attributes of the module.

    PyTorch's does: ``_compiled_call_impl``, which ``module.compile()`` sets, else ``_call_impl``.
    The wrapper can then call the attribute itself, which saves a frame.
    """
    code: Any = getattr(call, "__code__", None)
    names = getattr(code, "co_names", ())
    # Another tool's may name no more, and count its calls in a variable that it closes over.
    return names == ("_compiled_call_impl", "_call_impl") and code.co_filename == _module_file


def is_call(code: CodeType) -> bool:
    """Return whether this is the code of ``Module._call_impl``, which runs every module call.

    The stack is searched for its frames to tell running calls from stale ones. Compared by name, as
    libraries replace the method by wrappers. Without it any method of the module counts.
    """
    return code.co_name == "_call_impl" and code.co_filename == _module_file


# PyTorch would number each hook, and Dynamo's guards for a block check the numbers of the block's
# hooks. No block could then use the code that was compiled for an equal block, and a model compiled
# block by block would run into the recompile limit. One key also makes removal safe: whatever
# interrupts the registration, there is no handle to lose.
KEY = -0xBAC5

# A hook is registered after its flags and removed before them: PyTorch asks for the flags of the
# hooks that it finds.
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")

# The dictionary of a module's forward hooks, by key.
forward_hooks_of: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")


def put_before(module: torch.nn.Module, hook: Callable[..., None]) -> None:
    """Register a forward pre-hook that runs before all others of the module."""
    module._forward_pre_hooks_with_kwargs[KEY] = True
    module._forward_pre_hooks[KEY] = hook
    module._forward_pre_hooks.move_to_end(KEY, last=False)


def put_after(module: torch.nn.Module, hook: Callable[..., None]) -> None:
    """Register a forward hook that runs after all others of the module, even after an error."""
    module._forward_hooks_with_kwargs[KEY] = True
    module._forward_hooks_always_called[KEY] = True
    module._forward_hooks[KEY] = hook


def put_around_backward(
    module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> None:
    """Register a full backward pre-hook and a full backward hook."""
    module._backward_pre_hooks[KEY] = before
    module._is_full_backward_hook = True
    module._backward_hooks[KEY] = after


def take_away(
    module: torch.nn.Module, *, only_after: bool = False, keep_after: bool = False
) -> None:
    """Remove Backspot's hooks from a module; without any, do nothing.

    Args:
        keep_after: keep the forward hook, as PyTorch may be iterating over its dictionary.
    """
    after = () if keep_after else _AFTER
    for name in after if only_after else (*_BEFORE, *_BACKWARD, *after):
        getattr(module, name, {}).pop(KEY, None)


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has a hook of any kind."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def wraps_in_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether PyTorch puts nodes for full backward hooks around calls of a module."""
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or getattr(_globals, "_global_backward_hooks", None)
        or getattr(_globals, "_global_backward_pre_hooks", None)
    )


def full_backward_hooks_of(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return a module's own full backward hooks and pre-hooks."""
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def full_backward_flag(module: torch.nn.Module) -> bool | None:
    """Return the flag for backward hooks: True for full ones, False for old ones, or None.

    A module takes one of the two kinds. PyTorch never resets the flag.
    """
    return getattr(module, "_is_full_backward_hook", None)


def unset_full_backward_flag(module: torch.nn.Module) -> None:
    """Reset the flag of a module that has no backward hook left."""
    if not module._backward_hooks:
        module._is_full_backward_hook = None


def without_backward_flag(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a module, with the flag reset if only Backspot's hook set the flag."""
    hooks = state.get("_backward_hooks", ())
    return {**state, "_is_full_backward_hook": None} if list(hooks) == [KEY] else state


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the direct children of a module by name.

    Not by attribute: wrappers forward ``__getattr__`` to the module that they wrap.
    """
    children = vars(module).get("_modules")
    return children if isinstance(children, dict) else {}


def is_made(module: torch.nn.Module) -> bool:
    """Return whether ``Module.__init__`` has run; a thread may be about to call it."""
    return "_modules" in vars(module)


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a module's own parameters, without a method that a wrapper may override."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


# Wrappers by the name of a class among their base classes, so that none has to be imported, and the
# name of the child that they wrap. A wrapper that is not listed adds a part to each path.
WRAPPED_CHILD = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
