"""The command line: one verb a file, each with ``prepare_parser(parser)`` and ``run(args) -> int``.

A verb's module docstring is its help; its ``EXIT_CODES`` are those that not every verb can give. A
verb imports what it works with inside ``run``, so that the help, and the errors, come at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from backspot._version import __version__
from backspot.commands._console import abandon_output, complain, flush_output
from backspot.errors import BackspotError, UsageError

__all__ = ["main"]

VERBS = ("demo", "show", "report", "annotate", "diff")
"""In the order in which the help lists them; each is a module of this package."""

_ABOUT = """\
Find the module that makes a PyTorch backward pass slow.

A trace is what torch.profiler exports. Modules are told by their labels: record
the trace within backspot.instrument(model) to have them.
"""
_CODES = {
    0: "fine",
    1: "an error of Backspot's own",
    2: "usage",
    3: "not found, not readable, or a folder without traces",
    4: "not a trace, or broken beyond use",
    5: "a trace without a backward pass",
    6: "the output exists",
    7: "an optional part is not installed",
    8: "slower than diff --fail-above allows",
    130: "interrupted",
}
_EXAMPLE = """\
example:
  backspot show trace.json.gz --top 10 --depth 2

"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and leaves it to ``main`` to end the program."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help tells more)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; ``None`` takes the program's own.

    Returns:
        The exit code.
    """
    try:
        code = _run(argv)
        flush_output()
    except BrokenPipeError:
        # Whoever read the output has enough, as head does: nothing is wrong.
        abandon_output()
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("BACKSPOT_DEBUG"):
            import traceback

            traceback.print_exc()
        return _failed(error)
    return code


def _run(argv: Sequence[str] | None) -> int:
    parser = _Parser(
        prog="backspot",
        description=_ABOUT,
        epilog=_EXAMPLE + _exit_codes(tuple(_CODES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"backspot {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for name in VERBS:
        verb = import_module(f"backspot.commands.{name}")
        about, _, example = (verb.__doc__ or "").partition("Example:\n")
        prepared = verbs.add_parser(
            name,
            help=about.partition("\n")[0].rstrip("."),
            description=about.strip(),
            epilog=f"example:\n{example.rstrip()}\n\n{_exit_codes(verb.EXIT_CODES)}"
            "  others: as of every verb, see backspot --help\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.prepare_parser(prepared)
        prepared.set_defaults(run=verb.run)
    try:
        args = parser.parse_args(argv)
    except SystemExit:  # --help and --version have said all there is
        return 0
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return UsageError.exit_code
    code: int = args.run(args)
    return code


def _exit_codes(codes: Sequence[int]) -> str:
    return "exit codes:\n" + "".join(f"  {code:<3}  {_CODES[code]}\n" for code in codes)


def _failed(error: Exception) -> int:
    if isinstance(error, BackspotError):
        complain(f"error: {error}")
        return error.exit_code
    if isinstance(error, OSError):
        # Standard output on a full disk comes here; what is left in its buffer would fail again.
        abandon_output()
        place = f"{error.filename}: " if error.filename else ""
        complain(f"error: {place}{error.strerror or error}")
        return 1
    complain(
        f"error: {type(error).__name__}: {error}. This is a bug in Backspot: please report it, "
        "with what it prints under BACKSPOT_DEBUG=1"
    )
    return 1
