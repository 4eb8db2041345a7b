"""What Backspot leans on in PyTorch, each private part looked for and replaceable.

The gates are asked on every module call, so they are bound here once and called without a look-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch.autograd import profiler as _profiler
from torch.profiler import record_function

__all__ = [
    "PassedOver",
    "add_metadata",
    "carrier_of",
    "emit",
    "ignore_torch_function",
    "is_call",
    "is_dynamo_compiling",
    "keep_from_dynamo",
    "labelling",
    "new_range",
    "pop_node_hook",
    "push_node_hook",
    "recording",
    "sequence_number",
    "torch_function_mode_enabled",
]

# Dynamo knows it by identity and folds it to True while it traces; else a plain ``return False``.
is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling

_module_file: str = sys.modules[torch.nn.Module.__module__].__file__ or ""


def is_call(code: CodeType) -> bool:
    """Whether this is the code of a module call, by whose frames running calls are told from stale.

    Asked by name, for others replace ``Module._call_impl`` by wrappers of theirs.
    """
    return code.co_name == "_call_impl" and code.co_filename == _module_file


def _find(*path: str) -> Any:
    found = torch
    for name in path:
        found = getattr(found, name, None)
        if found is None:
            return None
    return found


def _no() -> bool:
    return False


# PyTorch's own gate says no on all threads where all are profiled (``profile_all_threads``). Its
# Python flag is the process's: on a thread that takes no part, a label is then written for nothing.
_enabled_here: Callable[[], bool] = _find("autograd", "_profiler_enabled") or _no
_profiling: Any = (
    _profiler
    if hasattr(_profiler, "_is_profiler_enabled")
    else SimpleNamespace(_is_profiler_enabled=False)
)


def recording() -> bool:
    """Whether a profiler records: on this thread, or on every one."""
    return _profiling._is_profiler_enabled or _enabled_here()  # the flag first: it costs no call


# The number that this thread's next autograd node gets; -1 where PyTorch does not tell.
sequence_number: Callable[[], int] = _find("_C", "_autograd", "_get_sequence_nr") or (lambda: -1)

# From torch 2.14 on autograd calls back for each node that a thread makes; None before.
push_node_hook: Callable[[Any], None] | None = _find("_C", "_autograd", "_push_node_creation_hook")
pop_node_hook: Callable[[], None] = _find("_C", "_autograd", "_pop_node_creation_hook") or (
    lambda: None
)

_add_metadata = _find("autograd", "_add_metadata_json")
_profiler_type = _find("_C", "_autograd", "_profiler_type")


def add_metadata(key: str, value: str) -> None:
    """Put JSON under a key of the trace that is being recorded."""
    if _add_metadata is None:
        return
    # The kinds that write no trace (NVTX, ITT) would complain.
    if _profiler_type is None or "KINETO" in _profiler_type().name:
        _add_metadata(key, value)


torch_function_mode_enabled: Callable[[], bool] = (
    _find("_C", "_is_torch_function_mode_enabled") or _no
)
# A context without ``__torch_function__``: the user's need not hear that ``.grad_fn`` is read.
ignore_torch_function: Callable[[], Any] = torch._C.DisableTorchFunction

# Which of ``torch.func.grad``, ``vmap`` and their like is at work on this thread, or None.
_transform: Callable[[], Any] = _find("_C", "_functorch", "peek_interpreter_stack") or (
    lambda: None
)

# ``is_compiling()`` returns its flag, and asks another function first.
_compiler: Any = (
    torch.compiler
    if hasattr(torch.compiler, "_is_compiling_flag")
    else SimpleNamespace(_is_compiling_flag=False)
)


def labelling() -> bool:
    """Whether a profiler records, and tensors are what they seem to be.

    They are not under non-strict export and in ``torch.func``'s transforms.
    """
    return (
        (_profiling._is_profiler_enabled or _enabled_here())  # recording(), without the call
        and not _compiler._is_compiling_flag
        and (_transform() is None or _pass_over())
    )


class PassedOver:
    """What a transform kept from being labelled.

    Attributes:
        calls: how many calls of modules.
    """

    calls = 0


def _pass_over() -> bool:
    PassedOver.calls += 1
    return False


# A range, which its ``__enter__`` opens and its ``__exit__`` closes. The fast kind costs a tenth of
# ``record_function`` and is all that a label needs.
new_range: Callable[[str], Any] = _find("_C", "_profiler", "_RecordFunctionFast") or record_function


def emit(label: str) -> None:
    """Write a marker: a range that is closed at once, so that nothing can be left open."""
    with new_range(label):
        pass


_by_dictionary = hasattr(_find("_C", "_FunctionBase"), "_register_hook_dict")
_dispatch_modes: Callable[[], int] = _find("_C", "_len_torch_dispatch_stack") or (lambda: 0)
_empty = torch.empty(0, device="cpu")


def carrier_of(hook: Callable[..., None]) -> Any:
    """A tensor that bears a hook, for ``node._register_hook_dict``; ``None`` if it has to wait.

    This is how ``Tensor.register_hook`` hooks a node: it hands over the tensor's dictionary, in C.
    ``Node.register_prehook`` makes a dictionary and a handle of its own for each node, in Python,
    at ten times the cost.
    """
    if not _by_dictionary or _dispatch_modes():  # a mode of the user's would hear of the tensor
        return None
    carrier: Any = _empty.data  # no operator, which the profiler would record
    carrier._backward_hooks = {0: hook}
    return carrier


def keep_from_dynamo(*functions: Any) -> None:
    """Have Dynamo run these frames as they are.

    On a compiled root it would compile a hook as a frame of its own, in which ``is_compiling()`` is
    true, and the label would vanish. Does not import ``torch._dynamo``, which takes seconds.
    """
    frames = _find("_C", "_dynamo", "eval_frame")
    strategy = getattr(frames, "set_code_exec_strategy", None)
    skip_code = getattr(frames, "skip_code", None)
    try:
        if strategy is not None:
            action = frames._FrameAction
            skip = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
            for function in functions:
                strategy(function.__code__, skip)
        elif skip_code is not None:
            for function in functions:
                skip_code(function.__code__)
    except Exception:  # noqa: S110 - a label less on a compiled root, and nothing worse
        pass
