"""Find parts of PyTorch that may not be there, now or once they are loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


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


class _Watcher:
    """A finder of modules that finds nothing, but hears of one module being loaded."""

    def __init__(self, watched: str, loaded: Callable[[], None]) -> None:
        self._watched = watched
        self._loaded = loaded

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Wrap the loader of the watched module; ``None`` for all other modules."""
        if name != self._watched:
            return None
        for finder in sys.meta_path:
            found = getattr(finder, "find_spec", None)
            spec = found(name, path, target) if found and finder is not self else None
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._loaded()

        loader.exec_module = exec_module
        return spec


def when_loaded(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call a function once a module is loaded; return a function that takes this back."""
    if name in sys.modules:
        call()
        return nothing
    watcher = _Watcher(name, call)
    sys.meta_path.insert(0, watcher)

    def stop() -> None:
        if watcher in sys.meta_path:
            sys.meta_path.remove(watcher)

    return stop
