"""Runs a script or a module as ``python`` does."""

from __future__ import annotations

import atexit
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType

from backspot.errors import SourceNotFoundError, UsageError
from backspot.formatting import visible

_INTERRUPTED = 130
_kept: list[ModuleType] = []
"""Scripts that have ended: what they registered for the interpreter's end uses their globals."""


class Script:
    """A program that is run in this process as ``__main__``.

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
            self._of_module(name)
            self._execute: Callable[[], object] = partial(
                runpy._run_module_as_main,  # type: ignore[attr-defined]  # what python -m calls
                name,
            )
        elif _has_main(name):
            if _is_safe_path():
                sys.path.insert(0, "")  # Python puts such a program first in any case
            sys.path[0] = os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118 - as Python does
            self._execute = partial(
                runpy._run_module_as_main,  # type: ignore[attr-defined]
                "__main__",
                False,  # what it is called stays
            )
        else:
            self._execute = self._of_file(name)
            _set_first(os.path.dirname(os.path.realpath(name)))  # noqa: PTH120

    def _of_file(self, name: str) -> Callable[[], object]:
        if Path(name).is_dir():
            raise SourceNotFoundError(
                f"{visible(name)} is a folder without __main__.py: name the script in it"
            )
        if not Path(name).is_file():
            raise SourceNotFoundError(f"{visible(name)} is not there: check the script's path")
        path = str(Path(name).absolute())
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        vars(self._module).update(
            __file__=path, __loader__=loader, __package__=None, __cached__=None
        )

        def execute() -> None:
            code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
            exec(code, vars(self._module))  # noqa: S102 - the purpose of this command

        return execute

    def _of_module(self, name: str) -> None:
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except (ImportError, ValueError) as error:
            raise SourceNotFoundError(f"-m {visible(name)}: {error}") from error
        if spec is None:
            raise SourceNotFoundError(f"-m {visible(name)}: there is no such module to run")
        if not isinstance(spec.loader, importlib.abc.InspectLoader) or not spec.origin:
            raise UsageError(f"-m {visible(name)}: it has no code that can be run")

    def run(self, ended: Callable[[BaseException | None], None]) -> int:
        """Run it to its end, and end as it ends.

        Args:
            ended: called with what the script raised, if anything, when it and its threads have
                ended, before an error of the script is shown if it has no threads.

        Raises:
            SystemExit: If the script ends in this way.
            KeyboardInterrupt: If an interrupt has ended this program, for Python to die of it.
        """
        from backspot.commands import main

        before = sys.modules["__main__"]
        # Whoever else calls the command has a __main__ of its own, and so has IPython.
        is_program = vars(before).get("main") is main and not hasattr(sys, "ps1")
        sys.argv[:] = [self._name, *self._arguments]
        _kept.append(self._module)
        # What Python itself puts there differs from version to version.
        for name, value in {"__annotations__": {}, "__builtins__": builtins}.items():
            if name in vars(before):
                vars(self._module)[name] = value
        sys.modules["__main__"] = self._module
        error: BaseException | None = None
        try:
            self._execute()
        except BaseException as raised:
            error = raised
        finally:
            # Threads and exit functions of the script outlive it, and pickle what is in __main__.
            if not is_program:
                sys.modules["__main__"] = before
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        try:
            _end(partial(ended, error), is_program)
        except BaseException as raised:  # a signal has come while the report was made
            error = error or raised
        if error is None:
            return 0
        error.__traceback__ = _without_ours(error)
        if isinstance(error, SystemExit):
            raise error
        _show(error)
        if not isinstance(error, KeyboardInterrupt):
            return 1
        if not is_program:
            return _INTERRUPTED
        sys.excepthook = _nothing
        raise KeyboardInterrupt


def _without_ours(error: BaseException) -> TracebackType | None:
    """Leave out the frames that are not there without Backspot."""
    traceback = error.__traceback__
    while traceback and _is_of(traceback, "backspot"):
        traceback = traceback.tb_next
    if traceback is None:  # the script cannot be compiled, or an error of Backspot itself
        return None if isinstance(error, SyntaxError) else error.__traceback__
    # An interrupt comes wherever Python is.
    left_out = ("backspot",) if isinstance(error, KeyboardInterrupt) else _AROUND
    entry = traceback
    while entry.tb_next:
        if _is_of(entry.tb_next, *left_out):
            entry.tb_next = entry.tb_next.tb_next
        else:
            entry = entry.tb_next
    return traceback


_AROUND = (
    *("backspot.live.call_wrapper", "backspot.live.class_calls", "backspot.live.running"),
    *("backspot.live.loaders", "backspot.live.step_log"),
    *("backspot.live.torch_internals.lookup", "backspot.live.torch_internals.engine"),
    "backspot.live.torch_internals.batches",
)
"""The files whose functions call the script's."""


def _is_of(traceback: TracebackType, *modules: str) -> bool:
    name = f"{traceback.tb_frame.f_globals.get('__name__')}."
    return name.startswith(tuple(f"{module}." for module in modules))


def _show(error: BaseException) -> None:
    """Show an error that nothing has caught, as the interpreter does."""
    about = type(error), error, error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = about
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    failed: BaseException | None = None
    try:
        sys.excepthook(*about)
    except SystemExit:
        raise
    except BaseException as raised:
        failed = raised
    if failed is not None:
        failed.__traceback__ = failed.__traceback__ and failed.__traceback__.tb_next
        with suppress(AttributeError, OSError, ValueError):  # there is no standard error any more
            print("Error in sys.excepthook:", file=sys.stderr)
            sys.__excepthook__(type(failed), failed, failed.__traceback__)
            print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(*about)


def _nothing(*_: object) -> None:
    """Show nothing: the error was shown."""


def _has_main(name: str) -> bool:
    """Whether a folder or an archive has a ``__main__`` that Python runs."""
    importer = pkgutil.get_importer(name)
    find_spec = getattr(importer, "find_spec", None)
    return find_spec is not None and find_spec("__main__") is not None


def _set_first(folder: str) -> None:
    """Put a folder where Python has put that of this program, if it did."""
    if not _is_safe_path():
        sys.path[0] = folder


def _is_safe_path() -> bool:
    """Whether Python has put no folder of this program first: PYTHONSAFEPATH, from 3.11 on."""
    return bool(getattr(sys.flags, "safe_path", False))


def _end(ended: Callable[[], None], is_program: bool) -> None:
    """Call a function now, or once Python has waited for the threads of the script.

    To wait for them here could last forever: Python first tells the workers of executors to end.
    """
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if is_program and not all(thread.daemon for thread in threads):
        atexit.register(ended)
    else:
        ended()
