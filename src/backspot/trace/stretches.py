"""A large plain file as stretches that several processes decode, whoever is free the next one.

Every process finds out by itself where a stretch begins and ends: between two events, at the first
such place behind a number of bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from typing import IO, TypeAlias

from backspot.trace.chrome import ChromeDecoder, first_between
from backspot.trace.columns import Columns

__all__ = ["STRETCH", "Part", "decode_stretches"]

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
