"""The end of a compilation that takes too long."""

from __future__ import annotations

import selectors
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from backspot.live.torch_internals.dynamo import functions_of_compiling
from backspot.live.torch_internals.lookup import Watch
from backspot.live.trials.twins import Refused

_WAITING = {
    (threading.__file__, "wait"),
    *((subprocess.__file__, name) for name in ("communicate", "_communicate", "_try_wait")),
    (selectors.__file__, "select"),
}
"""Functions of Python that wait for a process or a thread. Ctrl-C may end these, too."""
_AGAIN_S = 0.05
"""How often the compiling thread is looked at, which can meanwhile have begun to wait, or have
imported another part of PyTorch."""


def _waits(frame: FrameType) -> bool:
    """Whether a function waits, and not for a lock that it has to give back."""
    code = frame.f_code
    return (code.co_filename, code.co_name) in _WAITING and not frame.f_locals.get("gotit", False)


class TimeUp(BaseException):
    """The time of a plan is up while something compiles; no library may take it for an error."""


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End what compiles inside by ``TimeUp``, soon after so much time has passed.

    It comes where PyTorch expects an error: as one of its functions is called that can fail.
    Anywhere else, as between two lines of a ``finally``, PyTorch would stay in the midst of
    something, and what C++ calls from a destructor ends the process at an error. These functions
    are wrapped once the time is up. A profile function of Python would see every call, and runs
    where Dynamo makes frames in C++, in which PyTorch crashed once.

    Raises:
        Refused: If this thread cannot be interrupted.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise Refused("compiling could not be ended here when the time is up")
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        raise Refused("the training has an alarm of its own")
    before = signal.getsignal(signal.SIGALRM)
    if before is None:
        raise Refused("other code than Python's handles alarms")
    watches = dict[str, Watch]()
    is_up = has_ended = False

    def end(function: str) -> None:
        nonlocal has_ended
        has_ended = True  # a library can take it for another error, and go on
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise TimeUp(function)

    def around(call: partial[Any]) -> Any:
        if not has_ended and threading.current_thread() is thread:
            end(call.func.__name__)
        return call()

    def on_alarm(_: int, frame: FrameType | None) -> None:
        nonlocal is_up
        is_up = True
        if has_ended:
            return
        if frame is not None and _waits(frame):
            end(frame.f_code.co_name)
        for name, place in functions_of_compiling().items():
            watches.setdefault(name, Watch(place, around)).begin()

    signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), _AGAIN_S)
        yield
    except Exception:
        if not is_up:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for watch in watches.values():
            watch.end()
    if is_up:
        raise TimeUp
