"""Put the traces of a job's ranks together: which is slow, where, and who waits.

SOURCE is a folder with one trace for each rank, or the traces themselves, here
or at a place such as s3://bucket/traces. The summaries that --cache keeps may
stand in place of their traces, and so may one answer that was saved as .json.
A trace that cannot be read costs its own rank only, and is named.

Example:
  backspot ranks traces/ -o job.html
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from backspot.commands._console import add_width, count, write_bytes, write_text
from backspot.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from backspot.results.job import JobReport

EXIT_CODES = (3, 6, 7)
_MORE = ("--top {} for all ranks, steps and modules", "-o job.html")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "sources", metavar="SOURCE", nargs="+", help="a folder of traces, or the traces"
    )
    parser.add_argument(
        "--top",
        type=count,
        default=3,
        metavar="N",
        help="how many ranks, steps and modules to show (default: 3)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="also write the answer to this .html or .json"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help="keep there a summary of each trace, for the next time",
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="read the traces on the workers of this Dask cluster, which see the same paths",
    )
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="a table, or the answer as JSON (default: table)",
    )
    add_width(parser)


def run(args: argparse.Namespace) -> int:
    """Read all traces and print the answer."""
    if args.output is not None:
        from backspot.render.files import check_target
        from backspot.render.formats import format_for
        from backspot.results.job import JobReport

        # A wrong name is reported before the traces are read, which can take long.
        format_for(args.output, JobReport)
        check_target(args.output, force=args.force, sources=args.sources)

    job = _job(args)
    if args.output is not None:
        job.save(args.output, force=args.force)
    if args.format == "json":
        from backspot.render.json import job_to_json

        write_bytes(job_to_json(job))
        return 0
    from backspot.render.job import render_job

    write_text(render_job(job, args.top, width=args.width, more=_MORE))
    return 0


def _job(args: argparse.Namespace) -> JobReport:
    from backspot.commands._source import is_report
    from backspot.job.gather import ranks
    from backspot.results.job import JobReport

    if len(args.sources) == 1 and is_report(args.sources[0], "backspot.job"):
        return JobReport.load(args.sources[0])
    with _cluster(args.scheduler) as executor:
        return ranks(args.sources, executor, cache=args.cache)


@contextmanager
def _cluster(address: str | None) -> Iterator[Executor | None]:
    """Yield what runs on a Dask cluster; ``None`` without an address."""
    if address is None:
        yield None
        return
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise MissingDependencyError(
            "--scheduler needs Dask, which is not installed: pip install 'backspot[dask]'"
        ) from None
    try:
        client = Client(address)
    except (OSError, ValueError) as error:
        raise UsageError(f"--scheduler {address}: {error}") from None
    with client:
        yield client.get_executor()
