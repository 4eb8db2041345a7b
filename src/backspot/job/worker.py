"""Traces of a job, read by a process that does nothing else, or by a worker of an executor.

What this file imports, each of these processes imports: nothing that only the answer needs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from backspot._version import __version__
from backspot.errors import BackspotError, NotATraceError, SourceNotFoundError
from backspot.job.reduce import summarize
from backspot.job.remote import copied, is_remote, version
from backspot.job.summary import SCHEMA, SUFFIX, Summary, from_bytes, from_file, to_bytes
from backspot.trace.parallel import keep_freed

_Message = TypeVar("_Message", "Request", "Reply")
_HEAD = 1 << 20
"""Bytes of a trace that are part of its key in the cache."""


def read_summary(path: str, cache: str | None = None) -> bytes:
    """Return the bytes of a trace's summary, which the cache may have; raises as ``summarize``."""
    place = None if cache is None else _place(path, Path(cache))
    if place is not None and (cached := _read(place)) is not None:
        return cached
    with copied(path) if is_remote(path) else nullcontext(Path(path)) as file:
        stored = _summary_in(file)
        loaded = summarize(file) if stored is None else stored
    summary = to_bytes(msgspec.structs.replace(loaded, source=path))
    if place is not None and stored is None:
        _keep(place, summary)
    return summary


def kept_summary(path: str, cache: str | None) -> bytes | None:
    """Return a trace's summary if the cache has it; ``None`` otherwise."""
    place = None if cache is None else _place(path, Path(cache))
    return None if place is None else _read(place)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A trace, and a folder of summaries or nothing, in the encoding of file names."""

    path: bytes
    cache: bytes


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """A summary's bytes, or why there is none, such as that the trace is missing."""

    summary: bytes = b""
    reason: str = ""
    missing: bool = False


def send(pipe: IO[bytes], message: Request | Reply) -> None:
    """Write a message with its length before it."""
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def receive(pipe: IO[bytes], kind: type[_Message]) -> _Message:
    """Read a message. Raises ``EOFError`` if the other side has ended."""
    head = pipe.read(8)
    data = pipe.read(int.from_bytes(head, "little"))
    if len(head) < 8 or len(data) < int.from_bytes(head, "little"):
        raise EOFError
    return msgspec.msgpack.decode(data, type=kind)


def main() -> int:
    """Read the traces that requests on standard input name, and reply on standard output."""
    keep_freed()
    replies = sys.stdout.buffer
    sys.stdout = sys.stderr  # what else is printed is no reply
    while True:
        try:
            request = receive(sys.stdin.buffer, Request)
        except EOFError:
            return 0
        try:
            cache = os.fsdecode(request.cache) if request.cache else None
            reply = Reply(summary=read_summary(os.fsdecode(request.path), cache))
        except BackspotError as error:
            reason = str(error).encode(errors="replace").decode()
            reply = Reply(reason=reason, missing=isinstance(error, SourceNotFoundError))
        send(replies, reply)


def _summary_in(file: Path) -> Summary | None:
    """Return the summary if the file is one; what cannot be read is an error of the trace."""
    with suppress(OSError):
        return from_file(file)
    return None


def _read(place: Path) -> bytes | None:
    """Return an entry of the cache, ``None`` if there is none; a broken one is written again."""
    with suppress(OSError, NotATraceError):
        content = place.read_bytes()
        from_bytes(content)
        return content
    return None


def _place(path: str, cache: Path) -> Path | None:
    """Return where the cache keeps a trace's summary; ``None`` if the trace cannot be read."""
    try:
        state = version(path, _HEAD) if is_remote(path) else _version(Path(path))
    except (OSError, SourceNotFoundError):
        return None
    key = f"{SCHEMA} {__version__} {path} {state}"
    return cache / f"{sha256(os.fsencode(key)).hexdigest()}{SUFFIX}"


def _version(path: Path) -> str:
    about = path.stat()
    with path.open("rb") as file:
        head = sha256(file.read(_HEAD)).hexdigest()
    return f"{about.st_size} {about.st_mtime_ns} {head}"


def _keep(place: Path, summary: bytes) -> None:
    """Write an entry whole or not at all. A cache that cannot be written is no error."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(summary)
        Path(file.name).replace(place)
