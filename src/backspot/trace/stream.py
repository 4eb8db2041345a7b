"""A trace file as a stream of plain bytes, whether it is gzip or not; its first two bytes decide.

Gzip is unpacked in a thread, some megabytes ahead of the reader. zlib works without the
interpreter's lock, so on a second processor unpacking costs the reader little.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from typing import IO, TypeAlias

from backspot.errors import UsageError

Progress: TypeAlias = Callable[[int, "int | None"], None]
"""Called while reading with the bytes read so far and, where it is known, the file's size."""
Read: TypeAlias = Callable[[int], bytes]
"""Returns the next bytes, at most as many as asked for; ``b""`` at the end."""

GZIP = b"\x1f\x8b"
"""The first two bytes of a gzip file."""

_PACKED = 1 << 18
# The thread needs the interpreter's lock for each block. Waiting for the lock takes as long as
# unpacking some megabytes.
_BLOCK = 8 << 20
_LEAST_BLOCK = 1 << 20

_Block: TypeAlias = tuple[int, bytes]
"""Plain bytes, and how far the file was read for them."""


@contextmanager
def plain(file: IO[bytes], total: int | None, progress: Progress | None) -> Iterator[Read]:
    """Yield a function that reads a file's plain bytes.

    Args:
        file: open in binary mode.
        total: its size, where known.
        progress: called with how far the file itself has been read, in the caller's thread.

    Raises:
        UsageError: If the file is open in text mode; the yielded function raises it too.
        zlib.error: Raised by the yielded function if the gzip data is broken.
    """
    counted = _Counted(file)
    head = counted.read(2)

    def report(done: int) -> None:
        if progress is not None:
            progress(done, total)

    if head != GZIP:

        def read_plain(size: int) -> bytes:
            nonlocal head
            data, head = head + counted.read(size - len(head)), b""
            report(counted.done)
            return data

        yield read_plain
        return
    blocks = _ahead(_unpacked(counted, head))
    rest = memoryview(b"")

    def read_gzip(size: int) -> bytes:
        nonlocal rest
        if not rest:
            done, block = next(blocks, (counted.done, b""))
            report(done)
            rest = memoryview(block)
        data, rest = bytes(rest[:size]), rest[size:]
        return data

    try:
        yield read_gzip
    finally:
        blocks.close()


class _Counted:
    """A binary stream that counts the bytes that were read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.done = 0

    def read(self, size: int) -> bytes:
        data: object = self._file.read(size)
        if not isinstance(data, bytes):
            raise UsageError("locate(an open text file): open the trace in binary mode, 'rb'")
        self.done += len(data)
        return data


def _unpacked(file: _Counted, head: bytes) -> Iterator[_Block]:
    """Yield the plain bytes of a gzip file in blocks worth a thread's attention."""
    blocks: list[bytes] = []
    size = 0
    for data in _members(file, head):
        blocks.append(data)
        size += len(data)
        if size >= _LEAST_BLOCK:
            yield file.done, b"".join(blocks)
            blocks, size = [], 0
    if size:
        yield file.done, b"".join(blocks)


def _members(file: _Counted, packed: bytes) -> Iterator[bytes]:
    """Yield the plain bytes of all members in order, as `cat a.gz b.gz` makes them."""
    inflate = zlib.decompressobj(wbits=31)
    while packed or (packed := file.read(_PACKED)):
        yield inflate.decompress(packed, _BLOCK)
        packed = inflate.unconsumed_tail
        if inflate.eof:
            packed = inflate.unused_data
            if len(packed) < len(GZIP):
                packed += file.read(_PACKED)
            if not packed.startswith(GZIP):  # the end, or something that is not gzip
                return
            inflate = zlib.decompressobj(wbits=31)
    yield inflate.flush()


def _ahead(blocks: Iterator[_Block]) -> Generator[_Block, None, None]:
    """Run an iterator in a thread, up to two blocks ahead; closing this ends the thread."""
    queue: Queue[_Block | BaseException | None] = Queue(1)
    abandoned = False

    def run() -> None:
        try:
            for block in blocks:
                queue.put(block)
                if abandoned:
                    return
            queue.put(None)
        except BaseException as error:
            queue.put(error)  # raised in the reader's thread

    thread = threading.Thread(target=run, name="backspot-unpacking", daemon=True)
    thread.start()
    try:
        while (block := queue.get()) is not None:
            if isinstance(block, BaseException):
                raise block
            yield block
    finally:
        abandoned = True
        with suppress(Empty):  # the thread puts at most one more, for which this makes room
            queue.get_nowait()
        thread.join()
