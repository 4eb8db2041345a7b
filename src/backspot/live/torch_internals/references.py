"""Weak references to tensors that do not keep a program from swapping what tensors hold.

``torch.utils.swap_tensors``, by which modules are converted and loaded if a program wants that,
refuses tensors that somebody refers to weakly.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from backspot.live.torch_internals.lookup import Location

# What the function asks for references. Without it a tensor that is referred to is not swapped, and
# the program gets an error.
_ASKED = Location(torch.utils, "weakref")

_swaps = 0


def swaps() -> int:
    """Return how often the program has asked whether a tensor can be swapped."""
    return _swaps


class TensorRef(WeakIdRef):  # type: ignore[misc] # untyped
    """A weak reference to a tensor; what it refers to may hold another tensor's numbers later."""

    def __init__(self, tensor: torch.Tensor, callback: Any = None) -> None:
        super().__init__(tensor, callback)
        if _ASKED.get() is weakref:
            _ASKED.set(_WithoutOurs())


class _WithoutOurs:
    """``weakref`` with the references of others alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    def getweakrefs(self, tensor: Any) -> list[Any]:
        global _swaps
        _swaps += 1
        return [
            reference
            for reference in weakref.getweakrefs(tensor)
            if not isinstance(reference, TensorRef)
        ]


def by_tensor() -> Any:
    """Return a dictionary whose keys are tensors, as long as these live."""
    return WeakIdKeyDictionary(ref_type=TensorRef)
