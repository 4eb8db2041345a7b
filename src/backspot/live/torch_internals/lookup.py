"""Parts of PyTorch that may not be there."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Place", "find", "no", "nothing"]


def find(*path: str) -> Any:
    """Return the part of torch at this path, ``None`` if there is none."""
    found = torch
    for name in path:
        found = getattr(found, name, None)
        if found is None:
            return None
    return found


def no() -> bool:
    """Stand in for a missing question."""
    return False


def nothing() -> None:
    """Stand in for a missing function that would do or return something."""
    return


class Place:
    """An attribute of a module or class of PyTorch that Backspot replaces for a while.

    Args:
        holder: the module or class; ``None`` if this PyTorch has none.
        name: the attribute, which need not exist.
    """

    def __init__(self, holder: Any, name: str) -> None:
        self._holder = holder
        self._name = name

    def exists(self) -> bool:
        """Return whether PyTorch has the attribute."""
        return self.get() is not None

    def get(self) -> Any:
        """Return the attribute; ``None`` if there is none."""
        return getattr(self._holder, self._name, None)

    def set(self, value: Any) -> None:
        """Replace the attribute."""
        setattr(self._holder, self._name, value)
