"""From the traces of a job to its answer: reduce each one where it lies, keep what was reduced.

Each trace has a process of its own, so that a trace that is damaged, or too large for the memory,
costs its own rank only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import msgspec

from backspot._version import __version__
from backspot.errors import BackspotError, NotATraceError, SourceNotFoundError, UsageError
from backspot.formatting import quoted, visible
from backspot.job.answer import answer
from backspot.job.reduce import summarize
from backspot.job.remote import copied, is_remote, remote_traces, version
from backspot.job.summary import SCHEMA, from_bytes, to_bytes
from backspot.paths import path_text
from backspot.progress import Progress
from backspot.results.job import JobReport, LostRank
from backspot.trace.read import traces_in

__all__ = ["Sources", "main", "ranks", "read_summary"]

Sources: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

_HEAD = 1 << 20
"""Bytes of a trace that are part of its key in the cache."""
_CODE = "import sys; from backspot.job.gather import main; sys.exit(main(*sys.argv[1:]))"


def ranks(
    sources: Sources,
    executor: Executor | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
) -> JobReport:
    """Put the traces of a training job's ranks together.

    Args:
        sources: A folder with one trace for each rank, or the paths of the traces. Paths such as
            ``s3://bucket/traces`` are read by ``fsspec`` (``backspot[remote]``).
        executor: Where the traces are read: anything with the interface of
            ``concurrent.futures.Executor``. Its workers need the same paths and the same version of
            Backspot. ``None`` (default) starts one process for each trace on this machine, as many
            at once as there are processors.
        cache: A folder that keeps what was read, so that a second call reads only what is new.
            ``None`` (default) keeps nothing.

    Returns:
        Which rank is slow, where, and who waits for it. A trace that cannot be used is in
        ``lost``, and the others are reported.

    Raises:
        SourceNotFoundError: If a folder has no traces, or fewer than two ranks can be read because
            a folder or a trace is missing.
        UsageError: If fewer than two ranks can be read for another reason, two traces are of one
            rank, or the ranks have recorded no step in common.

    Example:
        >>> job = backspot.ranks(["ddp.rank0.trace.json.gz", "ddp.rank1.trace.json.gz"])
        >>> job
        <JobReport of 2 ranks of 2, 2 steps, 0 findings>
    """
    paths = _traces(sources)
    kept = None if cache is None else path_text(cache, "ranks(cache=)")
    read = []
    lost = []
    missing = False
    with (
        _pool(executor) as (pool, work),
        Progress("reading", "traces", total=len(paths)) as progress,
    ):
        futures = [pool.submit(work, path, kept) for path in paths]
        try:
            for path, future in zip(paths, futures, strict=True):
                try:
                    read.append(from_bytes(future.result()))
                except Exception as error:  # whatever ended a worker costs one rank
                    missing = missing or isinstance(error, SourceNotFoundError)
                    reason = str(error) or type(error).__name__
                    lost.append(LostRank(path, reason.removeprefix(f"{path} ")))
                progress.advance()
        except BaseException:  # an interrupt: what is not begun need not be read
            for future in futures:
                future.cancel()
            raise
    if len(read) < 2 and lost:
        named = "; ".join(f"{visible(one.source)} {one.reason}" for one in lost[:3])
        kind = SourceNotFoundError if missing else UsageError
        raise kind(f"fewer than two ranks can be read: {named}")
    return answer(read, lost)


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
    if place is not None:
        with suppress(OSError, NotATraceError):  # a broken entry is written again
            kept = place.read_bytes()
            from_bytes(kept)
            return kept
    with copied(path) if is_remote(path) else nullcontext(Path(path)) as file:
        summary = to_bytes(msgspec.structs.replace(summarize(file), source=path))
    if place is not None:
        _keep(place, summary)
    return summary


def main(path: str, cache: str = "") -> int:
    """Read one trace in a process of its own, and write the summary to standard output."""
    try:
        summary = read_summary(path, cache or None)
    except BackspotError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sys.stdout.buffer.write(summary)
    return 0


def _traces(sources: Sources) -> list[str]:
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    elif not isinstance(sources, Iterable):
        raise UsageError(f"ranks({quoted(sources)}): give a folder, or the paths of traces")
    found: list[str] = []
    for source in sources:
        path = path_text(source, "ranks")
        if is_remote(path):
            found += remote_traces(path)
        else:
            found += map(str, traces_in(Path(path)) if Path(path).is_dir() else [Path(path)])
    if not found:
        raise UsageError("ranks([]): give a folder, or the paths of two traces or more")
    return found


@contextmanager
def _pool(
    executor: Executor | None,
) -> Iterator[tuple[Executor, Callable[[str, str | None], bytes]]]:
    """Yield an executor, and the function that it is to call with a path and the cache."""
    if executor is not None:
        if not callable(getattr(executor, "submit", None)):
            raise UsageError(
                f"executor={quoted(executor)}: give a concurrent.futures.Executor, or None"
            )
        yield executor, read_summary
        return
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield threads, _in_a_process


def _in_a_process(path: str, cache: str | None) -> bytes:
    """Read one trace in a process of its own.

    Raises:
        SourceNotFoundError: If the process says so by its exit code.
        RuntimeError: If the process fails otherwise, with its last words.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", _CODE, path, cache or ""],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        ended = f"the process that read it ended with {done.returncode}"
        not_found = done.returncode == SourceNotFoundError.exit_code
        raise (SourceNotFoundError if not_found else RuntimeError)(said[-1] if said else ended)
    return done.stdout


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
