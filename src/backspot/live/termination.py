"""Do something when the process is asked to end by SIGTERM, as job schedulers do.

The signal ends the process as if nothing had been done. Python calls a handler only when the main
thread comes back from C code, which can be never: a training that waits for other ranks. So a
thread hears of the signal by Python's wake-up file, and ends the process if the handler does not.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

_PATIENCE_S = 0.5
"""For how long the thread waits for the handler."""
_NONE = -1


class Termination:
    """Calls a function before SIGTERM ends the process.

    Where the script has a handler of its own, the script decides what happens, and nothing is
    called. The same holds where it uses the wake-up file, as asyncio does.

    Args:
        action: called once, on the main thread or on another; an error of it is passed over.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._process = os.getpid()
        self._acting = threading.Lock()
        self._pipe: tuple[int, int] | None = None

    def begin(self) -> None:
        """Listen from now on; only the main thread can."""
        with suppress(AttributeError, ValueError, OSError):
            if self._pipe is not None or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                return
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            if before != _NONE:
                signal.set_wakeup_fd(before)
                os.close(reading)
                os.close(writing)
                return
            self._pipe = reading, writing
            signal.signal(signal.SIGTERM, self._on_signal)
            threading.Thread(
                target=self._listen, args=(reading,), name="backspot", daemon=True
            ).start()
            _copies_forget(self)

    def end(self) -> None:
        """Listen no more. What the script has installed since stays."""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return
        with suppress(ValueError):
            if signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            found = signal.set_wakeup_fd(_NONE)
            if found not in (_NONE, pipe[1]):
                signal.set_wakeup_fd(found)
        with suppress(OSError):
            os.write(pipe[1], b"\0")  # the thread ends, and closes the pipe

    @property
    def is_on(self) -> bool:
        """Whether it listens."""
        return self._pipe is not None

    def forget(self) -> None:
        """Leave the signal alone: this process is a copy, whose signals are its own."""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return
        with suppress(ValueError):
            if signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if signal.set_wakeup_fd(_NONE) == pipe[1]:
                for descriptor in pipe:
                    os.close(descriptor)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._act()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _act(self) -> None:
        if self._acting.acquire(blocking=False) and os.getpid() == self._process:
            with suppress(Exception):
                self._action()

    def _listen(self, reading: int) -> None:
        writing = (self._pipe or (reading, _NONE))[1]
        while True:
            try:
                numbers = os.read(reading, 64)
            except OSError:  # the script has closed all files
                return
            if self._pipe is None:
                break
            if signal.SIGTERM in numbers:
                # The handler ends the process, unless the main thread does not come back.
                threading.Event().wait(_PATIENCE_S)
                self._act()
                ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # SIG_DFL
                os.kill(os.getpid(), signal.SIGTERM)
        for descriptor in (reading, writing):
            with suppress(OSError):
                os.close(descriptor)


_listening: list[Termination] = []


def _copies_forget(listening: Termination) -> None:
    _listening.append(listening)
    _register()


@functools.cache
def _register() -> None:
    # A signal that reaches a copy before it has forgotten would be heard here, through the pipe
    # that both have, and end this process in place of the copy. So it waits until then.
    masks = threading.local()

    def hold() -> None:
        if any(listening.is_on for listening in _listening):
            # First, as an interrupt can come out of the call that blocks.
            masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def release() -> None:
        before = vars(masks).pop("before", None)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def forget() -> None:
        for listening in _listening:
            listening.forget()
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=forget)
