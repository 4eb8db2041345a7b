"""``ladder_training.py`` as a process that can be made to stand still, and its own clock."""

from __future__ import annotations

import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.accuracy.ladder_reader import State
from benchmarks.harness import CannotRunError

SCRIPT = Path(__file__).with_name("ladder_training.py")


def command(folder: Path, state: State, fixed: Sequence[str]) -> list[str]:
    """Return the training's words on a command line."""
    words = [str(SCRIPT), str(folder), *fixed]
    for option, value in state.items():
        words += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return words


class Training:
    """The training as a process that can be made to stand still."""

    def __init__(self, words: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._errors = ""
        for target in (self._read, self._read_errors):
            threading.Thread(target=target, daemon=True).start()

    def settle(self, steps: int) -> None:
        """Let it make some steps: the workers' queue, which a slow first step has filled, is empty.

        Raises:
            CannotRunError: If it ends.
        """
        while self._next()[0] < steps:
            pass
        self.pause()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if match := re.search(r"step (\d+): .* ([\d.]+) images/s", line):
                self._lines.put((int(match[1]), float(match[2])))
        self._lines.put(None)

    def _read_errors(self) -> None:
        for line in self._process.stderr or ():
            self._errors += line

    def _next(self) -> tuple[int, float]:
        with suppress(queue.Empty):
            if (line := self._lines.get(timeout=120)) is not None:
                return line
        self.end()
        raise CannotRunError(f"the training ended or hangs: {self._errors.strip()[-300:]}")

    def pause(self) -> None:
        """Have it stand still, with its workers."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def speed(self, seconds: float) -> float:
        """Let it go on for about so long, and return images a second."""
        os.killpg(self._process.pid, signal.SIGCONT)
        with suppress(queue.Empty):
            while True:
                self._lines.get_nowait()
        self._next()  # in which it stood still
        end, speeds = time.monotonic() + seconds, [self._next()[1]]
        while time.monotonic() < end:
            speeds.append(self._next()[1])
        self.pause()
        return statistics.harmonic_mean(speeds)

    def end(self) -> None:
        """End it, with its workers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
