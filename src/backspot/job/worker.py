"""One trace of a job, read in a process of its own or by a worker of an executor.

What this file imports, each of these processes imports: nothing that only the answer needs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from backspot._version import __version__
from backspot.errors import BackspotError, NotATraceError, SourceNotFoundError
from backspot.job.reduce import summarize
from backspot.job.remote import copied, is_remote, version
from backspot.job.summary import SCHEMA, from_bytes, to_bytes

__all__ = ["kept_summary", "main", "read_summary"]

_HEAD = 1 << 20
"""Bytes of a trace that are part of its key in the cache."""


def read_summary(path: str, cache: str | None = None) -> bytes:
    """Read one trace in this process.

    Args:
        path: a trace file.
        cache: a folder of summaries that were read before; ``None`` for none.

    Returns:
        The summary's bytes.

    Raises:
        BackspotError: As ``summarize``.
    """
    place = None if cache is None else _place(path, Path(cache))
    if place is not None and (kept := _read(place)) is not None:
        return kept
    with copied(path) if is_remote(path) else nullcontext(Path(path)) as file:
        summary = to_bytes(msgspec.structs.replace(summarize(file), source=path))
    if place is not None:
        _keep(place, summary)
    return summary


def kept_summary(path: str, cache: str | None) -> bytes | None:
    """Return a trace's summary if the cache has it; ``None`` otherwise."""
    place = None if cache is None else _place(path, Path(cache))
    return None if place is None else _read(place)


def main(path: str, cache: str = "") -> int:
    """Read one trace in a process of its own, and write the summary to standard output."""
    try:
        summary = read_summary(path, cache or None)
    except BackspotError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sys.stdout.buffer.write(summary)
    return 0


def _read(place: Path) -> bytes | None:
    """Return an entry of the cache, ``None`` if there is none; a broken one is written again."""
    with suppress(OSError, NotATraceError):
        kept = place.read_bytes()
        from_bytes(kept)
        return kept
    return None


def _place(path: str, cache: Path) -> Path | None:
    """Return where the cache keeps a trace's summary; ``None`` if the trace cannot be read."""
    try:
        state = version(path, _HEAD) if is_remote(path) else _version(Path(path))
    except (OSError, SourceNotFoundError):
        return None
    key = f"{SCHEMA} {__version__} {path} {state}"
    return cache / f"{sha256(os.fsencode(key)).hexdigest()}.rank"


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
