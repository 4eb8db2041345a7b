"""Do something when the process is asked to end by SIGTERM, as job schedulers do.

The signal ends the process as if nothing had been done. Python calls a handler only when the main
thread comes back from C code, which can be never: a training that waits for other ranks. So a
thread hears of the signal by Python's wake-up file, and ends the process if the handler does not.

A script may close all files, the wake-up file too. Python does not notice, and would write the
numbers of signals into whichever file gets that number next. The thread notices, as its pipe ends,
and has the main thread stop listening: no file is opened in place of those that the script closed.
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

from backspot.descriptors import Descriptor

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
        self._pipe: tuple[Descriptor, Descriptor] | None = None
        called_by_c = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        self._in_main_thread = called_by_c(self._end_if_closed)

    def begin(self) -> None:
        """Listen from now on; only the main thread can.

        Where a system asks nobody before it ends a process, as Windows, nothing is done.
        """
        if not hasattr(signal, "pthread_sigmask"):
            return
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
            self._pipe = Descriptor(reading), Descriptor(writing)
            signal.signal(signal.SIGTERM, self._on_signal)
            threading.Thread(
                target=self._listen, args=self._pipe[:1], name="backspot", daemon=True
            ).start()
            _copies_forget(self)

    def end(self) -> None:
        """Listen no more; only the main thread can. What the script has installed since stays."""
        pipe = self._pipe
        if pipe is None:
            return
        with suppress(ValueError, OSError):
            if signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            previous = signal.set_wakeup_fd(_NONE)
            if previous not in (_NONE, pipe[1].number):
                signal.set_wakeup_fd(previous)
            self._pipe = None
            for descriptor in pipe:
                descriptor.close()  # which ends the thread

    @property
    def is_on(self) -> bool:
        """Whether it listens."""
        return self._pipe is not None

    def _end_if_closed(self, _: object) -> int:
        if not all(descriptor.is_open for descriptor in self._pipe or ()):
            self.end()
        return 0  # C is told of no error

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._act()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _act(self) -> None:
        if self._acting.acquire(blocking=False) and os.getpid() == self._process:
            with suppress(Exception):
                self._action()

    def _listen(self, reading: Descriptor) -> None:
        while numbers := _read(reading):
            if signal.SIGTERM in numbers:
                # The handler ends the process, unless the main thread does not come back.
                threading.Event().wait(_PATIENCE_S)
                self._act()
                ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # SIG_DFL
                os.kill(os.getpid(), signal.SIGTERM)
        # Here a file of the script could get the number between a look at it and its end.
        ctypes.pythonapi.Py_AddPendingCall(self._in_main_thread, None)


def _read(reading: Descriptor) -> bytes:
    """Wait for numbers of signals; nothing if an end of the pipe is closed."""
    with suppress(OSError):
        if reading.is_open:
            return os.read(reading.number, 64)
    return b""


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
        try:
            for listening in _listening:
                listening.end()  # its signals are its own
        finally:
            release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=forget)
