"""Autograd's engine: a function is called before and after each of its outermost runs.

No frame of Backspot's is there while a backward runs that begins in PyTorch: a warning names the
line that it names without, and is shown as often. PyTorch's own function has a call before and
after the engine, for a log that hardly anybody reads, and that is where users are called.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch

from backspot.live.torch_internals.autograd import in_backward
from backspot.live.torch_internals.dynamo import keep_from_dynamo
from backspot.live.torch_internals.lookup import Location, Turn, find, nothing

# What all backwards of Python pass, whoever begins them: ``Tensor.backward``, also of a subclass,
# ``torch.autograd.backward`` and ``grad``, ``torch.func.grad``, and those who call it themselves,
# as Megatron does. Without it no backward is seen.
_ENGINE = Location(torch.autograd.Variable, "_execution_engine")

# What PyTorch's own function asks for its level, and calls then; without them each backward has a
# frame of Backspot's around the engine.
_LOG = Location(torch.autograd.graph, "log")
_LOGGED = Location(torch.autograd.graph, "_register_logging_hooks_on_whole_graph")

# What Dynamo knows while it compiles a graph: it runs the graph's backward once to see what it
# does. Without it this counts as a backward.
_compiling: Callable[[], Any] = find("_guards", "TracingContext", "try_get") or nothing

_HOME = Path(torch.__file__).parent
_LEADING_TO_THE_ENGINE = tuple(
    str(_HOME / name) for name in ("_tensor.py", "autograd", "_functorch")
)

Heard: TypeAlias = Callable[[bool], None]
"""Called with whether gradients go into ``.grad``, as ``backward`` has it and ``grad`` has not."""

_users: tuple[tuple[Heard, Heard], ...] = ()
_changing = Turn()
_hears = True


def hears() -> bool:
    """Return whether users are called."""
    return _hears


def set_hearing(hearing: bool) -> None:
    """Have users be called, or not while Backspot runs backwards of its own."""
    global _hears
    _hears = hearing


def watch_backward(begin: Heard, end: Heard) -> Callable[[], None]:
    """Have functions called before and after each outermost run of autograd's engine.

    They are called on the thread that runs the backward. A run within another one, as checkpointing
    makes it, is a part of that one.

    Args:
        begin: called before the run.
        end: called after the run, if that has raised nothing.

    Returns:
        A function that takes this back.
    """
    global _users
    keep_from_dynamo(begin, end, inside=True)
    user = begin, end
    with _changing:
        _users = (*_users, user)
        _install()

    def remove() -> None:
        global _users
        with _changing:
            _users = tuple(other for other in _users if other is not user)
            if not _users:
                _uninstall()

    return remove


def outermost_call(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame of PyTorch's that has led to the engine; ``None`` for none."""
    outermost = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_LEADING_TO_THE_ENGINE):
            outermost = frame
        frame = frame.f_back
    return outermost


def is_engine(code: CodeType) -> bool:
    """Return whether this function of PyTorch's runs a backward to its end.

    Without it, an error in a backward is one outside of all modules.
    """
    return code.co_name == "_engine_run_backward"


def others_run_backward() -> bool:
    """Return whether another thread is in PyTorch's code that leads to the engine."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return any(map(outermost_call, frames.values()))


def _begun(into_grad: bool) -> Callable[[], None]:
    """Call the users before a run of the engine, and return what calls them after it."""
    if not _hears or in_backward() or _compiling() is not None:
        return nothing
    users = _users
    for begin, _ in users:
        begin(into_grad)

    def ended() -> None:
        for _, end in users:
            end(into_grad)

    keep_from_dynamo(ended)
    return ended


class _Log:
    """A log that has PyTorch call what it calls for messages, whatever its level."""

    def __init__(self, log: Any) -> None:
        self.log = log

    def getEffectiveLevel(self) -> int:  # noqa: N802 - as loggers have it
        return logging.DEBUG

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


_local = threading.local()
"""``is_told``: whether this thread is in PyTorch's function, which has called the users."""


def _logged_around(log: Any, logged: Callable[..., Callable[[], None]]) -> Callable[..., Any]:
    """Return what calls the users where PyTorch writes messages of a graph, and writes those."""

    def begun(outputs: Any) -> Callable[[], None]:
        written = logged(outputs) if log.getEffectiveLevel() <= logging.DEBUG else nothing
        frame_locals = sys._getframe(1).f_locals
        ended = _begun(_goes_into_grad((outputs, *frame_locals["args"]), frame_locals["kwargs"]))
        handled = sys.exc_info()[1]
        before, _local.is_told = getattr(_local, "is_told", False), True

        def end() -> None:
            _local.is_told = before
            written()
            if sys.exc_info()[1] is handled:  # else the engine has raised that
                ended()

        keep_from_dynamo(end)
        return end

    keep_from_dynamo(begun, _Log.getEffectiveLevel, _begun, _goes_into_grad)
    return begun


def _goes_into_grad(args: Any, kwargs: Any) -> bool:
    """Return what an engine is told: the seventh, as far as it is given by its place."""
    return bool(kwargs.get("accumulate_grad", args[6:7] == (True,)))


def _engine_around(original: Any) -> Any:
    """Return an engine that does what another one does, and calls the users."""
    run: Callable[..., Any] = original.run_backward

    def heard(*args: Any, **kwargs: Any) -> Any:
        ended = _begun(_goes_into_grad(args, kwargs))
        result = run(*args, **kwargs)
        ended()
        return result

    def of_thread(_: Any) -> Callable[..., Any]:
        return run if getattr(_local, "is_told", False) else heard

    # A subclass, as Dynamo asks for the class; the engine proper is one for the whole process.
    class Engine(type(original)):  # type: ignore[misc]
        run_backward = property(of_thread)

    keep_from_dynamo(heard, of_thread, _begun, _goes_into_grad)
    return Engine()


_original: Any = None
_watched: Any = None
_logs: tuple[tuple[Any, Any], tuple[Any, Any]] | None = None
"""The log and its function, and what stands in for both."""


def _install() -> None:
    global _original, _watched, _logs
    if _watched is None and (engine := _ENGINE.get()) is not None:
        _original, _watched = engine, _engine_around(engine)
        _ENGINE.set(_watched)
    log, logged = _LOG.get(), _LOGGED.get()
    if _logs is None and log is not None and logged is not None:
        _logs = (log, logged), (_Log(log), _logged_around(log, logged))
        _put_logs(_logs[1])


def _uninstall() -> None:
    """Put all back. What other code has wrapped since stays, for no user."""
    global _original, _watched, _logs
    if _ENGINE.get() is _watched is not None:
        _ENGINE.set(_original)
        _original = _watched = None
    if _logs is not None and (_LOG.get(), _LOGGED.get()) == _logs[1]:
        _put_logs(_logs[0])
        _logs = None


def _put_logs(logs: tuple[Any, Any]) -> None:
    log, logged = logs
    # The function is called if the log says so.
    _LOGGED.set(logged)
    _LOG.set(log)
