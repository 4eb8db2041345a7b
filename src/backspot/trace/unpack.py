"""Plain bytes from a file that may be gzip, told by its first two bytes.

Unpacking runs in a thread of its own, some megabytes ahead: zlib works without the interpreter's
lock, so that on a second processor it costs the reader little.
"""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Full, Queue
from typing import IO, TypeAlias

from backspot.errors import UsageError

__all__ = ["GZIP", "MOST_TIMES", "UNBOUNDED", "Progress", "Read", "UnpackedTooFarError", "plain"]

Progress: TypeAlias = Callable[[int, "int | None"], None]
"""Called while reading with the bytes read and, where it is known, how many there are."""
Read: TypeAlias = Callable[[int], bytes]
"""Gives the next bytes, at most as many as asked for; ``b""`` at the end."""

GZIP = b"\x1f\x8b"
"""How a gzip file begins."""

UNBOUNDED = "BACKSPOT_UNPACK_ALL"
"""Set in the environment: unpack any file to its end."""

_FREE = 32 << 20
MOST_TIMES = 200
"""How often its packed bytes a file may unpack to, beside the first bytes, which are free. Traces
come to 10 to 30 times, and to 60 with a stack in each event; gzip can pack 1000 times."""

_PACKED = 1 << 20
# The thread asks for the interpreter's lock for each block; it waits for it as long as inflating
# some megabytes takes.
_BLOCK = 8 << 20
_LEAST_BLOCK = 1 << 20
_LEAST_STEP = 1 << 9
_ZEROS = re.compile(rb"\0*")
_PATIENCE = 0.1  # seconds between two looks at whether anybody still reads


class UnpackedTooFarError(Exception):
    """What a gzip file unpacks to is out of all proportion to its size."""


@contextmanager
def plain(file: IO[bytes], total: int | None, progress: Progress | None) -> Iterator[Read]:
    """How to read a file's plain bytes.

    Args:
        file: open in binary mode.
        total: its size, where known.
        progress: called with what has been read of the file itself, from the reader's thread.

    Raises:
        UsageError: where the file is open in text mode; so does what is yielded.
        zlib.error: what is yielded raises it where the file is broken.
        UnpackedTooFarError: what is yielded raises it where the file unpacks to far more than a
            trace does, unless ``UNBOUNDED`` is set in the environment.
    """
    counted = _Counted(file)
    head = counted.read(2)

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, total)

    if head != GZIP:

        def read_plain(size: int) -> bytes:
            nonlocal head
            data, head = head + counted.read(size - len(head)), b""
            tell(counted.done)
            return data

        yield read_plain
        return
    ahead = _Ahead(_inflated(counted, head))
    rest = memoryview(b"")

    def read_gzip(size: int) -> bytes:
        nonlocal rest
        if not rest:
            done, block = ahead.next()
            tell(done)
            rest = memoryview(block)
        data, rest = bytes(rest[:size]), rest[size:]
        return data

    try:
        yield read_gzip
    finally:
        ahead.stop()


class _Counted:
    """A binary stream that knows how far it has been read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.done = 0

    def read(self, size: int) -> bytes:
        data: object = self._file.read(size)
        if not isinstance(data, bytes):
            raise UsageError("locate(an open text file): open the trace in binary mode, 'rb'")
        self.done += len(data)
        return data


def _inflated(file: _Counted, head: bytes) -> Iterator[tuple[int, bytes]]:
    """Blocks of plain bytes, and how far the file was read for each; at the end an empty one."""
    bounded = not os.environ.get(UNBOUNDED)
    blocks: list[bytes] = []
    unpacked = size = 0
    for data in _members(file, head):
        unpacked += len(data)
        if bounded and unpacked > _FREE + MOST_TIMES * file.done:
            raise UnpackedTooFarError
        blocks.append(data)
        size += len(data)
        if size >= _LEAST_BLOCK:
            yield file.done, b"".join(blocks)
            blocks, size = [], 0
    if size:
        yield file.done, b"".join(blocks)
    yield file.done, b""


def _members(file: _Counted, head: bytes) -> Iterator[bytes]:
    """The plain bytes of all members, one after the other, as `cat a.gz b.gz` makes them."""
    inflate = zlib.decompressobj(wbits=31)
    packed, step = memoryview(head), _PACKED
    while packed or (packed := memoryview(file.read(_PACKED))):
        given = packed[:step]
        data = inflate.decompress(given, _BLOCK)
        left = len(inflate.unused_data if inflate.eof else inflate.unconsumed_tail)
        packed = packed[len(given) - left :]
        if data:
            yield data
        if not inflate.eof:
            step = min(2 * step, _PACKED)
            continue
        # What is left of a step is copied: of many small members little is given at a time.
        step = max(_LEAST_STEP, min(2 * (len(given) - left), _PACKED))
        packed = _behind_padding(file, packed)
        if packed[:2] != GZIP:  # nothing, or something else
            return
        inflate = zlib.decompressobj(wbits=31)
    if rest := inflate.flush():
        yield rest


def _behind_padding(file: _Counted, packed: memoryview) -> memoryview:
    """What follows a member and the zeros behind it: two bytes of it at least, if there are."""
    while True:
        zeros = _ZEROS.match(packed)
        packed = packed[zeros.end() if zeros else 0 :]
        if len(packed) > 1:
            return packed
        more = file.read(_PACKED)
        if not more:
            return packed
        packed = memoryview(bytes(packed) + more)


class _Ahead:
    """Runs an iterator in a thread, two items ahead of whoever asks for them."""

    def __init__(self, items: Iterator[tuple[int, bytes]]) -> None:
        self._items = items
        self._queue: Queue[tuple[int, bytes] | BaseException] = Queue(1)
        self._stopped = threading.Event()
        self._last: tuple[int, bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="backspot-unpacking", daemon=True)
        self._thread.start()

    def next(self) -> tuple[int, bytes]:
        """The next item; the last one again and again once it was given."""
        if self._last is not None:
            return self._last
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        if not item[1]:
            self._last = item
        return item

    def stop(self) -> None:
        """End the thread, whatever it still had to do."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
        except BaseException as error:
            self._put(error)  # raised where it is waited for

    def _put(self, item: tuple[int, bytes] | BaseException) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_PATIENCE)
            except Full:
                continue
            return True
        return False
