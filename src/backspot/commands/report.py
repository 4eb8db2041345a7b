"""Write the report of a trace to a file; the suffix decides the format.

Among the suffixes are .html (a page that needs nothing else), .txt (what
show --full prints), .json (for backspot.Report.load), .csv, .md, and, for
flame graphs, .speedscope.json.

Example:
  backspot report trace.json.gz -o report.html
  backspot report runs/ -o flames.speedscope.json
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import replace

from backspot.commands._console import add_jobs, add_peaks, add_rows

EXIT_CODES = (3, 4, 5, 6)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "trace", metavar="TRACE", help="a trace, a folder of traces, a saved report .json, or -"
    )
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write")
    add_rows(parser)
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_jobs(parser)
    add_peaks(parser)


def _sources(trace: str) -> list[str | int]:
    """The files that the report is made of, as far as they are known before reading."""
    if trace != "-":
        return [trace]
    with suppress(AttributeError, OSError, ValueError):  # closed, or not a file
        return [sys.stdin.fileno()]
    return []


def run(args: argparse.Namespace) -> int:
    """Read, rank and write."""
    from backspot.render import renderer_for
    from backspot.render.files import check_target

    # A wrong name is reported before the trace is read, which can take long.
    renderer_for(args.output)
    check_target(args.output, force=args.force, sources=_sources(args.trace))

    from backspot.commands._console import complain, write_text
    from backspot.commands._source import is_report, mention_ranks, read
    from backspot.formatting import visible

    report = read(
        args.trace,
        depth=args.depth,
        jobs=args.jobs,
        peak_tflops=args.peak_tflops,
        peak_gbps=args.peak_gbps,
    )
    if args.match:
        report = replace(report, modules=report.top(match=args.match))
    path = report.save(args.output, force=args.force)
    for warning in report.warnings:
        complain(f"warning: {warning}")
    write_text(f"Wrote {visible(str(path))}")
    if args.trace != "-" and not is_report(args.trace):
        mention_ranks(report.trace, [args.trace])
    return 0
