"""Import all modules of a package; hear of a module being imported, without importing it.

Also have warnings pass over a function's frames, as over those of Python's own imports.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if (
    TYPE_CHECKING
):  # ``children.py`` uses this file at the start of Python: it imports next to nothing
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])


def modules_of(package: str) -> list[ModuleType]:
    """Import the modules of a package, except the private ones, and return them.

    They are listed through the package's own import path, so this works from a source tree, an
    installed wheel or a zip file.
    """
    from importlib import import_module
    from pkgutil import iter_modules

    modules = iter_modules(import_module(package).__path__)
    return [
        import_module(f"{package}.{module.name}") for module in modules if module.name[0] != "_"
    ]


def when_imported(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call a function once the program has imported a module such as torch, or now if it has.

    Returns:
        A function that takes this back.
    """
    if name in sys.modules:
        action()
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder:
    """Finds one module as the other finders do, and adds a call to its import."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        # Asking where a module is does not import it: transformers asks before it does.
        spec = self._found_by_others(name, path, target)
        loader: Any = spec and spec.loader
        if "exec_module" in getattr(loader, "__dict__", {"exec_module": None}):
            return spec
        run = loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            if self in sys.meta_path:
                self.remove()
                self._action()

        loader.exec_module = run_and_call
        return spec

    def _found_by_others(self, name: str, path: Any, target: Any) -> Any:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                return spec
        return None


def unseen_by_warnings(function: Function) -> Function:
    """Have a warning in what a function calls name the line that it names without the function.

    A warning with a ``stacklevel`` counts frames, but for those of imports: of files whose names
    have two words in them. Each line has a warning once, so that another line has it once more.
    """
    code: Any = function.__code__
    name = code.co_filename + " (importlib, _bootstrap)"
    function.__code__ = code.replace(co_filename=name)
    return function
