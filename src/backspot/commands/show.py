"""Print the ranked list of a trace: the slowest backward modules first.

TRACE is a .json or .json.gz that torch.profiler exported, a folder (its newest
trace is read), a report or an answer of ranks that was saved as .json, or - for
standard input. Of several, each follows under its name. If some cannot be read,
the others are printed and the exit code is the highest.

Printed is what fits on one screen, and what to ask for next. --full prints
everything.

Example:
  backspot show trace.json.gz
  backspot show trace.json.gz --full | less
  backspot show trace.json.gz --top 10 --depth 2
  backspot show runs/ --by pattern --sort gpu
  backspot show trace.json.gz --match 'model.layers.*' --width 120
  backspot show trace.json.gz --format json | jq '.findings[].rule'
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from backspot.commands._console import (
    add_jobs,
    add_peaks,
    add_rows,
    complain,
    count,
    flush_output,
    write_text,
)
from backspot.commands._output import add_format, print_result
from backspot.errors import BackspotError, UsageError
from backspot.formatting import visible

EXIT_CODES = (3, 4, 5)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "traces",
        metavar="TRACE",
        nargs="+",
        help="a trace, a folder of traces, a saved report, or -",
    )
    parser.add_argument(
        "--top",
        type=count,
        metavar="N",
        help="how many modules to show (default: 5 in a table, 30 in md, otherwise all)",
    )
    add_rows(parser)
    parser.add_argument(
        "--by",
        choices=("path", "class", "pattern"),
        help="one row per module, class or repeated layer, like blocks.*.attn (default: path; a "
        "screen without --full has repeated layers as one where they are the answer)",
    )
    parser.add_argument(
        "--sort",
        choices=("wall", "gpu", "cpu", "saves", "memory", "headroom"),
        help="the time to rank by; what a step would save without the module; what it has in "
        "memory at the peak; or the device time it would save near the peak (default: wall, or in "
        "a table memory if that was recorded)",
    )
    add_format(parser, "Report")
    add_jobs(parser)
    add_peaks(parser)


def run(args: argparse.Namespace) -> int:
    """Read, rank and print."""
    if len(args.traces) == 1:
        _show(args.traces[0], args)
        return 0
    if args.format != "table":
        raise UsageError(f"--format {args.format} takes one TRACE")
    if args.traces.count("-") > 1:
        raise UsageError("only one TRACE can be standard input")
    worst = 0
    for number, source in enumerate(args.traces):
        if number:
            write_text("")
        write_text(f"── {visible(source)}")
        try:
            _show(source, args)
        except BackspotError as error:
            flush_output()
            complain(f"error: {error}")
            worst = max(worst, error.exit_code)
    return worst


def _show(source: str, args: argparse.Namespace) -> None:
    from backspot.commands._source import is_report, mention_ranks, read
    from backspot.render.view import View, first_view

    if is_report(source, "backspot.job"):
        _show_job(source, args)
        return
    peaks = {"peak_tflops": args.peak_tflops, "peak_gbps": args.peak_gbps}
    report = read(source, jobs=args.jobs, **peaks)
    view = View() if args.sort or args.format != "table" else first_view(report)
    if args.sort in ("memory", "headroom"):
        view = replace(view, order=args.sort)
    elif args.sort:
        view = replace(view, sort=args.sort)
    view = replace(view, depth=args.depth, by=args.by or "path", match=args.match)
    missing = {
        "memory": not report.memory and "memory (--memory)",
        "headroom": not any(row.work for row in report.modules) and "shapes (--shapes)",
    }.get(args.sort)
    if missing:
        complain(
            f"note: sorted by wall time: {visible(source)} was recorded without {missing}; "
            "backspot run writes what it records of this into report.json, not into the trace"
        )
    print_result(report, args, view, report.warnings)
    if source != "-" and not is_report(source):
        flush_output()
        mention_ranks(report.trace, args.traces)


def _show_job(source: str, args: argparse.Namespace) -> None:
    """Print a saved answer for many ranks, which has no rows of one trace to choose from."""
    from backspot.render.job import render_job
    from backspot.results.job import JobReport

    given = args.depth is not None or args.match or args.by or args.sort or args.full
    if given or args.format != "table":
        raise UsageError(
            f"{visible(source)} is an answer for many ranks: show takes --top and --width for it, "
            "and backspot ranks has its other options"
        )
    top = {} if args.top is None else {"top": args.top}
    more = ("--top {} for all ranks, steps and modules", f"backspot ranks {source} -o job.html")
    write_text(render_job(JobReport.load(source), **top, width=args.width, more=more))
