"""Markers on boundary nodes: the ``grad_fn`` of what goes into a module call and what comes out.

The autograd graph stays as it is. Reading ``.grad_fn`` is not always harmless: on a view whose base
was changed in place afterwards it raises, or builds a node. PyTorch does not tell whether a view is
older than the last change, so every view of changed memory is left alone, and counted.
"""

from __future__ import annotations

from typing import Any

import torch

from backspot.live import torch_internals
from backspot.live.calls import Thread
from backspot.live.owner import Owner

__all__ = ["mark_nodes", "mark_output"]

_KEY = "backspot"  # in node.metadata: this node was looked at
_DEPTH = 6  # how deep containers are looked into
_JOINS = frozenset({"CatBackward0", "StackBackward0"})
_VISITS = 256  # how many things are looked at in one call's inputs or outputs

_Tensor = torch.Tensor
_mode_enabled = torch_internals.torch_function_mode_enabled


def mark_nodes(thread: Thread, caller: Owner, values: tuple[Any, ...], following: int) -> None:
    """Give each tensor's node the marker of the module that made it.

    Args:
        thread: the calling thread.
        caller: whose call the values go into or come out of.
        values: tensors, or what holds them; anything else is ignored.
        following: the number of the thread's next node.
    """
    if _mode_enabled():
        with torch_internals.ignore_torch_function():
            _mark_all(thread, caller, values, following)
    else:
        _mark_all(thread, caller, values, following)


def mark_output(thread: Thread, caller: Owner, output: Any, following: int) -> None:
    """The same for what a call returns, which is one tensor most often."""
    if type(output) is _Tensor and not _mode_enabled():
        _mark(thread, caller, output, following)
    else:
        mark_nodes(thread, caller, (output,), following)


def _mark_all(thread: Thread, caller: Owner, values: tuple[Any, ...], following: int) -> None:
    for value in values:
        kind = type(value)
        if kind is _Tensor:
            _mark(thread, caller, value, following)
        elif value is not None and kind not in _PLAIN:
            for tensor in _tensors_in(value):
                try:
                    if type(tensor) is _Tensor:
                        _mark(thread, caller, tensor, following)
                    else:
                        with torch_internals.ignore_torch_function():
                            _mark(thread, caller, tensor, following)
                except Exception:  # noqa: S112 - a subclass may refuse anything
                    continue


def _mark(thread: Thread, caller: Owner, tensor: Any, following: int) -> None:
    thread.seen_id = id(tensor)
    thread.seen_at = following
    node = None
    if not (tensor._version and tensor._is_view()):
        try:
            node = tensor.grad_fn
        except RuntimeError:
            pass
        else:
            if node is None:  # a leaf, or without gradient
                return
    if node is None:
        if not tensor.requires_grad:
            return
        if id(tensor) not in thread.unmarked:
            thread.unmarked.add(id(tensor))
            torch_internals.emit(caller.unmarked)
        return
    metadata = node.metadata
    if _KEY in metadata:  # most inputs: they are the output of the call before
        return
    # Kept also where the owner can't be told, lest another thread, on which the number means
    # something else, takes the node for its own later on.
    metadata[_KEY] = True
    owner = thread.owner_of(node._sequence_nr(), following)
    if owner is None:
        return
    owner.hook(node)
    if type(node).__name__ in _JOINS:
        # The work lies in what was joined: there, too, people look for the module's name.
        for joined, _ in node.next_functions:
            if joined is not None and thread.owner_of(joined._sequence_nr(), following) is owner:
                metadata = joined.metadata
                if _KEY not in metadata:
                    metadata[_KEY] = True
                    owner.hook(joined)


# Not worth a look: they hold no tensor, or a leaf.
_PLAIN = frozenset(
    {int, float, bool, str, bytes, torch.Size, torch.dtype, torch.device, torch.nn.Parameter}
)


def _tensors_in(value: Any) -> list[Any]:
    """The tensors in nested tuples, lists, dicts (``ModelOutput`` too) and dataclasses."""
    found: list[Any] = []
    visits = _VISITS
    level = [value]
    for _ in range(_DEPTH):
        deeper: list[Any] = []
        for item in level:
            visits -= 1
            if visits < 0:
                return found
            if isinstance(item, _Tensor):
                found.append(item)
            # The base classes' own iterators: a subclass may compute, or complain, in its own.
            elif isinstance(item, tuple):
                deeper.extend(tuple.__iter__(item))
            elif isinstance(item, list):
                deeper.extend(list.__iter__(item))
            elif isinstance(item, dict):
                deeper.extend(dict.values(item))
            elif not isinstance(item, type):
                fields = getattr(type(item), "__dataclass_fields__", None)
                if fields:
                    held = getattr(item, "__dict__", None)
                    deeper.extend(
                        held.get(name) if held is not None else getattr(item, name, None)
                        for name in fields
                    )
        if not deeper:
            break
        level = deeper
    return found
