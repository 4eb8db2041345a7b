"""Markers on boundary nodes: the ``grad_fn`` of the inputs and outputs of module calls.

The autograd graph stays as it is. Reading ``.grad_fn`` is not always safe: on a view of memory that
was changed in place later it raises, or builds a node. PyTorch has no way to ask whether a view is
older than the last change, so every view of changed memory gets no marker, and is counted.
"""

from __future__ import annotations

from typing import Any

import torch

from backspot.interrupts import pass_on
from backspot.live.calls import Thread
from backspot.live.owner import Owner
from backspot.live.torch_internals import autograd, profiler

_KEY = "backspot"  # in node.metadata: this node was checked
_DEPTH = 6  # levels of nested containers that are searched
_VISITS = 256  # objects that are searched in one call's inputs or outputs

_Tensor = torch.Tensor
_mode_enabled = autograd.torch_function_mode_enabled
_version_of, _is_view = autograd.version_of, autograd.is_view
_number_of, _JOINS = autograd.number_of, autograd.JOINS


def mark_inputs(
    thread: Thread,
    caller: Owner,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    following: int,
) -> None:
    """Give the node of each tensor that enters a call the marker of the module that made the node.

    Args:
        args: tensors, or containers of tensors; anything else is ignored.
        following: the sequence number of the thread's next node.
    """
    # Usually the input is the output of the call before, which was just looked at.
    if thread.seen_at != following or len(args) != 1 or thread.seen_id != id(args[0]):
        _mark_nodes(thread, caller, args, following)
    if kwargs:
        _mark_nodes(thread, caller, tuple(kwargs.values()), following)


def mark_output(thread: Thread, caller: Owner, output: Any, following: int) -> None:
    """Do the same for what a call returns, which usually is one tensor."""
    if thread.seen_at == following and thread.seen_id == id(output):
        return
    if type(output) is _Tensor and not _mode_enabled():
        _mark(thread, caller, output, following)
    else:
        _mark_nodes(thread, caller, (output,), following)


def _mark_nodes(thread: Thread, caller: Owner, values: tuple[Any, ...], following: int) -> None:
    if _mode_enabled():
        with autograd.ignore_torch_function():
            _mark_all(thread, caller, values, following)
    else:
        _mark_all(thread, caller, values, following)


def _mark_all(thread: Thread, caller: Owner, values: tuple[Any, ...], following: int) -> None:
    for value in values:
        kind = type(value)
        if kind is _Tensor:
            _mark(thread, caller, value, following)
        elif value is not None and kind not in _PLAIN:
            for tensor in tensors_in(value):
                try:
                    if type(tensor) is _Tensor:
                        _mark(thread, caller, tensor, following)
                    else:
                        with autograd.ignore_torch_function():
                            _mark(thread, caller, tensor, following)
                except Exception as error:  # a subclass may refuse anything
                    pass_on(error)


def _mark(thread: Thread, caller: Owner, tensor: torch.Tensor, following: int) -> None:
    thread.seen_id = id(tensor)
    thread.seen_at = following
    if _version_of(tensor) and _is_view(tensor):
        _count_unmarked(thread, caller, tensor)
        return
    try:
        node = tensor.grad_fn
    except RuntimeError:
        _count_unmarked(thread, caller, tensor)
        return
    if node is None:  # a leaf, or without gradient
        return
    metadata = node.metadata
    if _KEY in metadata:  # most inputs: they are the output of the call before
        return
    # Set even if the owner is unknown. Otherwise another thread, where the number means something
    # else, could later take the node for its own.
    metadata[_KEY] = True
    owner = thread.intervals.owner_of(_number_of(node), following)
    if owner is None:
        return
    hook = owner.hook
    hook(node)
    if type(node) in _JOINS:
        # The work is in what was joined, so readers look for the module's name there too.
        for joined, _ in node.next_functions:
            if (
                joined is not None
                and thread.intervals.owner_of(_number_of(joined), following) is owner
            ):
                metadata = joined.metadata
                if _KEY not in metadata:
                    metadata[_KEY] = True
                    hook(joined)


def _count_unmarked(thread: Thread, caller: Owner, tensor: torch.Tensor) -> None:
    if tensor.requires_grad and id(tensor) not in thread.unmarked:
        thread.unmarked.add(id(tensor))
        profiler.emit(caller.unmarked)


# Skipped, as they hold no tensor or are leaves.
_PLAIN = frozenset(
    {int, float, bool, str, bytes, torch.Size, torch.dtype, torch.device, torch.nn.Parameter}
)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists, dicts (``ModelOutput`` too) and dataclasses."""
    tensors: list[torch.Tensor] = []
    visits = _VISITS
    level = [value]
    for _ in range(_DEPTH):
        deeper: list[Any] = []
        for item in level:
            visits -= 1
            if visits < 0:
                return tensors
            if isinstance(item, _Tensor):
                tensors.append(item)
            # The iterators of the base classes: a subclass may compute or raise in its own.
            elif isinstance(item, tuple):
                deeper.extend(tuple.__iter__(item))
            elif isinstance(item, list):
                deeper.extend(list.__iter__(item))
            elif isinstance(item, dict):
                deeper.extend(dict.values(item))
            elif not isinstance(item, type):
                fields = getattr(type(item), "__dataclass_fields__", None)
                if fields:
                    attributes = getattr(item, "__dict__", None)
                    deeper.extend(
                        attributes.get(name)
                        if attributes is not None
                        else getattr(item, name, None)
                        for name in fields
                    )
        if not deeper:
            break
        level = deeper
    return tensors
