"""Functions that the modules of a package register, so that a new one is one new file.

The decorators that use this follow the idiom of ``torch.utils.flop_counter.register_flop_formula``:
a module registers its function when it is imported, and the first question imports every module.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from pkgutil import iter_modules
from typing import Generic, Protocol, TypeVar

__all__ = ["Registered", "Registry"]


class Registered(Protocol):
    """What can be registered."""

    @property
    def name(self) -> str:
        """The name of its module, with ``-`` for ``_``."""

    @property
    def fallback(self) -> bool:
        """Whether it comes after those that are none."""


Entry = TypeVar("Entry", bound=Registered)


class Registry(Generic[Entry]):
    """What the modules of one package register.

    Args:
        package: name of the package.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._entries: dict[str, Entry] = {}

    def add(self, entry: Entry, module: str) -> None:
        """Register an entry.

        Args:
            entry: what to register.
            module: name of the module that registers it.

        Raises:
            ValueError: If the name is not the module's, or if an entry of this name exists already.
        """
        expected = module.rpartition(".")[2].replace("_", "-")
        if entry.name != expected:
            raise ValueError(f"rule {entry.name!r} in {module}: its name must be {expected!r}")
        if entry.name in self._entries:
            raise ValueError(f"rule {entry.name!r} in {module}: a rule of this name exists already")
        self._entries[entry.name] = entry

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, sorted by name, with the fallbacks last.

        The modules are listed through the package's own import path, so this works from a source
        tree, an installed wheel or a zip file.
        """
        package = import_module(self._package)
        for module in iter_modules(package.__path__, f"{self._package}."):
            import_module(module.name)
        return tuple(sorted(self._entries.values(), key=lambda one: (one.fallback, one.name)))
