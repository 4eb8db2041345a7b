"""The Python calls of a trace with stacks that say where the user's own code is.

With ``with_stack=True`` Kineto writes each call of a function as ``train.py(9): step``, with the
line that the function begins at, and from PyTorch 2.15 on with the line of the call (``CallFrom``:
``train.py:31``). Texts are kept of the user's functions and lines alone; of the other calls it is
known when they run, and whether they are PyTorch's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from backspot.trace.names import MODULE_CALL

_Ints = NDArray[np.int64]
OF_USER, OF_OTHERS, OF_TORCH = 0, -1, -2
"""Whose a function is; the negative ones are ``Frames.function`` of what is not the user's."""
_FUNCTION = re.compile(r"(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
_CALL = re.compile(r"(?P<file>.+):(?P<line>\d+)\Z", re.DOTALL)
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_LIBRARY = re.compile(r".*/lib(?:64)?/python3\.\d+/")
_OTHERS = frozenset({"torch", "torchgen", "numpy", "backspot", *sys.stdlib_module_names})
"""Packages whose lines nobody changes to make a step faster."""


def _none() -> _Ints:
    return np.empty(0, np.int64)


class Frames(msgspec.Struct, frozen=True):
    """Calls of Python functions; arrays of equal length.

    Attributes:
        start: nanoseconds, on the clock of ``Events.start``.
        duration: nanoseconds.
        thread: index into ``Events.threads``.
        function: for a function of the user, index into ``texts``; ``OF_TORCH`` for PyTorch's own
            Python, ``OF_OTHERS`` for other calls.
        line: for a call from a function of the user, index into ``texts``; -1 where the line of
            the call is not known.
        texts: functions as ``train.py(9): step`` and lines as ``train.py:31``.
        calls: when each call of any Python function starts, in nanoseconds, sorted: recording each
            takes time.
    """

    start: _Ints = msgspec.field(default_factory=_none)
    duration: _Ints = msgspec.field(default_factory=_none)
    thread: _Ints = msgspec.field(default_factory=_none)
    function: _Ints = msgspec.field(default_factory=_none)
    line: _Ints = msgspec.field(default_factory=_none)
    texts: tuple[str, ...] = ()
    calls: _Ints = msgspec.field(default_factory=_none)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.start)

    def renamed(self, place: Callable[[str, int, str], tuple[str, int]]) -> Frames:
        """Return the calls with other files and lines; of a call, the function is ``""``."""

        def text_of(text: str) -> str:
            if function := function_of(text):
                return "{}({}): ".format(*place(*function)) + function[2]
            called = line_of_call(text)
            return "{}:{}".format(*place(*called, "")) if called else text

        return replace(self, texts=tuple(text_of(text) for text in self.texts))


def function_of(text: str) -> tuple[str, int, str] | None:
    """Return the file, the first line and the name of a function: ``train.py(9): step``."""
    match = _FUNCTION.fullmatch(text)
    return (match["file"], int(match["line"]), match["function"]) if match else None


def line_of_call(text: str) -> tuple[str, int] | None:
    """Return the file and the line of a call: ``train.py:31``."""
    match = _CALL.fullmatch(text)
    return (match["file"], int(match["line"])) if match else None


@lru_cache(1 << 14)
def whose(text: str) -> int:
    """Return whose a function or a line is: ``OF_USER``, ``OF_TORCH`` or ``OF_OTHERS``.

    PyTorch's are the functions of its own Python code, and the calls of modules.
    """
    if not text.startswith("<built-in "):
        place = function_of(text) or line_of_call(text)
        if place is not None and _is_users_file(place[0]):
            return OF_USER
    is_torchs = text.startswith(("torch/", MODULE_CALL)) or "-packages/torch/" in text
    return OF_TORCH if is_torchs else OF_OTHERS


@lru_cache(1 << 12)
def _is_users_file(file: str) -> bool:
    if file.startswith(("<frozen ", "<string>", "<built-in", "<eval_with_key>")):
        return False
    inside = _INSTALLED.sub("", file)
    if inside == file and _LIBRARY.match(file):
        return False
    first = inside.split("/", 1)[0]
    return first.removesuffix(".py") not in _OTHERS
