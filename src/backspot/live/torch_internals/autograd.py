"""Tensors and autograd nodes, and what makes tensors other than they seem: modes, transforms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch

from backspot.live.torch_internals.lookup import Location, find, no, nothing
from backspot.live.torch_internals.process import dispatch_modes
from backspot.live.torch_internals.profiler import enabled_here, profiling

# The sequence number of the next node that this thread makes. -1 without it: no marker is written,
# and the report relies on the sequence numbers in the trace.
sequence_number: Callable[[], int] = find("_C", "_autograd", "_get_sequence_nr") or (lambda: -1)


def number_of(node: torch.autograd.graph.Node) -> int:
    """Return the sequence number of an autograd node."""
    return node._sequence_nr()  # type: ignore[no-any-return]  # each class of nodes has its own


# The engine's run that this thread is in, -1 outside. Without it forward code that checkpointing
# runs again is timed as forward.
_graph_task: Callable[[], int] = find("_C", "_current_graph_task_id") or (lambda: -1)


def hears_its_gradient(parameter: torch.Tensor) -> bool:
    """Return whether something is called once a parameter's gradient is there.

    Without the attribute none counts as such.
    """
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def in_backward() -> bool:
    """Return whether autograd's engine runs on this thread."""
    return _graph_task() >= 0


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call a function when the engine's run that this thread is in has ended without an error.

    Data parallelism ends its communication in the same way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(action)


# What the engine calls for the backward of a ``torch.autograd.Function``. Without these it is not
# seen that such a backward returns gradients that nobody reads.
FUNCTION_RUNS = tuple(
    Location(find("autograd", "function", "BackwardCFunction"), name)
    for name in ("apply", "apply_boxed")
)

# From torch 2.14 on autograd calls a hook with each node that a thread makes. None before: then the
# line of a node is the line that called the module.
push_node_hook: Callable[[Callable[..., None]], None] | None = find(
    "_C", "_autograd", "_push_node_creation_hook"
)
pop_node_hook: Callable[[], None] = find("_C", "_autograd", "_pop_node_creation_hook") or nothing

# How often a tensor's memory was changed in place, and whether the tensor is a view of another's
# memory: reading ``.grad_fn`` of a changed view can raise, or make a node.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view


def is_view_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another one, or both are views of the same."""
    return is_view(tensor) and (tensor._base is other or tensor._base is other._base)


# The classes of nodes that join tensors. Without them what is joined has no marker of its own.
JOINS: frozenset[type] = frozenset(
    cls
    for cls in (
        find("_C", "_functions", "CatBackward0"),
        find("_C", "_functions", "StackBackward0"),
    )
    if cls is not None
)

# Whether ``Node._register_hook_dict`` is there. Without it ``Node.register_prehook`` is used, which
# makes a dictionary and a handle for each node, in Python, at ten times the cost.
_takes_dictionaries = hasattr(find("_C", "_FunctionBase"), "_register_hook_dict")

_empty = torch.empty(0, device="cpu")


def node_hooker(hook: Callable[..., None]) -> Callable[[torch.autograd.graph.Node], None]:
    """Return a function that makes autograd call ``hook`` before a node.

    ``Tensor.register_hook`` hooks a node by handing over the dictionary of the tensor's hooks, in
    C. The function does the same: a tensor that it makes once carries the hook for all nodes.
    """
    carrier: Any = None

    def put(node: torch.autograd.graph.Node) -> None:
        nonlocal carrier
        if carrier is None:
            carrier = _carrier_of(hook)
            if carrier is None:
                node.register_prehook(hook)
                return
        node._register_hook_dict(carrier)

    return put


def _carrier_of(hook: Callable[..., None]) -> torch.Tensor | None:
    """Return a tensor that carries a hook; ``None`` if none can be made here."""
    if not _takes_dictionaries or dispatch_modes():  # a mode of the user's would see the tensor
        return None
    carrier: Any = _empty.data  # no operator, which the profiler would record
    carrier._backward_hooks = {0: hook}
    return carrier


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
    """How many module calls were not labelled because of a transform, in this process so far."""

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
