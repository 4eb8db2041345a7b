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
import shlex
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backspot.commands._console import add_width, count, note, write_bytes, write_text
from backspot.errors import MissingDependencyError, UsageError
from backspot.formatting import visible

if TYPE_CHECKING:
    from backspot.registry import Rule
    from backspot.results.job import JobReport

EXIT_CODES = (3, 6, 7)
_FAMILY = "backspot.job"
_NAMED = 3
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
        from backspot.render.json import encoded

        write_bytes(encoded(job))
        return 0
    from backspot.render.job import render_job

    write_text(render_job(job, args.top, width=args.width, more=_MORE))
    return 0


# What other verbs ask of this one -----------------------------------------------------------------


def read_other(source: str) -> JobReport | None:
    """Return the answer for a saved one, or for a folder of several ranks; else ``None``."""
    from backspot.commands._source import is_report
    from backspot.job.gather import ranks
    from backspot.results.job import JobReport

    if is_report(source, _FAMILY):
        return JobReport.load(source)
    return ranks(source) if _is_job(source) else None


def show_other(source: str, args: argparse.Namespace) -> bool:
    """Print a saved answer, which has no rows of one trace to choose from; or return false."""
    from backspot.commands._source import is_report

    if not is_report(source, _FAMILY):
        return False
    from backspot.render.job import render_job
    from backspot.results.job import JobReport

    is_given = args.depth is not None or args.match or args.by or args.sort or args.full
    is_given = is_given or args.anonymous
    if is_given or args.output is not None or args.format != "table":
        raise UsageError(
            f"{visible(source)} is an answer for many ranks: show takes --top and --width for it, "
            "and backspot ranks has its other options"
        )
    top = {} if args.top is None else {"top": args.top}
    more = ("--top {} for all ranks, steps and modules", f"backspot ranks {source} -o job.html")
    write_text(render_job(JobReport.load(source), **top, width=args.width, more=more))
    return True


def _is_job(source: str) -> bool:
    """Return whether a source is a folder with the traces of several ranks."""
    if source == "-" or not Path(source).is_dir():
        return False
    from backspot.job.identity import identify
    from backspot.trace.read import traces_in

    ranks_seen: set[int | None] = set()
    with suppress(OSError):  # reading it reports the error
        for trace in traces_in(Path(source)):
            ranks_seen.add(identify(trace).rank)
            if len(ranks_seen - {None}) > 1:
                return True
    return False


def mention_others(trace: str, shown: Collection[str]) -> None:
    """Write one line to standard error if a trace is of one rank of several."""
    from backspot.job.identity import identify

    path = Path(trace)
    with suppress(OSError):  # a hint is not worth an error
        shown_paths = {Path(path_shown).resolve() for path_shown in shown}
        others = [other for other in _others(path) if other.resolve() not in shown_paths]
        identity = identify(path)
        several = identity.world_size > 1
        rank_text = (
            f"{path.name} is of rank {identity.rank} of {identity.world_size}" if several else ""
        )
        if others:
            names = ", ".join(other.name for other in others[:_NAMED])
            more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            note(f"{rank_text or path.name}; other ranks' traces lie beside it: {names}{more}")
            note(f"for all ranks together: backspot ranks {_together([path, *others])}")
        elif rank_text and len(shown) == 1:
            note(rank_text)


def _together(paths: Sequence[Path]) -> str:
    """Return what the shell needs to name these traces: their folder, if it has no other ones."""
    from backspot.trace.read import traces_in

    folder = paths[0].parent
    if {trace.name for trace in traces_in(folder)} == {path.name for path in paths}:
        return shlex.quote(str(folder))
    return " ".join(shlex.quote(str(path)) for path in paths)


def _others(path: Path) -> list[Path]:
    """Return the files beside a trace with names that differ in the rank's number only."""
    from backspot.job.identity import RANK_IN_NAME

    numbers = list(RANK_IN_NAME.finditer(path.name))
    if not numbers:
        return []
    start, end = numbers[-1].span(1)
    before, after = path.name[:start], path.name[end:]
    by_number = {
        int(number): other
        for other in path.parent.iterdir()
        if other.name.startswith(before) and other.name.endswith(after)
        if (number := other.name[start : len(other.name) - len(after)]).isdecimal()
    }
    by_number.pop(int(numbers[-1][1]), None)
    return [by_number[number] for number in sorted(by_number)]


def other_rules() -> Sequence[Rule[Any, Any, Any]]:
    """Return the rules over ranks."""
    from backspot.job.findings import all_rules

    return all_rules()


# The verb ----------------------------------------------------------------------------------------


def _job(args: argparse.Namespace) -> JobReport:
    from backspot.commands._source import is_report
    from backspot.job.gather import ranks
    from backspot.results.job import JobReport

    if len(args.sources) == 1 and is_report(args.sources[0], _FAMILY):
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
