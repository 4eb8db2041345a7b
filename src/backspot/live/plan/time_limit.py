"""The end of a compilation that takes too long."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from backspot.live.torch_internals.dynamo import functions_of_compiling
from backspot.live.trials.twins import Refused

_WAITING = {
    (threading.__file__, "wait"),
    *((subprocess.__file__, name) for name in ("communicate", "_communicate", "_try_wait")),
    (selectors.__file__, "select"),
}
"""Functions of Python that wait for a process or a thread. Ctrl-C may end these, too."""
_AGAIN_S, _CALLS = 0.05, 5_000
"""How often, and for how many calls at a time, a function is looked for that may fail. Python is
half as fast meanwhile, and PyTorch can trace for seconds without entering one."""


def _waits(frame: FrameType) -> bool:
    """Whether a function waits, and not for a lock that it has to give back."""
    code = frame.f_code
    return (code.co_filename, code.co_name) in _WAITING and not frame.f_locals.get("gotit", False)


class TimeUp(BaseException):
    """The time of a plan is up while something compiles; no library may take it for an error."""


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End what compiles inside by ``TimeUp``, soon after so much time has passed.

    It comes where PyTorch expects an error: as one of its functions begins that can fail. Anywhere
    else, as between two lines of a ``finally``, PyTorch would stay in the midst of something, and
    what C++ calls from a destructor ends the process at an error.

    Raises:
        Refused: If this thread cannot be interrupted.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not hasattr(signal, "setitimer"):
        raise Refused("compiling could not be ended here when the time is up")
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        raise Refused("the training has an alarm of its own")
    if sys.getprofile() is not None:
        raise Refused("another profiler follows the calls of Python functions")
    before = signal.getsignal(signal.SIGALRM)
    if before is None:
        raise Refused("other code than Python's handles alarms")
    expected = frozenset[CodeType]()
    left, is_up = _CALLS, False

    def end(frame: FrameType) -> None:
        nonlocal is_up
        is_up = True  # also where a library takes it for another error
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setprofile(None)
        raise TimeUp(frame.f_code.co_name)

    def on_call(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        left -= 1
        if event == "call" and (frame.f_code in expected or _waits(frame)):
            end(frame)
        if left <= 0:
            sys.setprofile(None)

    def on_alarm(_: int, frame: FrameType | None) -> None:
        nonlocal expected, left, is_up
        is_up = True
        if frame is not None and _waits(frame):
            end(frame)
        expected, left = functions_of_compiling(), _CALLS
        sys.setprofile(on_call)

    signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), _AGAIN_S)
        yield
    except Exception:
        if not is_up:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setprofile(None)
        signal.signal(signal.SIGALRM, before)
    if is_up:
        raise TimeUp
