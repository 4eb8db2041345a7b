"""Runs a script or a module as ``python`` does."""

from __future__ import annotations

import atexit
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from backspot.errors import SourceNotFoundError, UsageError
from backspot.formatting import visible

__all__ = ["Script", "when_imported"]

_INTERRUPTED = 130
_kept: list[ModuleType] = []
"""Scripts that have ended: what they registered for the interpreter's end uses their globals."""


class Script:
    """A program that is run in this process as ``__main__``.

    Args:
        name: the path of the file, or the name of a module.
        arguments: its own arguments.
        is_module: whether ``name`` is a module, as after ``python -m``.

    Raises:
        SourceNotFoundError: If there is no such script.
        UsageError: If the module cannot be run.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, is_module: bool) -> None:
        self._arguments = list(arguments)
        self._module = ModuleType("__main__")
        self._name = name
        if is_module:
            # As python -m: the working folder comes first.
            _set_first(os.getcwd())  # noqa: PTH109 - text, as Python puts it there
            self._path, self._load = self._of_module(name)
        else:
            self._path, self._load = self._of_file(name)
            _set_first(os.path.dirname(os.path.realpath(name)))  # noqa: PTH120

    def _of_file(self, name: str) -> tuple[str, Callable[[], CodeType]]:
        if Path(name).is_dir():
            raise SourceNotFoundError(f"{visible(name)} is a folder: name the script in it")
        if not Path(name).is_file():
            raise SourceNotFoundError(f"{visible(name)} is not there: check the script's path")
        path = str(Path(name).absolute())
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        vars(self._module).update(
            __file__=path, __loader__=loader, __package__=None, __cached__=None
        )
        return name, lambda: compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)

    def _of_module(self, name: str) -> tuple[str, Callable[[], CodeType]]:
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except (ImportError, ValueError) as error:
            raise SourceNotFoundError(f"-m {visible(name)}: {error}") from error
        if spec is None:
            raise SourceNotFoundError(f"-m {visible(name)}: there is no such module to run")
        loader, found = spec.loader, spec
        if not isinstance(loader, importlib.abc.InspectLoader) or not spec.origin:
            raise UsageError(f"-m {visible(name)}: it has no code that can be run")
        vars(self._module).update(
            __file__=spec.origin,
            __loader__=loader,
            __package__=spec.parent,
            __spec__=spec,
            __cached__=spec.cached,
        )

        def load() -> CodeType:
            code = loader.get_code(found.name)
            if code is None:
                raise ImportError(f"no code object available for {found.name}")
            return code

        return spec.origin, load

    def run(self, ended: Callable[[], None]) -> int:
        """Run it to its end.

        Args:
            ended: called when the script and its threads have ended in whatever way, before an
                error of the script is shown if it has no threads.

        Raises:
            SystemExit: If the script ends in this way.
        """
        from backspot.commands import main

        before = sys.modules["__main__"]
        # Whoever else calls the command has a __main__ of its own, and so has IPython.
        is_program = vars(before).get("main") is main and not hasattr(sys, "ps1")
        sys.argv[:] = [self._path, *self._arguments]
        _kept.append(self._module)
        # What Python itself puts there differs from version to version.
        for name, value in {"__annotations__": {}, "__builtins__": builtins}.items():
            if name in vars(before):
                vars(self._module)[name] = value
        sys.modules["__main__"] = self._module
        try:
            exec(self._load(), vars(self._module))  # noqa: S102 - the purpose of this command
        except SystemExit:
            _end(ended, is_program)
            raise
        except BaseException as error:
            _flush()
            _end(ended, is_program)
            error.__traceback__ = self._own_part(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        finally:
            # Threads and exit functions of the script outlive it, and pickle what is in __main__.
            if not is_program:
                sys.modules["__main__"] = before
        _flush()
        _end(ended, is_program)
        return 0

    def _own_part(self, traceback: TracebackType | None) -> TracebackType | None:
        """Leave out the frames of Backspot, which has called the script."""
        while traceback and traceback.tb_frame.f_globals is not vars(self._module):
            traceback = traceback.tb_next
        return traceback


def _set_first(folder: str) -> None:
    """Put a folder where Python has put that of this program, if it did."""
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH, from Python 3.11 on
        sys.path[0] = folder


def _end(ended: Callable[[], None], is_program: bool) -> None:
    """Call a function now, or once Python has waited for the threads of the script.

    To wait for them here could last forever: Python first tells the workers of executors to end.
    """
    threads = [one for one in threading.enumerate() if one is not threading.main_thread()]
    if is_program and not all(one.daemon for one in threads):
        atexit.register(ended)
    else:
        ended()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def when_imported(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call a function once a module has been imported by the script, or now if it was.

    Args:
        name: the name of a package, such as ``torch``.
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
