"""Work that is done in a copy of the process, while the training goes on.

A thread would not do: the operators of a training release Python's lock, and wait for a thread that
computes each time. Data loaders copy the process in the same way. The copy touches no device, runs
none of the script's own code, and goes on if the script is ended.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress

_LONGEST = 300.0  # seconds to wait for a copy: the locks of other threads are copied too


class Aside:
    """Does one piece of work at a time."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self._work: Callable[[], object] | None = None

    @staticmethod
    def is_possible() -> bool:
        """Whether a copy can do it: on Linux, where its messages reach standard error itself."""
        try:
            return sys.platform == "linux" and sys.stderr.fileno() == 2
        except (AttributeError, OSError, ValueError):  # something else is in its place
            return False

    def begin(self, work: Callable[[], object]) -> None:
        """Begin work, after that which is under way. Raises ``OSError`` if nothing can be begun."""
        self.wait()
        reading, writing = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of other threads
                copied = os.fork()
            if not copied:
                _in_copy(work, writing)
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        os.waitpid(copied, 0)  # it ends at once: the script's own waits are for its own processes
        self._work, self._pipe = work, reading

    def wait(self) -> None:
        """Wait until the work is done, and do it here if the copy was killed.

        What interrupts this is raised afterwards.
        """
        interrupt = None
        while self._pipe is not None:
            done = b""
            try:
                if select.select([self._pipe], [], [], _LONGEST)[0]:
                    done = os.read(self._pipe, 1)
            except (OSError, ValueError):  # the script has closed it
                pass
            except BaseException as error:
                interrupt = error
                continue
            with suppress(OSError):
                os.close(self._pipe)
            work, self._work, self._pipe = self._work, None, None
            if not done and work is not None:
                work()
        if interrupt is not None:
            raise interrupt


def _in_copy(work: Callable[[], object], pipe: int) -> None:
    """Do the work in a copy of the copy, which is no child of the script, and end both."""
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)
        os.setsid()  # away from Ctrl-C
        if not os.fork():
            gc.disable()  # objects of the script do not end here
            work()
            os.write(pipe, b".")
    finally:
        os._exit(0)
