"""Compare recordings before and after a change: what differs, and what is noise.

BEFORE and AFTER are traces, as for show, or reports that were saved as .json.
Two folders with the traces of several ranks are compared as jobs, and so are
two answers of ranks that were saved as .json.

One recording a side tells by how much these two recordings differ. Whether the
code is slower, three or more a side tell, with -- between the sides: each from
a process of its own, recorded in turns.

With --fail-above, the exit code is 8 if the step or its backward takes longer
by more than PERCENT and by more than the noise: in the code with three
recordings a side, else in these recordings, which a busy machine makes longer
too. If the noise is too large to tell, a warning on standard error gives the
noise and the limit, and the exit code is 0, or 9 with --strict. A single step
in a recording cannot tell.

Example:
  backspot diff before.json.gz after.json.gz
  backspot diff main*.json -- branch*.json --fail-above 5
  backspot diff main.json branch.json --format md >> comment.md
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backspot.commands._console import add_format, count, print_result

if TYPE_CHECKING:
    from backspot.presented import Presented
    from backspot.results.comparison import Change, Comparison

EXIT_CODES = (3, 4, 5, 8, 9)
_BETWEEN = "\0--"
"""Stands for ``--`` between the sides; no argument of a program contains a NUL."""


def worded(words: Sequence[str]) -> list[str]:
    """Return the words of the command line with a ``--`` that the parser leaves in its place.

    To the parser, ``--`` ends the options; here it stands between the sides, and options may
    follow.
    """
    return [_BETWEEN if word == "--" else word for word in words]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("before", metavar="BEFORE", help="a trace, a saved report (.json), or -")
    parser.add_argument("after", metavar="AFTER", help="the same, recorded after the change")
    parser.add_argument(
        "more",
        nargs="*",
        metavar="MORE",
        help="several on each side, as BEFORE BEFORE BEFORE -- AFTER AFTER AFTER",
    )
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
        help="exit with 8 if the step or its backward takes longer by more than this and the noise",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --fail-above, exit with 9 if the noise is too large to tell",
    )


def run(args: argparse.Namespace) -> int:
    """Read all recordings, compare and print."""
    from backspot.commands._console import complain, flush_output
    from backspot.comparison.compare import compare
    from backspot.comparison.judge import too_noisy
    from backspot.errors import SlowerError, TooNoisyError, UsageError
    from backspot.render.view import View

    befores, afters = _sides([args.before, args.after, *args.more])
    if [*befores, *afters].count("-") > 1:
        raise UsageError("only one of BEFORE and AFTER can be standard input")
    if args.strict and args.fail_above is None:
        raise UsageError("--strict needs a limit: add --fail-above PERCENT")
    (before, old_paths), (after, new_paths) = _read(befores), _read(afters)
    names = (
        _told_apart(old_paths[0], new_paths[0])
        if len(old_paths) == len(new_paths) == 1
        else ("", "")
    )
    comparison = compare(before, after, names=names)
    print_result(comparison, args, View(), comparison.notes)
    if args.fail_above is None:
        return 0
    if comparison.slower_than(args.fail_above):
        flush_output()
        raise SlowerError(_told(comparison, args.fail_above))
    unknown = [
        change
        for change in (comparison.step, comparison.whole)
        if change.too_noisy_for(args.fail_above)
    ]
    if unknown:
        flush_output()
        message = f"{too_noisy(unknown[0], args.fail_above, comparison.about)} (--fail-above)"
        if args.strict:
            raise TooNoisyError(message)
        complain(f"warning: {message}")
    return 0


def _sides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The recordings before and after the ``--``; without it, there is one of each."""
    from backspot.errors import UsageError

    usage = "backspot diff BEFORE … -- AFTER …"
    if _BETWEEN not in words:
        if len(words) > 2:
            raise UsageError(
                f"{len(words)} recordings, and no -- that tells which are before the change and "
                f"which after: {usage}"
            )
        return [words[0]], [words[1]]
    position = words.index(_BETWEEN)
    before, after = list(words[:position]), list(words[position + 1 :])
    if _BETWEEN in after:
        raise UsageError(f"-- stands twice: put it once, between the two sides: {usage}")
    for side, name, place in ((before, "BEFORE", "before"), (after, "AFTER", "after")):
        if not side:
            raise UsageError(f"no {name}: name at least one recording {place} the --: {usage}")
    return before, after


def _told(comparison: Comparison, limit: float) -> str:
    """What is too slow, and whether that is said of the code."""

    def by(change: Change) -> float:
        return math.inf if change.percent is None else change.percent

    slower = max(
        (change for change in (comparison.step, comparison.whole) if change.exceeds(limit)), key=by
    )
    unit = "step" if slower.kind == "step" else "backward"
    allowed = f"--fail-above {limit:g} does not allow"
    if comparison.about == "code":
        change = "" if slower.percent is None else f" by {slower.percent:.1f}%"
        return f"the {unit} got slower{change}, which {allowed}"
    change = "" if slower.percent is None else f"{slower.percent:.1f}% "
    return (
        f"the {unit} took {change}longer in the recording after, which {allowed}; three "
        "recordings on each side tell whether that is the code"
    )


def _read(sources: Sequence[str]) -> tuple[list[Presented], list[str]]:
    """The reports, and the paths of what they were read from."""
    pairs = [_read_one(source) for source in sources]
    if len(pairs) == 1:
        return [pairs[0][0]], [pairs[0][1]]
    from dataclasses import replace

    from backspot.results.report import Report

    named = [
        replace(report, trace=Path(path).name) if isinstance(report, Report) else report
        for report, path in pairs
    ]
    return named, [path for _, path in pairs]


def _read_one(source: str) -> tuple[Presented, str]:
    from backspot.commands._source import is_report, read
    from backspot.commands._verbs import read_other

    if (other := read_other(source)) is not None:
        return other, source
    report = read(source)
    is_trace = not is_report(source) and Path(report.trace).is_file()
    return report, report.trace if is_trace else source


def _told_apart(before: str, after: str) -> tuple[str, str]:
    """The shortest ends of two paths that differ."""
    old, new = Path(before).parts, Path(after).parts
    for length in range(1, max(len(old), len(new)) + 1):
        if old[-length:] != new[-length:]:
            return str(Path(*old[-length:])), str(Path(*new[-length:]))
    return Path(before).name, Path(after).name


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage of at least 0")
    return value
