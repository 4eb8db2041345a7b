"""Find parts of PyTorch that may not be there, and replace some for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import torch


def find(*path: str) -> Any:
    """Return the part of torch at this path, ``None`` if there is none."""
    value = torch
    for name in path:
        value = getattr(value, name, None)
        if value is None:
            return None
    return value


def no() -> bool:
    """Stand in for a missing question."""
    return False


def nothing() -> None:
    """Stand in for a missing function that would do or return something."""
    return


class Location:
    """An attribute of a module or class of PyTorch that Backspot replaces for a while."""

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


class Wrapping:
    """A function of PyTorch that is wrapped for a while; also as a context manager.

    Args:
        wrap: returns what stands in the function's place, given the function.
    """

    def __init__(
        self, place: Location, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._place = place
        self._wrap = wrap
        self._original: Any = None
        self._wrapper: Any = None
        self._installed = False

    def begin(self) -> None:
        """Install the wrapper. Both this and ``end`` can be repeated after an interrupt."""
        current = self._place.get()
        if current is None or self._installed:
            return
        if current is not self._wrapper:
            wrapper = wraps(current)(self._wrap(current))
            self._original, self._wrapper = current, wrapper
            self._place.set(wrapper)
        self._installed = True

    def end(self) -> None:
        """Remove the wrapper. If other code has wrapped it since, it stays and goes on counting."""
        if self._place.get() is self._wrapper is not None:
            self._installed = False
            self._place.set(self._original)
            self._original = self._wrapper = None

    def is_outermost(self) -> bool:
        """Return whether the wrapper is installed, and no other code's stands in its place."""
        return self._installed and self._place.get() is self._wrapper

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exception: object) -> None:
        self.end()


class Watch(Wrapping):
    """A function of PyTorch around which another is called for a while.

    Args:
        around: called in its place, with the call to make.
    """

    def __init__(self, place: Location, around: Callable[[partial[Any]], Any]) -> None:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: around(partial(function, *args, **kwargs))

        super().__init__(place, wrap)


class Turn:
    """A lock that no training waits for longer than a moment, as a context manager.

    An interrupt can come between the end of a block and the release of its lock. The thread that
    was interrupted can enter again, and the others after some seconds.
    """

    def __init__(self, patience_s: float = 0.5) -> None:
        self._lock = threading.RLock()
        self._patience_s = patience_s

    def __enter__(self) -> None:
        self._lock.acquire(timeout=self._patience_s)

    def __exit__(self, *exception: object) -> None:
        with suppress(RuntimeError):  # it was not acquired in time
            self._lock.release()
