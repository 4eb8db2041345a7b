"""Decode one large plain file in several processes.

The file is cut between two events into stretches of equal length, one per process. This process
decodes the first; each other process leaves its columns in a temporary file. If anything goes wrong
in any of them, a broken event included, there is no result, and one process reads the whole file
and reports what is wrong with it.

``multiprocessing`` is no substitute: its processes import the user's ``__main__`` again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np

from backspot.trace.chrome import ChromeDecoder, first_between
from backspot.trace.columns import Columns
from backspot.trace.metadata import find_events
from backspot.trace.stream import Progress

_Part: TypeAlias = tuple[Columns, int, int]
"""The columns of a stretch, the number of its events and of its impossible ones."""

_WINDOW = 1 << 14
_MOST_WINDOW = 1 << 23
_WORTH_IT = 48 << 20
"""Bytes for each process where the user names no number of processes."""
_PAYS = 24 << 20
"""Bytes for each process in any case: starting a process takes as long as decoding these."""
_MOST_JOBS = 8
"""With more processes, joining the columns takes longer than decoding them."""

# Isolated (-I) and without site (-S): nothing but this code runs, from where this process has it.
_CODE = """\
import sys
path, begin, end, *sys.path = sys.argv[1:]
from backspot.trace.parallel import main
main(path, int(begin), int(end))
"""


def paying_jobs(size: int, most: int | None) -> int:
    """Return how many processes pay for a plain file, of at most so many."""
    if most is None:
        return min(processors(), size // _WORTH_IT, _MOST_JOBS)
    return min(most, size // _PAYS)


def decode_in_parts(
    path: Path, size: int, jobs: int, progress: Progress | None
) -> ChromeDecoder | None:
    """Decode a plain file in this process and others at once.

    Args:
        path: the file.
        size: its size in bytes.
        jobs: how many processes.
        progress: as in ``read_events``. How far this process is in its stretch stands for all.

    Returns:
        A decoder that has read exactly what one process would have read; ``None`` if one process
        must read the file.
    """
    if jobs < 2 or not _is_python(sys.executable):
        return None
    try:
        first, *others = _stretches(path, size, jobs)
        with ExitStack() as stack:
            workers = [stack.enter_context(_worker(path, *stretch)) for stretch in others]
            decoder = _decode(path, *first, progress)
            for worker in workers:
                decoder.extend(*worker())
    except Exception:
        return None
    if progress is not None:
        progress(size, size)
    return decoder


def main(path: str, begin: int, end: int) -> None:
    """Decode a stretch in a process of its own and write the part to standard output."""
    keep_freed()
    decoder = _decode(Path(path), begin, end)
    decoder.columns.compact()
    piece: _Part = decoder.columns, decoder.seen, decoder.impossible
    pickle.dump(piece, sys.stdout.buffer, protocol=5)
    sys.stdout.flush()
    os._exit(0)  # freeing the memory takes as long as decoding a megabyte, and the reader waits


def keep_freed() -> None:
    """Let the C library reuse freed arrays; only for a process that belongs to Backspot.

    glibc returns each large block to the system when it is freed, until it has seen a block of that
    size freed once: from then on it keeps such blocks. Fresh pages cost more time than most of the
    work on them. The array here is never touched, so it takes no memory. The setting changes the
    whole process for good, so a library must not call this in its user's process.
    """
    np.empty(_LARGE, np.uint8)


# Just below the largest block from which glibc draws that conclusion.
_LARGE = (32 << 20) - (1 << 16)


ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Without these, NumPy would start threads in a process, which have nothing to do."""


@contextmanager
def _worker(path: Path, begin: int, end: int) -> Iterator[Callable[[], _Part]]:
    """Start a process that decodes a stretch; yields a function that waits for its part."""
    home = str(Path(__file__).parents[2])
    command = [sys.executable, "-I", "-S", "-c", _CODE, os.fspath(path), str(begin), str(end)]
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(  # noqa: S603 - our own code
            [*command, home, *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD},
        ) as process,
    ):

        def part() -> _Part:
            if process.wait():
                raise ChildProcessError("the stretch is not sound, or the process was killed")
            output.seek(0)
            found_part: _Part = pickle.load(output)  # noqa: S301 - our own process wrote it
            return found_part

        try:
            yield part
        finally:
            with suppress(OSError):
                process.kill()


def _decode(path: Path, begin: int, end: int, progress: Progress | None = None) -> ChromeDecoder:
    """Decode the stretch from byte ``begin`` to byte ``end``; ``ValueError`` if it is not sound."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(begin)

        def read(most: int) -> bytes:
            data = file.read(min(most, end - file.tell()))
            if progress is not None:
                progress(size * file.tell() // end, size)
            return data

        decoder = ChromeDecoder(read, str(path), b"" if begin == 0 else _head(path))
        if not decoder.run_part(first=begin == 0, last=end == size):
            raise ValueError("the stretch is not sound")
        return decoder


def _head(path: Path) -> bytes:
    """Return the text before the events of a plain file."""
    pieces: list[bytes] = []
    with path.open("rb", buffering=0) as file:
        find_events(file.read, str(path), pieces.append)
    return b"".join(pieces)


def _stretches(path: Path, size: int, jobs: int) -> list[tuple[int, int]]:
    """Return where up to ``jobs`` stretches of about equal length begin and end."""
    with path.open("rb", buffering=0) as file:
        cuts = [(0, 0), *(_between(file, size * job // jobs, size) for job in range(1, jobs))]
    stretches = zip(
        (begin for _, begin in cuts), (*(end for end, _ in cuts[1:]), size), strict=True
    )
    # An event may be longer than a stretch.
    return [(begin, end) for begin, end in stretches if begin < end]


def _between(file: IO[bytes], position: int, size: int) -> tuple[int, int]:
    """Return where the first event behind ``position`` ends, and where the next one begins."""
    window = _WINDOW
    while window <= _MOST_WINDOW:
        file.seek(position)
        between = first_between(file.read(window))
        if between is not None:
            return position + between[0], position + between[1]
        if position + window >= size:
            return size, size
        window *= 8
    raise ValueError("no two events meet")


def _is_python(executable: str | None) -> bool:
    """Whether this can run Python code: an application that embeds Python cannot."""
    name = os.path.basename(executable or "").lower()  # noqa: PTH119
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
