"""Copy a trace and add tracks that show when each module's backward runs.

Each thread that ran autograd and each GPU stream that worked for it gets a
track of nested spans "backward: PATH (CLASS)", with arrows from the forward.
Nothing of the original is lost. Open the copy in ui.perfetto.dev.

Example:
  backspot annotate trace.json.gz -o labelled.json.gz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from backspot.commands._console import add_jobs

EXIT_CODES = (3, 4, 5, 6)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("trace", metavar="TRACE", help="a trace, or a folder of traces")
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="the file to write: .json or .json.gz"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_jobs(parser)


def run(args: argparse.Namespace) -> int:
    """Read, attribute and copy."""
    from backspot.commands._console import complain, reading, write_text
    from backspot.formatting import visible
    from backspot.pipeline import locate, trace_file

    source = trace_file(args.trace)
    if source != Path(args.trace):
        complain(f"reading {source}, the newest trace in {args.trace}")
    with reading(str(source)) as progress:
        report = locate(
            source,
            progress=progress.update,
            jobs=args.jobs,
            trace=args.output,
            force=args.force,
        )
    for warning in report.warnings:
        complain(f"warning: {warning}")
    if report.source == "none":
        complain("without labels, the added tracks show little: when the backward runs, not whose")
    write_text(f"Wrote {visible(args.output)}")
    return 0
