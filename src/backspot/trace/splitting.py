"""Reading one large plain file in several processes, each of which decodes a stretch of it.

The stretches are cut between two events. Whatever goes wrong, a broken event included, ends in
nothing: then one process reads the whole file, and tells what is wrong with it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import backspot
from backspot.trace.chrome import ChromeDecoder, first_between
from backspot.trace.unpacking import Progress, Read

__all__ = ["decode_in_parts", "stretch"]

_WORTH_IT = 48 << 20
"""Bytes that a process should have to decode: it takes as long to start as to decode 24 MiB."""
_HEAD_START = 24 << 20
_MOST_JOBS = 8
"""Beyond, what one process does with the columns takes longer than all decoding."""
_WINDOW = 1 << 20

# Isolated (-I) and without site (-S): nothing runs there but this, and from where it runs here.
_CODE = """\
import sys
begin, end, last, *sys.path = sys.argv[1:]
from backspot.trace._worker import main
main(int(begin), int(end), last == "last")
"""


def decode_in_parts(
    path: Path, size: int, jobs: int | None, progress: Progress | None
) -> ChromeDecoder | None:
    """Decode a plain file in this process and others at once.

    Args:
        path: the file.
        size: its size in bytes.
        jobs: how many processes; ``None`` takes as many as pay, which for a small file is one.
        progress: as ``read_events`` has it.

    Returns:
        What was read, exactly as one process would have; ``None`` where one process must do it.
    """
    if jobs is None:
        jobs = min(_processors(), size // _WORTH_IT, _MOST_JOBS)
    if jobs < 2 or not _is_python(sys.executable):
        return None
    workers: list[subprocess.Popen[bytes]] = []
    try:
        ends, begins = _cuts(path, size, jobs)
        for begin, end in zip(begins, [*ends[1:], size], strict=True):
            workers.append(_worker(path, begin, end, last=end == size))
        with path.open("rb", buffering=0) as file:
            told = _scaled(progress, size, ends[0]) if progress is not None else None
            decoder = ChromeDecoder(stretch(file, 0, ends[0], told), str(path))
            if not decoder.run_part(first=True, last=False):
                return None
        for worker in workers:
            assert worker.stdout is not None  # noqa: S101 - it was opened with one
            found = pickle.load(worker.stdout)  # noqa: S301 - our own process wrote it
            if found is None:
                return None
            decoder.extend(*found)
    except Exception:
        return None
    finally:
        for worker in workers:
            with suppress(OSError):
                worker.kill()
            worker.communicate()
    if progress is not None:
        progress(size, size)
    return decoder


def stretch(
    file: IO[bytes], begin: int, end: int, progress: Callable[[int], None] | None = None
) -> Read:
    """How to read the bytes of a file from ``begin`` to ``end``."""
    file.seek(begin)
    left = end - begin

    def read(size: int) -> bytes:
        nonlocal left
        data = file.read(min(size, left))
        left -= len(data)
        if progress is not None:
            progress(end - begin - left)
        return data

    return read


def _cuts(path: Path, size: int, jobs: int) -> tuple[list[int], list[int]]:
    """Where each stretch but the last ends, and where the next one begins."""
    head_start = _HEAD_START if size > 2 * jobs * _HEAD_START else 0
    share = (size - head_start) / jobs
    ends: list[int] = []
    begins: list[int] = []
    with path.open("rb") as file:
        for number in range(1, jobs):
            at = head_start + int(share * number)
            file.seek(at)
            between = first_between(file.read(_WINDOW))
            if between is not None and (not begins or at + between[0] > begins[-1]):
                ends.append(at + between[0])
                begins.append(at + between[1])
    return ends, begins


def _worker(path: Path, begin: int, end: int, *, last: bool) -> subprocess.Popen[bytes]:
    home = str(Path(backspot.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", _CODE]
    command += [str(begin), str(end), "last" if last else "", home, *sys.path]
    with path.open("rb") as file:
        return subprocess.Popen(  # noqa: S603 - ourselves
            command,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Numpy's threads would be started for nothing.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )


def _is_python(executable: str | None) -> bool:
    """Whether this can run Python code: an application that embeds Python cannot."""
    name = os.path.basename(executable or "").lower()  # noqa: PTH119
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _scaled(progress: Progress, size: int, part: int) -> Callable[[int], None]:
    """Tell of the whole file what is known of the part that this process reads."""
    return lambda done: progress(done * size // part, size)
