"""What makes tensors other than they seem: export, the transforms of ``torch.func`` and modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from backspot.live.torch_internals.lookup import find, no, nothing
from backspot.live.torch_internals.profiler import enabled_here, profiling

__all__ = [
    "PassedOver",
    "exporting",
    "ignore_torch_function",
    "innermost_transform",
    "labelling",
    "pass_over",
    "torch_function_mode_enabled",
]

# The flag that the public ``is_compiling()`` returns after it has called another function. Without
# it non-strict export is labelled.
_compiler: Any = (
    torch.compiler
    if hasattr(torch.compiler, "_is_compiling_flag")
    else SimpleNamespace(_is_compiling_flag=False)
)

# The innermost of ``torch.func.grad``, ``vmap`` and the like that is at work on this thread, or
# None. Without it their calls are labelled, with owners that can be wrong.
innermost_transform: Callable[[], Any] = (
    find("_C", "_functorch", "peek_interpreter_stack") or nothing
)


def labelling() -> bool:
    """Return whether a profiler records and tensors are what they seem to be.

    They are not during non-strict export and in the transforms of ``torch.func``.
    """
    return (
        (profiling._is_profiler_enabled or enabled_here())  # recording(), without the call
        and not _compiler._is_compiling_flag
        and (innermost_transform() is None or pass_over())
    )


class PassedOver:
    """What was not labelled because of a transform.

    Attributes:
        calls: how many module calls, in this process so far.
    """

    calls = 0


def pass_over() -> bool:
    """Count a call that is not labelled because of a transform; return False."""
    PassedOver.calls += 1
    return False


def exporting() -> bool:
    """Return whether non-strict export is at work."""
    return bool(_compiler._is_compiling_flag)


# Whether a ``__torch_function__`` mode of the user's is at work. Without it the mode sees that
# Backspot reads ``.grad_fn``.
torch_function_mode_enabled: Callable[[], bool] = (
    find("_C", "_is_torch_function_mode_enabled") or no
)

# A context in which no ``__torch_function__`` runs: a user's mode or tensor subclass does not see
# that Backspot reads ``.grad_fn``. Public only by name; every supported version has it.
ignore_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
