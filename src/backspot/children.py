"""Has the processes that a script starts observed, each from its first sign of a training.

A process that is forked has this module in memory. A Python that starts, whoever starts it, finds
``_startup/sitecustomize.py`` through ``PYTHONPATH``. Both wait for torch, and then for the first
optimizer that is made, or the first backward. Until then nothing more is imported, and a process
that does not train, such as a worker of a loader, is left alone.

At the start of Python this file and ``imports.py`` are loaded without the rest of the package, so
they import only what every Python has in memory by then.
"""

from __future__ import annotations

import os
import sys

from backspot.imports import unseen_by_warnings, when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_VARIABLE = "BACKSPOT_CHILDREN"
_PACKAGE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - without pathlib
_STARTUP = f"{_PACKAGE}{os.sep}_startup"

_given = os.environ.get(_VARIABLE, "")
"""The Python that is followed, what observes it, and a file with how, a line each.

It is empty where nobody follows. Once the file is gone, all that was to be observed has ended.
"""


def _nothing() -> None:
    pass


_stop_waiting = _nothing


def follow(module: str, file: str, stop_waiting: Callable[[], None]) -> Callable[[], None]:
    """Have the processes that this one starts observed from now on, until a file is removed.

    Args:
        module: has ``observe(file)``, which observes the process that calls it.
        file: tells it how. The environment has its path alone, as its size is limited.
        stop_waiting: takes back what waits for torch here, in a copy of this process.

    Returns:
        A function that ends this.
    """
    global _given, _stop_waiting
    _stop_waiting()  # this process itself may be one that is followed
    _stop_waiting = stop_waiting
    before = {name: os.environ.get(name) for name in (_VARIABLE, "PYTHONPATH")}
    _given = f"{sys.prefix} {sys.hexversion:x}\n{module}\n{file}"
    folders = (before["PYTHONPATH"] or "").split(os.pathsep)
    others = [folder for folder in folders if folder and folder != _STARTUP]
    now = {_VARIABLE: _given, "PYTHONPATH": os.pathsep.join([_STARTUP, *others])}
    os.environ.update(now)
    _follow_copies()

    def end() -> None:
        global _given, _stop_waiting
        _given, _stop_waiting = "", _nothing
        for name, value in before.items():
            if os.environ.get(name) != now[name]:
                continue  # the script has set it
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    return end


def wait() -> None:
    """Have this process observed from its first sign of a training on."""
    global _stop_waiting
    _stop_waiting()
    _stop_waiting = when_imported("torch", _watch)
    _follow_copies()


_follows_copies = False


def _follow_copies() -> None:
    global _follows_copies
    if _follows_copies or not hasattr(os, "register_at_fork"):
        return
    _follows_copies = True
    os.register_at_fork(after_in_child=_wait_in_copy)


def _wait_in_copy() -> None:
    try:
        if _observer() is not None:
            wait()
    except Exception:
        # Another thread was importing torch, and is not in the copy, which then has half of it.
        _stop_waiting()


def _observer() -> tuple[str, str] | None:
    """Return what observes this process, and the file with how; ``None`` if nothing does now."""
    _, module, file = _given.split("\n", 2) if _given else ("", "", "")
    return (module, file) if os.path.exists(file) else None  # noqa: PTH110


def _watch() -> None:
    """Observe this process before its first optimizer is made, or before its first backward."""
    global _stop_waiting
    torch: Any = sys.modules["torch"]
    places = [(torch.optim.Optimizer, "__init__"), (torch.autograd, "backward")]
    before = [(home, name, vars(home)[name]) for home, name in places]
    wrappers = [_after(lambda: begin(), function) for _, _, function in before]
    for (home, name), wrapper in zip(places, wrappers):  # noqa: B905 - Python 3.9 starts it too
        setattr(home, name, wrapper)
    waits = True

    def stop() -> None:
        nonlocal waits
        waits = False
        for (home, name, function), wrapper in zip(before, wrappers):  # noqa: B905
            if vars(home)[name] is wrapper:
                setattr(home, name, function)

    def begin() -> None:
        if waits:
            stop()
            _observe()

    _stop_waiting = stop


def _after(action: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls an action and then a function."""
    from functools import wraps

    @wraps(function)
    @unseen_by_warnings
    def call(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    return call


def _observe() -> None:
    from importlib import import_module
    from importlib.util import find_spec

    observer = _observer()
    if observer is None:
        return
    module, file = observer
    try:
        spec = find_spec("backspot")
        if spec is None or spec.origin is None:  # a folder of reports has the same name
            sys.path.append(os.path.dirname(_PACKAGE))  # noqa: PTH120
        import_module(module).observe(file)
    except Exception as error:
        from contextlib import suppress

        from backspot.interrupts import pass_on

        pass_on(error)
        with suppress(Exception):  # a closed pipe is no matter of the training
            if sys.stderr is not None:
                print(f"backspot: no report of process {os.getpid()}: {error}", file=sys.stderr)
