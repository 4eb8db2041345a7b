"""Autograd's engine: a function is called before and after each of its outermost runs."""

from __future__ import annotations

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
    found = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_LEADING_TO_THE_ENGINE):
            found = frame
        frame = frame.f_back
    return found


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


def _engine_around(original: Any) -> Any:
    """Return an engine that does what another one does, and calls the users."""
    run: Callable[..., Any] = original.run_backward

    # A subclass, as Dynamo asks for the class; the engine proper is one for the whole process.
    class Engine(type(original)):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            if not _hears or in_backward() or _compiling() is not None:
                return run(*args, **kwargs)
            users = _users
            # The seventh, as far as it is given by its place.
            into_grad = bool(kwargs.get("accumulate_grad", args[6:7] == (True,)))
            for begin, _ in users:
                begin(into_grad)
            result = run(*args, **kwargs)
            for _, end in users:
                end(into_grad)
            return result

    keep_from_dynamo(Engine.run_backward)
    return Engine()


_original: Any = None
_watched: Any = None


def _install() -> None:
    global _original, _watched
    if _watched is None and (engine := _ENGINE.get()) is not None:
        _original, _watched = engine, _engine_around(engine)
        _ENGINE.set(_watched)


def _uninstall() -> None:
    """Put the engine back. If other code has wrapped it since, it stays, for no user."""
    global _original, _watched
    if _ENGINE.get() is _watched is not None:
        _ENGINE.set(_original)
        _original = _watched = None
