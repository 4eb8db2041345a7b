"""What PyTorch keeps for the process or a thread: hooks on all modules and optimizers, modes.

And what is private by its place alone: the functions for nested lists and dictionaries.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten, tree_map

from backspot.live.torch_internals.dynamo import is_dynamo_compiling, keep_from_dynamo
from backspot.live.torch_internals.lookup import Turn, find, nothing

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
_PATIENCE_S = 1.0  # for another thread's optimizer to end its step
_UNINTERRUPTED_S = 0.25  # for which this thread keeps the interpreter: a change takes far less

_HOOKS_OF_A_MODULE = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)


class _StepHook:
    """One hook of PyTorch's around all steps of optimizers, for several users.

    Dynamo compiles a step again whenever the number of such hooks changes.

    PyTorch goes through its hooks without a lock: a thread that does so while another adds or
    removes one fails with an error. So both wait until no other thread is in an optimizer. One that
    nobody uses stays if that never comes: it does nothing.
    """

    def __init__(self, register: Callable[..., Any]) -> None:
        self._register = register
        self._users: tuple[Callable[..., None], ...] = ()
        self._handle: Any = None
        self._changing = Turn()

    def __call__(self, optimizer: Any, *_: object) -> None:
        """Call the users. What Dynamo traces has nothing of it."""
        if is_dynamo_compiling():
            return
        for user in self._users:
            user(optimizer)

    def add(self, user: Callable[..., None]) -> Callable[[], None]:
        """Have a function called with each optimizer; return what removes it."""
        with self._changing:
            self._users = (*self._users, user)
            if self._handle is None:
                with _between_steps():
                    self._handle = self._register(self)

        def remove() -> None:
            with self._changing:
                self._users = tuple(other for other in self._users if other is not user)
                if not self._users and self._handle is not None:
                    with _between_steps() as is_between:
                        if is_between:
                            self._handle.remove()
                            self._handle = None

        return remove


_before_steps = _StepHook(_optimizer.register_optimizer_step_pre_hook)
_after_steps = _StepHook(_optimizer.register_optimizer_step_post_hook)
keep_from_dynamo(_StepHook.__call__, inside=True)


def hook_steps(hook: Callable[..., None]) -> Callable[[], None]:
    """Have a hook called after each step of any optimizer; return what removes it.

    It is not called for a step that is compiled as a whole.
    """
    return _after_steps.add(hook)


def hook_step_begins(hook: Callable[..., None]) -> Callable[[], None]:
    """Have a hook called before each step of any optimizer, as ``hook_steps`` does after it."""
    return _before_steps.add(hook)


@contextmanager
def _between_steps() -> Iterator[bool]:
    """Yield once no other thread is in an optimizer's step, and let none begin one meanwhile.

    Yields:
        Whether it is so. Else patience has ended.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(max(interval, _UNINTERRUPTED_S))
    try:
        until = time.monotonic() + _PATIENCE_S
        if len(sys._current_frames()) > 1:
            time.sleep(interval)  # who waits for the interpreter now waits for longer
        while is_busy := _others_step():
            if time.monotonic() > until:
                break
            time.sleep(0.0002)
        yield not is_busy
    finally:
        sys.setswitchinterval(interval)


def _others_step() -> bool:
    """Return whether a thread other than this one is in an optimizer's step."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return any(map(outermost_step, frames.values()))


def step_around(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of PyTorch's optimizers around a frame; ``None`` for none."""
    while frame is not None and frame.f_code.co_filename != _OPTIMIZER_FILE:
        frame = frame.f_back
    return frame


def outermost_step(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame of PyTorch's optimizers around a frame; ``None`` for none."""
    outermost = None
    while frame is not None:
        if frame.f_code.co_filename == _OPTIMIZER_FILE:
            outermost = frame
        frame = frame.f_back
    return outermost


def hooks_of(module: Any) -> tuple[dict[Any, Any], ...]:
    """Return the dictionaries of the hooks of one module, themselves."""
    all_hooks = (vars(module).get(name) for name in _HOOKS_OF_A_MODULE)
    return tuple(hooks for hooks in all_hooks if hooks is not None)


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

# The modes themselves, the outermost first. Without it no warning names them.
dispatch_mode_stack: Callable[[], list[Any]] = (
    find("utils", "_python_dispatch", "_get_current_dispatch_mode_stack") or list
)


def innermost_mode() -> Any:
    """Return the innermost mode that sees functions of this thread, or ``None``."""
    modes = _number_of_modes()
    return _mode_at(modes - 1) if modes else None


_take: Callable[[], Any] = find("_C", "_pop_torch_function_stack") or nothing
_put: Callable[[Any], Any] = find("_C", "_push_on_torch_function_stack") or (lambda _: None)


def take_mode_away(mode: Any) -> None:
    """Take a mode out of those of this thread, also where the program has entered another since."""
    modes = [_mode_at(place) for place in range(_number_of_modes())]
    if mode not in modes:
        return
    within = len(modes) - 1 - modes.index(mode)
    inner = [_take() for _ in range(within)]
    _take()
    for one in reversed(inner):
        _put(one)


def default_device_leaves_innermost() -> bool:
    """Return whether a default device that ends takes the innermost mode away, whichever it is.

    It has a place of its own since torch 2.6.
    """
    return not hasattr(DeviceContext("cpu"), "prev_mode")


def autocasts() -> int:
    """Return how many autocasts are around what this thread runs, also those that are off."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def is_observed() -> bool:
    """Return whether a mode of this thread sees what runs; the default device's does no harm."""
    modes = map(_mode_at, range(_number_of_modes()))
    return dispatch_modes() > 0 or not all(isinstance(mode, DeviceContext) for mode in modes)
