"""Print the ranked list of a trace: the slowest backward modules first.

TRACE is a .json or .json.gz as torch.profiler exports it, a folder of such (its
newest is read), or - for standard input.

Example:
  backspot show trace.json.gz --top 10 --depth 2
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from backspot.commands._console import add_jobs, count

if TYPE_CHECKING:
    from backspot.results.report import Report

EXIT_CODES = (3, 4, 5)

_TOP = 15


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("trace", metavar="TRACE", help="a trace, a folder of traces, or -")
    parser.add_argument(
        "--top",
        type=count,
        metavar="N",
        help=f"how many modules to show (table: {_TOP}, md: 30, else all)",
    )
    parser.add_argument(
        "--depth",
        type=count,
        metavar="D",
        help="fold every module deeper than this into its ancestor",
    )
    parser.add_argument(
        "--by",
        choices=("path", "class", "pattern"),
        default="path",
        help="a row for each module, each class, or each layer that repeats (blocks.*.attn)",
    )
    parser.add_argument(
        "--sort",
        choices=("wall", "gpu", "cpu"),
        default="wall",
        help="the time to rank by (default: wall)",
    )
    parser.add_argument(
        "--format",
        choices=("table", "json", "csv", "md"),
        default="table",
        help="the form of the output (default: table)",
    )
    add_jobs(parser)


def run(args: argparse.Namespace) -> int:
    """Read, rank and print."""
    from backspot.commands._source import read

    _print(read(args.trace, jobs=args.jobs), args)
    return 0


def _print(report: Report, args: argparse.Namespace) -> None:
    import sys

    from backspot.commands._console import complain, use_color, write_bytes, write_text

    view = {"depth": args.depth, "sort": args.sort, "by": args.by}
    if args.format == "table":
        from backspot.render.text import render_text

        top = _TOP if args.top is None else args.top
        write_text(render_text(report, top=top, color=use_color(sys.stdout), **view))
        return
    if args.format == "md":
        from backspot.render.markdown import to_markdown

        write_bytes(to_markdown(report, top=30 if args.top is None else args.top, **view))
        return
    chosen = _chosen(report, args)
    if args.format == "json":
        from backspot.render.json import to_json

        write_bytes(to_json(chosen))
        return
    from backspot.render.tables import to_csv

    write_bytes(to_csv(chosen))
    for warning in report.warnings:  # the other forms hold them
        complain(f"warning: {warning}")


def _chosen(report: Report, args: argparse.Namespace) -> Report:
    """The report with the rows that were asked for; what no module owns is never left out."""
    from dataclasses import replace

    rows = report.top(depth=args.depth, sort=args.sort, by=args.by)
    if args.top is not None:
        left_out = {id(row) for row in [row for row in rows if row.is_module][args.top :]}
        rows = tuple(row for row in rows if id(row) not in left_out)
    return replace(report, modules=rows)
