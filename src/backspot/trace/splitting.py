"""Reading one large plain file in several processes, each of which decodes stretches of it.

Whoever is done with one takes the next, so that all end at about the same time, however late one
starts and whatever else runs on its processor. Whatever goes wrong, a broken event included, ends
in nothing: then one process reads the whole file, and tells what is wrong with it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import backspot
from backspot.trace.chrome import ChromeDecoder
from backspot.trace.stretches import STRETCH, Part, decode_stretches
from backspot.trace.unpacking import Progress

__all__ = ["decode_in_parts", "paying_jobs"]

_WORTH_IT = 48 << 20
"""Bytes that a process should have to decode where nobody says how many there are to be."""
_PAYS = 24 << 20
"""Bytes that one has to have in any case: it takes as long to start as to decode these."""
_MOST_JOBS = 8
"""Beyond, what one process does with the columns takes longer than all decoding."""
_LEAST = 1 << 20
"""Bytes of a stretch at least, which take some thousandths of a second."""
_TURNS = 4
"""A stretch is what is left, divided by the processes and by this: they become shorter, so that
there are few and the last ones end together."""

# Isolated (-I) and without site (-S): nothing runs there but this, and from where it runs here.
_CODE = """\
import sys
path, after, until, *sys.path = sys.argv[1:]
from backspot.trace._worker import main
main(path, int(after), int(until))
"""


def paying_jobs(size: int, most: int | None) -> int:
    """How many processes pay for a plain file of ``size`` bytes.

    Args:
        size: of the file.
        most: how many somebody asks for; ``None`` leaves it to the processors.
    """
    if most is None:
        return min(_processors(), size // _WORTH_IT, _MOST_JOBS)
    return min(most, size // _PAYS)


def decode_in_parts(
    path: Path, size: int, jobs: int, progress: Progress | None
) -> ChromeDecoder | None:
    """Decode a plain file in this process and others at once.

    Args:
        path: the file.
        size: its size in bytes.
        jobs: how many processes.
        progress: as ``read_events`` has it.

    Returns:
        What was read, exactly as one process would have; ``None`` where one process must do it.
    """
    if jobs < 2 or size < jobs or not _is_python(sys.executable):
        return None
    stretches = _stretches(size, jobs)
    try:
        with ExitStack() as stack:
            # Each begins with one of its own, lest the others have done all before it starts.
            turns = stack.enter_context(_turns(stretches[jobs:]))
            workers = [
                stack.enter_context(_worker(path, first, turns)) for first in stretches[1:jobs]
            ]
            told = _told(progress, size) if progress is not None else None
            parts = list(decode_stretches(path, stretches[0], turns.fileno(), told))
            for results in workers:
                parts += results()
    except Exception:
        return None
    if len(parts) != len(stretches):
        return None
    whole = ChromeDecoder(lambda _: b"", str(path))
    for _, columns, seen, impossible in sorted(parts, key=lambda part: part[0]):
        whole.extend(columns, seen, impossible)
    if progress is not None:
        progress(size, size)
    return whole


def _stretches(size: int, jobs: int) -> list[tuple[int, int]]:
    """Stretches of so many bytes, several for each process."""
    least = max(1, min(_LEAST, size // (_TURNS * jobs)))
    stretches, at = [], 0
    while at < size:
        until = min(size, at + max(least, (size - at) // (_TURNS * jobs)))
        stretches.append((at, until))
        at = until
    return stretches


def _turns(stretches: Iterable[tuple[int, int]]) -> IO[bytes]:
    """A pipe that holds these, one to be read at a time."""
    turns, write = os.pipe()
    with os.fdopen(write, "wb") as file:
        file.write(b"".join(STRETCH.pack(*stretch) for stretch in stretches))
    return os.fdopen(turns, "rb", buffering=0)


@contextmanager
def _worker(
    path: Path, first: tuple[int, int], turns: IO[bytes]
) -> Iterator[Callable[[], Iterator[Part]]]:
    """Start a process; what is yielded waits for its end and gives what it found."""
    home = str(Path(backspot.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", _CODE]
    command += [os.fspath(path), *map(str, first), home, *sys.path]
    # Numpy's threads would be started for nothing.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with (
        _memory() as found,
        subprocess.Popen(  # noqa: S603 - ourselves
            command, stdin=turns, stdout=found, stderr=subprocess.DEVNULL, env=environment
        ) as process,
    ):

        def parts() -> Iterator[Part]:
            if process.wait():
                raise ChildProcessError("a stretch is not sound, or the process died")
            size = found.seek(0, os.SEEK_END)
            found.seek(0)
            while found.tell() < size:
                yield pickle.load(found)  # noqa: S301 - our own process wrote it

        try:
            yield parts
        finally:
            with suppress(OSError):
                process.kill()


def _memory() -> IO[bytes]:
    """A file without a name: in memory, where the system can."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("backspot"), "w+b")
    return tempfile.TemporaryFile()


def _told(progress: Progress, size: int) -> Callable[[int], None]:
    """How far this process has come in the file is about how far all have."""
    return lambda place: progress(place, size)


def _is_python(executable: str | None) -> bool:
    """Whether this can run Python code: an application that embeds Python cannot."""
    name = os.path.basename(executable or "").lower()  # noqa: PTH119
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
