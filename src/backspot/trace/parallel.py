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
from struct import Struct
from typing import IO, TypeAlias

import numpy as np

from backspot.trace.chrome import ChromeDecoder, first_between
from backspot.trace.columns import Columns
from backspot.trace.unpack import Progress

__all__ = [
    "STRETCH",
    "Part",
    "decode_in_parts",
    "decode_stretches",
    "keep_freed",
    "main",
    "paying_jobs",
]


STRETCH = Struct("<QQ")
"""A stretch in the pipe that the processes take the next one from: behind which bytes it begins and
ends."""

Part: TypeAlias = tuple[int, Columns, int, int]
"""Where a stretch begins, what it holds, how many events, and how many impossible ones."""

_WINDOW = 1 << 14
_MOST_WINDOW = 1 << 23


def decode_stretches(
    path: Path,
    first: tuple[int, int],
    turns: int,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Part]:
    """Decode one stretch after the other.

    Args:
        path: the file.
        first: the stretch to begin with.
        turns: the file descriptor that the others are read from, until its end.
        progress: called with the place in the file that has been reached.

    Raises:
        ValueError: where a stretch is not sound; then only one process can tell what is wrong.
        NotATraceError: where the text is no trace at all.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        after, until = first
        while True:
            begin, end = _between(file, after, size)[1], _between(file, until, size)[0]
            decoder = ChromeDecoder(_reader(file, begin, end, progress), str(path))
            # Where a single event covers a whole stretch, it belongs to the one before.
            if begin < end and not decoder.run_part(first=not begin, last=end == size):
                raise ValueError("not sound")
            decoder.columns.compact()
            yield after, decoder.columns, decoder.seen, decoder.impossible
            turn = os.read(turns, STRETCH.size)
            if not turn:
                return
            after, until = STRETCH.unpack(turn)


def _between(file: IO[bytes], at: int, size: int) -> tuple[int, int]:
    """Between which two events to cut: where one ends, and where the next begins."""
    if not at:
        return 0, 0
    window = _WINDOW
    while at < size:
        file.seek(at)
        between = first_between(file.read(window))
        if between is not None:
            return at + between[0], at + between[1]
        if at + window >= size:
            break
        window *= 8
        if window > _MOST_WINDOW:  # each process that looks would hold, and go through, all of it
            raise ValueError("no two events meet")
    return size, size


def _reader(
    file: IO[bytes], begin: int, end: int, progress: Callable[[int], None] | None
) -> Callable[[int], bytes]:
    """How to read the bytes of a file from ``begin`` to ``end``."""
    file.seek(begin)
    left = end - begin

    def read(size: int) -> bytes:
        nonlocal left
        data = file.read(min(size, left))
        left -= len(data)
        if progress is not None:
            progress(end - left)
        return data

    return read


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
from backspot.trace.parallel import main
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
    home = str(Path(__file__).parents[2])
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


# Just below the largest block of which glibc draws that conclusion.
_LARGE = (32 << 20) - (1 << 16)


def keep_freed() -> None:
    """Have the C library keep for the next array what the last one had.

    glibc takes each large block from the system, and gives it back when it is freed, until it sees
    one of that size freed: then it keeps them. Fresh pages cost more time than most of what is done
    with them here. This one is never touched, so it takes no memory; elsewhere it does nothing.
    """
    np.empty(_LARGE, np.uint8)


def main(path: str, after: int, until: int) -> None:
    """Decode this stretch and whichever is next, while there are any; fail where one is broken."""
    keep_freed()
    for part in decode_stretches(Path(path), (after, until), turns=0):
        pickle.dump(part, sys.stdout.buffer, protocol=5)
    sys.stdout.flush()
    os._exit(0)  # to tidy up takes as long as to decode a megabyte, and somebody waits
