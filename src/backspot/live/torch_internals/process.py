"""What PyTorch keeps for the process or a thread: hooks on all modules and optimizers, modes.

And what is private by its place alone: the functions for nested lists and dictionaries.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from types import FrameType
from typing import Any

from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten, tree_map

from backspot.live.torch_internals.lookup import find

__all__ = [
    "GLOBAL_HOOKS", "dispatch_modes", "hooks_of", "innermost_mode", "is_observed", "is_rescheduled",
    "sleep_on_gpu", "tree_flatten", "tree_map", "version_of",
]  # fmt: skip

# Has the current GPU do nothing for so many cycles, so that the host gets ahead of it. Without it a
# trial on a GPU also measures the launches.
sleep_on_gpu: Callable[[int], None] = find("cuda", "_sleep") or (lambda _: None)

# Hooks that run with every module and every optimizer of the process. A trial takes them out, as
# they would count its steps and see its copies. A dictionary that is missing stays as it is.
_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"),
    *("_global_backward_pre_hooks", "_global_module_registration_hooks"),
    *("_global_parameter_registration_hooks", "_global_buffer_registration_hooks"),
)
_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

GLOBAL_HOOKS: tuple[MutableMapping[Any, Any], ...] = tuple(
    found
    for home, names in ((_module, _HOOKS), (_optimizer, _OPTIMIZER_HOOKS))
    for name in names
    if isinstance(found := getattr(home, name, None), dict)
)

_OPTIMIZER_FILE = _optimizer.__file__
_PATIENCE_S = 0.2  # for another thread's optimizer to end its step

_HOOKS_OF_A_MODULE = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)


def hook_steps(hook: Callable[..., None]) -> Callable[[], None]:
    """Have a hook called after each step of any optimizer; return what removes it.

    PyTorch goes through these hooks without a lock: a thread that does so while another adds or
    removes one fails with an error. So both wait until no other thread is in an optimizer.
    """
    return _hooked(_optimizer.register_optimizer_step_post_hook, hook)


def hook_step_begins(hook: Callable[..., None]) -> Callable[[], None]:
    """Have a hook called before each step of any optimizer, as ``hook_steps`` does after it."""
    return _hooked(_optimizer.register_optimizer_step_pre_hook, hook)


def _hooked(register: Callable[..., Any], hook: Callable[..., None]) -> Callable[[], None]:
    _wait_for_steps()
    handle = register(hook)

    def remove() -> None:
        _wait_for_steps()
        handle.remove()

    return remove


def _wait_for_steps() -> None:
    until = time.monotonic() + _PATIENCE_S
    while _others_step() and time.monotonic() < until:
        time.sleep(0.0002)


def _others_step() -> bool:
    """Return whether a thread other than this one is in an optimizer's step."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return any(map(outermost_step, frames.values()))


def outermost_step(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame of PyTorch's optimizers around a frame; ``None`` for none."""
    found = None
    while frame is not None:
        if frame.f_code.co_filename == _OPTIMIZER_FILE:
            found = frame
        frame = frame.f_back
    return found


def hooks_of(module: Any) -> tuple[dict[Any, Any], ...]:
    """Return the dictionaries of the hooks of one module."""
    return tuple(vars(module).get(name) or {} for name in _HOOKS_OF_A_MODULE)


def version_of(tensor: Any) -> int:
    """Return how often a tensor was written in place; 0 for one that does not count it."""
    try:
        return int(tensor._version)
    except RuntimeError:  # a tensor of inference mode
        return 0


def is_rescheduled(step: Any) -> bool:
    """Return whether an optimizer's ``step`` is PyTorch's own, which a scheduler counts."""
    return hasattr(step, "_wrapped_by_lr_sched")


# The modes that see functions of this thread, innermost last. PyTorch takes away the innermost one,
# whoever leaves. Without these names no mode counts as in use.
_number_of_modes: Callable[[], int] = find("_C", "_len_torch_function_stack") or (lambda: 0)
_mode_at: Callable[[int], Any] = find("_C", "_get_function_stack_at") or (lambda _: None)

# How many ``__torch_dispatch__`` modes are at work. Without it they see Backspot's operators too.
dispatch_modes: Callable[[], int] = find("_C", "_len_torch_dispatch_stack") or (lambda: 0)


def innermost_mode() -> Any:
    """Return the innermost mode that sees functions of this thread, or ``None``."""
    modes = _number_of_modes()
    return _mode_at(modes - 1) if modes else None


def is_observed() -> bool:
    """Return whether a mode of this thread sees what runs; the default device's does no harm."""
    modes = map(_mode_at, range(_number_of_modes()))
    return dispatch_modes() > 0 or not all(isinstance(mode, DeviceContext) for mode in modes)
