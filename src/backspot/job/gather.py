"""From the traces of a job to its answer: reduce each one where it lies, keep what was reduced.

Other processes read the traces, so that a trace that is damaged, or too large for the memory, costs
its own rank only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from backspot.errors import SourceNotFoundError, UsageError
from backspot.formatting import failures, quoted
from backspot.job.answer import answer
from backspot.job.readers import readers
from backspot.job.remote import is_remote, remote_traces
from backspot.job.summary import SUFFIX, from_bytes
from backspot.job.worker import read_summary
from backspot.paths import path_text
from backspot.progress import Progress
from backspot.results.job import JobReport, LostRank
from backspot.trace.read import traces_in

Sources: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"


def ranks(
    sources: Sources,
    executor: Executor | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
) -> JobReport:
    """Put the traces of a training job's ranks together.

    Args:
        sources: A folder with one trace for each rank, or the paths of the traces,
            ``s3://bucket/traces`` too (``backspot[remote]``). Summaries that ``cache`` keeps may
            replace their traces.
        executor: Where the traces are read: anything like ``concurrent.futures.Executor``, whose
            workers see the same paths and have the same version of Backspot. ``None`` (default):
            processes on this machine.
        cache: A folder that keeps the summaries, so that a second call reads only what is new.
            ``None`` (default) keeps nothing.

    Returns:
        Which rank is slow, where, and who waits for it. Traces that cannot be used are in ``lost``.

    Raises:
        SourceNotFoundError: If a folder has no traces, or a missing one leaves fewer than two
            ranks.
        UsageError: If fewer than two ranks can be read, two traces are of one rank, or no step is
            common to all.

    Example:
        >>> job = backspot.ranks(["ddp.rank0.trace.json.gz", "ddp.rank1.trace.json.gz"])
        >>> job
        <JobReport of 2 ranks of 2, 2 steps, 0 findings>
    """
    paths = _traces(sources)
    cache_path = None if cache is None else path_text(cache, "ranks(cache=)")
    read = []
    lost = []
    missing = False
    with (
        _pool(executor) as (pool, work),
        Progress("reading", "traces", total=len(paths)) as progress,
    ):
        futures = [pool.submit(work, path, cache_path) for path in paths]
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
        named = "; ".join(failures((trace.source, trace.reason) for trace in lost))
        kind = SourceNotFoundError if missing else UsageError
        raise kind(f"fewer than two ranks can be read: {named}")
    return answer(read, lost)


def _traces(sources: Sources) -> list[str]:
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    elif not isinstance(sources, Iterable):
        raise UsageError(f"ranks({quoted(sources)}): give a folder, or the paths of traces")
    traces: list[str] = []
    for source in sources:
        path = path_text(source, "ranks")
        if is_remote(path):
            traces += remote_traces(path)
        else:
            traces += map(str, _in_folder(Path(path)) if Path(path).is_dir() else [Path(path)])
    if not traces:
        raise UsageError("ranks([]): give a folder, or the paths of two traces or more")
    return traces


def _in_folder(folder: Path) -> list[Path]:
    """Return the traces directly in a folder, or the summaries if it has no other files."""
    try:
        return traces_in(folder)
    except SourceNotFoundError:
        summaries = sorted(folder.glob(f"*{SUFFIX}"))
        if not summaries:
            raise
        return summaries


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
    with readers() as opened:
        yield opened
