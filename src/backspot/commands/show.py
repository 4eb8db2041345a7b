"""Print or save what a trace says: the slowest backward modules first, and why.

TRACE is a .json or .json.gz that torch.profiler exported, a folder (its newest
trace is read, or the report that run saved with it), a report or an answer of
ranks that was saved as .json, or - for standard input. Of several, each follows
under its name. If some cannot be read, the others are printed and the exit code
is the highest.

Printed is what fits on one screen, and what to ask for next. --full prints
everything. -o writes everything to a file, and its suffix says as what:

    .html                    a page that needs nothing else
    .txt                     what --full prints
    .json                    a report, for show, diff and backspot.Report.load
    .csv, .md                tables
    .speedscope.json         a flame graph for speedscope.app
    .trace.json, .json.gz    the trace, with tracks of "backward: PATH (CLASS)"
                             spans for ui.perfetto.dev; nothing of it is lost

Example:
  backspot show trace.json.gz
  backspot show trace.json.gz --full | less
  backspot show trace.json.gz --top 10 --depth 2
  backspot show runs/ --by pattern --sort gpu
  backspot show trace.json.gz --match 'model.layers.*' --width 120
  backspot show trace.json.gz --what-if 'blocks.*=0.5' --what-if graph
  backspot show trace.json.gz --format json | jq '.findings[].rule'
  backspot show trace.json.gz -o report.html
  backspot show trace.json.gz -o labelled.json.gz
  backspot show runs/ -o shared.html --anonymous
"""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backspot.commands._console import (
    add_format,
    add_preview,
    complain,
    count,
    flush_output,
    positive,
    print_result,
    use_color,
    write_text,
)
from backspot.commands._parts import ORDERS, ROWS
from backspot.errors import BackspotError, UsageError
from backspot.formatting import visible

if TYPE_CHECKING:
    from backspot.results.report import Report

EXIT_CODES = (3, 4, 5, 6)


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
    parser.add_argument(
        "--depth",
        type=count,
        metavar="D",
        help="fold every module deeper than this into its ancestor (0 is the root; one that is "
        "never called, such as a ModuleList, is no level)",
    )
    parser.add_argument(
        "--match",
        action="append",
        metavar="PATTERN",
        help="keep modules such as 'model.layers.*' or '**.attn', and fold every other one into "
        "the nearest around it that is kept (can be repeated)",
    )
    parser.add_argument(
        "--by",
        choices=("path", "class", "pattern", *ROWS),
        help="one row per module, class or repeated layer, like blocks.*.attn"
        f"{''.join(f', or per {row}' for row, _ in ROWS.values())} (default: path; a screen "
        "without --full has repeated layers as one where they are the answer)",
    )
    parser.add_argument(
        "--sort",
        choices=("wall", "gpu", "cpu", "saves", *ORDERS),
        help="the time to rank by; what a step would save without the module; "
        f"{'; '.join(ORDERS.values())} (default: wall, or in a table what is no time, if that was "
        "asked for when it was recorded)",
    )
    parser.add_argument(
        "--what-if",
        action="append",
        metavar="CHANGE",
        help="print what a step would take with this change: 'blocks.*=0.5' (the part of its time "
        "that a module keeps), fuse=MODULE (its chains as one kernel each), no_waits, graph (all "
        "launched at once), optimizer=fused, dtype=bf16, buckets=8 (can be repeated)",
    )
    add_preview(parser)
    add_format(parser, "Report")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write this file, and print no report"
    )
    parser.add_argument(
        "--anonymous",
        action="store_true",
        help="leave out source, files, the command line, errors, and each word that is not "
        "Backspot's own, to share a report; names of modules, classes and functions stay",
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument(
        "--jobs",
        type=count,
        metavar="N",
        help="maximum number of processes for a large uncompressed .json (default: automatic)",
    )
    parser.add_argument(
        "--peak-tflops",
        type=positive,
        metavar="X",
        help="what the device can compute at best, in 10^12 operations per second (default: from a "
        "table, by the device's name)",
    )
    parser.add_argument(
        "--peak-gbps",
        type=positive,
        metavar="X",
        help="the bandwidth of its memory, in 10^9 bytes per second (default: from that table)",
    )


def run(args: argparse.Namespace) -> int:
    """Read, rank and print."""
    if len(args.traces) == 1:
        _show(args.traces[0], args)
        return 0
    for option, is_given in (
        (f"--format {args.format}", args.format != "table"),
        ("-o", args.output),
    ):
        if is_given:
            raise UsageError(f"{option} takes one TRACE")
    if args.traces.count("-") > 1:
        raise UsageError("only one TRACE can be standard input")
    worst = 0
    for number, source in enumerate(args.traces):
        if number:
            write_text("")
        write_text(f"── recording {number + 1}" if args.anonymous else f"── {visible(source)}")
        try:
            _show(source, args)
        except BackspotError as error:
            flush_output()
            complain(f"error: {error}")
            worst = max(worst, error.exit_code)
    return worst


def _show(source: str, args: argparse.Namespace) -> None:
    from backspot.commands._source import is_report, read
    from backspot.commands._verbs import mention_others, show_other
    from backspot.render.parts import first_view
    from backspot.render.view import View
    from backspot.results.report import RANKINGS

    if show_other(source, args):
        return
    if args.output is not None and not args.what_if:
        _write(source, args)
        return
    if args.what_if:
        _show_changes(source, args)
        return
    if args.by in ROWS:
        _show_rows(source, args)
        return
    peaks = {"peak_tflops": args.peak_tflops, "peak_gbps": args.peak_gbps}
    report = read(source, jobs=args.jobs, **peaks)
    if args.anonymous:
        report = _without_names(report)
    view = View() if args.sort or args.format != "table" else first_view(report)
    ranking = RANKINGS.get(args.sort)
    if ranking is not None:
        view = replace(view, order=args.sort)
    elif args.sort:
        view = replace(view, sort=args.sort)
    view = replace(
        view, depth=args.depth, by=args.by or "path", match=args.match, preview=args.preview
    )
    if ranking is not None and not ranking.is_known(report):
        complain(
            f"note: sorted by wall time: {visible(source)} was recorded without {ranking.needs}; "
            "backspot run writes what it records of this into report.json, not into the trace"
        )
    print_result(report, args, view, report.warnings)
    if source != "-" and not args.anonymous and not is_report(source):
        flush_output()
        mention_others(report.trace, args.traces)


def _without_names(report: Report) -> Report:
    from backspot.render.anonymous import anonymous

    return anonymous(report)


def _show_rows(source: str, args: argparse.Namespace) -> None:
    """Print rows of something else than modules."""
    from backspot.commands._source import read

    if args.anonymous:
        raise UsageError(f"--by {args.by} shows lines of source: leave out --anonymous")
    if args.format != "table":
        raise UsageError(f"--by {args.by} goes with a table, not with --format {args.format}")
    report = read(source, jobs=args.jobs)
    _, render = ROWS[args.by]
    write_text(render(report, args.top or None, width=args.width, color=use_color(sys.stdout)))


def _how_to_ask(source: str, options: str) -> str:
    """Return the command that asks the trace of a saved report."""
    from backspot.commands._source import read, trace_of

    trace, is_known = trace_of(read(source), Path(source))
    path = "TRACE" if trace is None else visible(shlex.quote(str(trace)))
    command = f"backspot show {path}{options}"
    if trace is None or is_known:
        return f"Its trace does: {command}"
    return f"Its trace does. If that is {visible(str(trace))}: {command}"


def _show_changes(source: str, args: argparse.Namespace) -> None:
    """Print the step with changes."""
    from backspot.commands._source import is_report, read

    chosen = ("top", "depth", "match", "by", "sort", "full", "output", "anonymous")
    options_given = [f"--{name}" for name in chosen if getattr(args, name) not in (None, False)]
    if options_given or args.format != "table":
        raise UsageError(
            f"--what-if prints no report: leave out {' and '.join(options_given) or '--format'}"
        )
    changes = _asked(args.what_if)
    if is_report(source):
        options = "".join(f" --what-if {shlex.quote(asked)}" for asked in args.what_if)
        raise UsageError(
            f"{visible(source)} is a saved report, which holds no recording to replay. "
            f"{_how_to_ask(source, options)}"
        )
    report = read(source, replays=True, jobs=args.jobs)
    try:
        write_text(str(report.what_if(**changes)))
    except KeyError as error:
        raise UsageError(f"--what-if: {error.args[0]}") from None


def _asked(changes: list[str]) -> dict[str, Any]:
    """Return changes as ``what_if`` takes them."""
    asked: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.rpartition("=")
        if change in ("no_waits", "graph"):
            asked[change] = True
        elif name == "fuse":
            asked.setdefault("fuse", []).append(value)
        elif name in ("optimizer", "dtype"):
            asked[name] = value
        elif name == "buckets":
            asked[name] = int(value) if value.isdecimal() else value
        elif equals:
            try:
                asked.setdefault("factors", {})[name] = float(value)
            except ValueError:
                raise UsageError(
                    f"--what-if {visible(change)}: give the part of its time that a module keeps, "
                    f"such as {visible(name)}=0.5"
                ) from None
        else:
            raise UsageError(
                f"--what-if {visible(change)}: give MODULE=PART, fuse=MODULE, no_waits, graph, "
                "optimizer=fused, dtype=bf16 or buckets=8"
            )
    return asked


def _write(source: str, args: argparse.Namespace) -> None:
    """Write the whole report to a file, or a copy of the trace with tracks."""
    from backspot.commands._source import is_report, read
    from backspot.commands._verbs import mention_others
    from backspot.presented import LABELLED
    from backspot.render import renderer_for
    from backspot.render.files import check_target

    labelled = args.output.lower().endswith(LABELLED)
    _refuse_choices(args, labelled=labelled)
    if labelled and args.anonymous:
        raise UsageError(
            f"--anonymous writes reports, such as .html and .json, not {visible(args.output)}: a "
            "trace has names in places that nobody lists"
        )
    # A wrong name is reported before the trace is read, which can take long.
    if not labelled:
        renderer_for(args.output)
    check_target(args.output, force=args.force, sources=_files(source))
    saved = is_report(source)
    report = read(
        source,
        depth=args.depth,
        jobs=args.jobs,
        peak_tflops=args.peak_tflops,
        peak_gbps=args.peak_gbps,
        trace=args.output if labelled and not saved else None,
        force=args.force,
    )
    if args.anonymous:
        report = _without_names(report)
    if args.match:
        report = replace(report, modules=report.top(match=args.match))
    if saved or not labelled:
        report.save(args.output, force=args.force, preview=args.preview)
    for warning in report.warnings:
        complain(f"warning: {warning}")
    if labelled and report.source == "none":
        complain("without labels, the added tracks show little: when the backward runs, not whose")
    write_text(f"Wrote {visible(args.output)}")
    if source != "-" and not saved:
        mention_others(report.trace, [source])


def _refuse_choices(args: argparse.Namespace, *, labelled: bool) -> None:
    """Refuse options that choose what is printed, and do not change the file."""
    refused = ["top", "by", "sort", "full", "width", *(["depth", "match"] if labelled else [])]
    options_given = [f"--{name}" for name in refused if getattr(args, name) not in (None, False)]
    if args.format != "table":
        options_given.append("--format")
    if options_given:
        raise UsageError(
            f"{visible(args.output)} has everything, in the form of its suffix: leave out "
            f"{' and '.join(options_given)}"
        )


def _files(source: str) -> list[str | int]:
    """The files that the output is made of, as far as they are known before reading."""
    if source != "-":
        return [source]
    with suppress(AttributeError, OSError, ValueError):  # closed, or not a file
        return [sys.stdin.fileno()]
    return []
