"""Compare two traces or saved reports: what got slower, and what is only noise.

BEFORE and AFTER are traces, as for show, or reports that were saved as .json.
Two folders with the traces of several ranks are compared as jobs, and so are
two answers of ranks that were saved as .json.
With --fail-above, the exit code is 8 if the step or its backward got slower by
more than PERCENT and by more than the noise. If the noise is too large to tell,
a warning on standard error gives the noise and the limit, and the exit code is
0, or 9 with --strict. A single step on either side cannot tell.

Example:
  backspot diff before.json.gz after.json.gz
  backspot diff main.json branch.json --fail-above 5 --format md >> comment.md
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from backspot.commands._console import add_format, count, print_result

if TYPE_CHECKING:
    from backspot.results.job import JobReport
    from backspot.results.report import Report

EXIT_CODES = (3, 4, 5, 8, 9)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("before", metavar="BEFORE", help="a trace, a saved report (.json), or -")
    parser.add_argument("after", metavar="AFTER", help="the same, recorded after the change")
    parser.add_argument(
        "--top",
        type=count,
        metavar="N",
        help="how many changes to show (default: 5 in a table, 30 in md, otherwise all)",
    )
    add_format(parser, "Comparison")
    parser.add_argument(
        "--fail-above",
        type=_percent,
        metavar="PERCENT",
        help="exit with 8 if the step or its backward got slower by more than this and the noise",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --fail-above, exit with 9 if the noise is too large to tell",
    )


def run(args: argparse.Namespace) -> int:
    """Read both, compare and print."""
    from backspot.commands._console import complain, flush_output
    from backspot.comparison.compare import compare
    from backspot.comparison.judge import too_noisy
    from backspot.errors import SlowerError, TooNoisyError, UsageError
    from backspot.render.view import View

    if args.before == args.after == "-":
        raise UsageError("only one of BEFORE and AFTER can be standard input")
    if args.strict and args.fail_above is None:
        raise UsageError("--strict needs a limit: add --fail-above PERCENT")
    (before, was), (after, now) = _read(args.before), _read(args.after)
    comparison = compare(before, after, names=_told_apart(was, now))
    print_result(comparison, args, View(), comparison.notes)
    if args.fail_above is None:
        return 0
    if comparison.slower_than(args.fail_above):
        flush_output()
        slower = max(
            (one for one in (comparison.step, comparison.whole) if one.verdict == "slower"),
            key=lambda one: math.inf if one.percent is None else one.percent,
        )
        change = "" if slower.percent is None else f" by {slower.percent:.1f}%"
        what = "step" if slower.kind == "step" else "backward"
        limit = f"--fail-above {args.fail_above:g}"
        raise SlowerError(f"the {what} got slower{change}, which {limit} does not allow")
    unknown = [
        one for one in (comparison.step, comparison.whole) if one.too_noisy_for(args.fail_above)
    ]
    if unknown:
        flush_output()
        told = f"{too_noisy(unknown[0], args.fail_above)} (--fail-above)"
        if args.strict:
            raise TooNoisyError(told)
        complain(f"warning: {told}")
    return 0


def _read(source: str) -> tuple[Report | JobReport, str]:
    """The report, and the path of what it was read from."""
    from backspot.commands._source import is_job, is_report, read
    from backspot.job.gather import ranks
    from backspot.results.job import JobReport

    if is_report(source, "backspot.job"):
        return JobReport.load(source), source
    if is_job(source):
        return ranks(source), source
    report = read(source)
    is_trace = not is_report(source) and Path(report.trace).is_file()
    return report, report.trace if is_trace else source


def _told_apart(before: str, after: str) -> tuple[str, str]:
    """The shortest ends of two paths that differ."""
    was, now = Path(before).parts, Path(after).parts
    for length in range(1, max(len(was), len(now)) + 1):
        if was[-length:] != now[-length:]:
            return str(Path(*was[-length:])), str(Path(*now[-length:]))
    return Path(before).name, Path(after).name


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage of at least 0")
    return value
