"""Processes that read traces for this one.

A process reads one trace after the other, because starting it takes as long as reading 20 MB. A
trace that ends its process costs no other trace: the next one has a new process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import IO, cast

from backspot.errors import SourceNotFoundError
from backspot.job.worker import Reply, Request, kept_summary, receive, send
from backspot.trace.parallel import ONE_THREAD, processors

_CODE = "import sys; from backspot.job.worker import main; sys.exit(main())"


@contextmanager
def readers() -> Iterator[tuple[Executor, Callable[[str, str | None], bytes]]]:
    """Yield threads, and the function that they are to call with a path and the cache.

    There are at most as many processes as processors. The function raises ``SourceNotFoundError``
    if there is no such trace, and ``RuntimeError`` with the reason if it cannot be read.
    """
    count = processors()
    free: SimpleQueue[_Reader | None] = SimpleQueue()  # None: a process that is not needed yet
    for _ in range(count):
        free.put(None)

    def read(path: str, cache: str | None) -> bytes:
        if (cached := kept_summary(path, cache)) is not None:
            return cached
        reader = free.get()
        try:
            reader = reader or _Reader()
            reply = reader.read(Request(os.fsencode(path), os.fsencode(cache or "")))
        except (BrokenPipeError, EOFError):
            ended, reader = reader, None
            raise RuntimeError(ended.last_words() if ended else "") from None
        finally:
            free.put(reader)
        if reply.reason:
            raise (SourceNotFoundError if reply.missing else RuntimeError)(reply.reason)
        return reply.summary

    try:
        with ThreadPoolExecutor(count) as threads:
            yield threads, read
    finally:
        for _ in range(count):
            if reader := free.get():
                reader.last_words()


class _Reader:
    """A process that reads traces."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process ends
        self._process = subprocess.Popen(  # noqa: S603 - our own code
            [sys.executable, "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={
                **os.environ,
                **ONE_THREAD,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONIOENCODING": "utf-8",
            },
        )

    def read(self, request: Request) -> Reply:
        """Let it read a trace. Raises ``BrokenPipeError`` or ``EOFError`` if it has ended."""
        send(cast("IO[bytes]", self._process.stdin), request)
        return receive(cast("IO[bytes]", self._process.stdout), Reply)

    def last_words(self) -> str:
        """End the process, and return why it has ended itself."""
        self._process.communicate()
        with self._errors as errors:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended with {self._process.returncode}"
