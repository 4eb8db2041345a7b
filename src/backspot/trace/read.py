"""Read a trace from anything that a user has: a file, a folder, a stream or a profiler."""

from __future__ import annotations

import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from backspot.errors import BackspotError, NotATraceError, SourceNotFoundError, UsageError
from backspot.formatting import visible
from backspot.trace.chrome import ChromeDecoder
from backspot.trace.events import Events
from backspot.trace.metadata import find_events
from backspot.trace.names import TRACE_EVENTS
from backspot.trace.parallel import decode_in_parts, paying_jobs
from backspot.trace.profiler import is_profiler, read_profiler
from backspot.trace.stream import GZIP, Progress, Read, plain

__all__ = ["Progress", "newest", "read_events", "trace_bytes", "trace_file", "traces_in"]

_SUFFIXES = (".json", ".json.gz")
_SMALL = 1 << 20
_REPORT = re.compile(rb'\{\s*"modules"\s*:')


def read_events(
    source: Any,
    *,
    progress: Progress | None = None,
    jobs: int | None = None,
) -> Events:
    """Read a trace.

    Args:
        source: the path of a ``.json`` or ``.json.gz`` that ``export_chrome_trace`` wrote; a
            folder as ``tensorboard_trace_handler`` writes it (its newest trace is read); ``"-"``
            for standard input; an open binary file; or a ``torch.profiler.profile`` that has
            stopped.
        progress: called now and then with the bytes read so far and the size of the file.
        jobs: the largest number of processes that decode a plain file; a small file is decoded by
            this process alone, and so is everything that is no plain file. ``None`` (default)
            chooses by the number of processors. The result is the same.

    Raises:
        SourceNotFoundError: If there is nothing to read.
        NotATraceError: If the source is no trace, or is broken beyond use.
        UsageError: If ``source`` is none of these, or a profiler that cannot be read now.
    """
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
        raise UsageError(f"jobs={jobs!r}: give a whole number of at least 1, or None")
    if isinstance(source, (str, os.PathLike)):
        if os.fspath(source) == "-":
            return _read_stream(sys.stdin.buffer, "standard input", None, progress)
        if not os.fspath(source):  # Path("") would be the working folder
            raise SourceNotFoundError("an empty path names no trace: give a file or a folder")
        return _read_path(_path(source), progress, jobs)
    if is_profiler(source):
        return read_profiler(source)
    if hasattr(source, "read"):
        name = getattr(source, "name", None)
        return _read_stream(source, str(name or "the open file"), None, progress)
    raise UsageError(
        f"locate({type(source).__name__}): give a trace's path, an open binary file "
        "or a torch.profiler.profile"
    )


def _path(source: str | os.PathLike[str]) -> Path:
    try:
        named = os.fsencode(source)
    except ValueError:  # half a surrogate pair
        named = b"\0"
    if b"\0" in named:
        raise UsageError(f"{os.fspath(source)!a} is not a valid path: check it")
    return Path(source)


def _read_path(path: Path, progress: Progress | None, jobs: int | None) -> Events:
    try:
        if path.is_dir():
            path = newest(path)
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if stat.S_ISREG(about.st_mode) and not file.peek(2).startswith(GZIP):
                many = paying_jobs(about.st_size, jobs)
                decoder = decode_in_parts(path, about.st_size, many, progress)
                if decoder is not None:
                    return _finished(decoder, str(path))
            return _read_stream(file, str(path), about.st_size, progress)
    except SourceNotFoundError:
        raise
    except FileNotFoundError:
        # A path has lost the second slash of an address.
        is_address = re.match(r"[a-z][a-z0-9+]+:[/\\]", str(path))
        remedy = "download it first" if is_address else "check the trace's path"
        raise SourceNotFoundError(f"{path} is not there: {remedy}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise SourceNotFoundError(f"{path} cannot be read: {reason}") from None


def trace_file(source: str | os.PathLike[str]) -> Path:
    """Return the file that a path names, or the newest trace in a folder; raises as ``newest``."""
    path = Path(source)
    try:
        return newest(path) if path.is_dir() else path
    except OSError as error:
        if isinstance(error, BackspotError):
            raise
        raise SourceNotFoundError(
            f"{visible(os.fspath(path))} cannot be read: {error.strerror or error}"
        ) from error


def newest(folder: Path) -> Path:
    """Return the newest trace directly in a folder; ``SourceNotFoundError`` if it has none."""
    return max(traces_in(folder), key=lambda entry: (entry.stat().st_mtime_ns, entry.name))


def traces_in(folder: Path) -> list[Path]:
    """Return the traces directly in a folder, by name; raises as ``newest``."""
    traces = [
        entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIXES) and entry.is_file()
    ]
    if not traces:
        raise SourceNotFoundError(
            f"{folder} has no trace: there is no .json or .json.gz directly in it"
        )
    # Newer reports and settings may lie beside the traces. Without a trace, one of them is refused.
    return sorted(entry for entry in traces if not _is_other_json(entry)) or sorted(traces)


def _is_other_json(path: Path) -> bool:
    """Whether this is a saved report, or a small and complete JSON object that is no trace."""
    try:
        with path.open("rb") as file:
            head = file.read(_SMALL).strip()
            complete = not file.read(1) and head.startswith(b"{") and head.endswith(b"}")
    except OSError:
        return False
    return _REPORT.match(head) is not None or (complete and TRACE_EVENTS not in head)


def _read_stream(
    file: IO[bytes], source: str, total: int | None, progress: Progress | None
) -> Events:
    try:
        with plain(file, total, progress) as read:
            decoder = ChromeDecoder(read, source)
            decoder.run()
    except zlib.error as error:
        raise NotATraceError(
            f"{source} is a broken gzip file ({error}): export or copy it again"
        ) from None
    return _finished(decoder, source)


def _finished(decoder: ChromeDecoder, source: str) -> Events:
    truncated, columns = decoder.truncated, decoder.columns
    if decoder.malformed and not len(columns):
        raise NotATraceError(
            f"{source} is broken beyond use: none of its {decoder.malformed} events can be read"
        )
    if not len(columns) and (truncated or not decoder.seen):
        reason = "cut short before its first event" if truncated else "without a single event"
        raise NotATraceError(f"{source} is {reason}: export the trace again")
    if not len(columns):
        raise NotATraceError(f"{source} has trace events, but none that PyTorch's profiler wrote")
    warnings = []
    if truncated:
        warnings.append(
            f"The trace is cut short: the {len(columns):,} complete events before that are used. "
            "GPU work and whole steps may be missing, so no causes are given: copy or export it "
            "again."
        )
    if decoder.malformed:
        warnings.append(f"{decoder.malformed} malformed events were left out.")
    return columns.finish(source, warnings, impossible=decoder.impossible, truncated=truncated)


@contextmanager
def trace_bytes(path: Path) -> Iterator[tuple[bytes, Read]]:
    """Yield the unpacked text of a trace up to its first event, and a function that reads on."""
    with path.open("rb") as file, plain(file, None, None) as read:
        before: list[bytes] = []
        rest = find_events(read, str(path), before.append)
        head = b"".join(before)

        def following(size: int) -> bytes:
            nonlocal rest
            data, rest = (rest, b"") if rest else (read(size), b"")
            return data

        yield head, following
