"""Print the ranked list of a trace: the slowest backward modules first.

TRACE is a .json or .json.gz that torch.profiler exported, a folder (its newest
trace is read), or - for standard input.

Example:
  backspot show trace.json.gz --top 10 --depth 2
"""

from __future__ import annotations

import argparse

from backspot.commands._console import add_jobs, add_rows, count
from backspot.commands._output import add_format, print_result

EXIT_CODES = (3, 4, 5)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("trace", metavar="TRACE", help="a trace, a folder of traces, or -")
    parser.add_argument(
        "--top",
        type=count,
        metavar="N",
        help="how many modules to show (default: 15 in a table, 30 in md, otherwise all)",
    )
    add_rows(parser)
    parser.add_argument(
        "--by",
        choices=("path", "class", "pattern"),
        default="path",
        help="one row per module, class or repeated layer, like blocks.*.attn (default: path)",
    )
    parser.add_argument(
        "--sort",
        choices=("wall", "gpu", "cpu"),
        default="wall",
        help="the time to rank by (default: wall)",
    )
    add_format(parser, "Report")
    add_jobs(parser)


def run(args: argparse.Namespace) -> int:
    """Read, rank and print."""
    from backspot.commands._source import read
    from backspot.render.view import View

    report = read(args.trace, jobs=args.jobs)
    view = View(depth=args.depth, sort=args.sort, by=args.by, match=args.match)
    print_result(report, args.format, view, args.top, report.warnings)
    return 0
