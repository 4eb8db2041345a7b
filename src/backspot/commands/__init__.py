"""The command line: ``backspot VERB``, with one verb per file.

The arguments come in; text on standard output, one-line complaints on standard error and an exit
code come out. In the order in which they are used:

- this file parses the arguments and turns every error into one line and an exit code
- ``run.py``, ``demo.py``, ``show.py``, ``diff.py``, ``ranks.py``, ``explain.py`` and ``skill.py``
  (with ``SKILL.md``) are the verbs
- ``_script.py`` runs a script as ``python`` does; ``_processes.py`` knows which of its processes
  this is
- ``_source.py`` reads the trace that a verb was given
- ``_verbs.py`` lists the verbs, and what one does for another
- ``_console.py`` has what they share of the terminal: a result in the format that ``--format``
  names, colour, complaints

A verb is a module with ``prepare_parser(parser)``, ``run(args) -> int`` and ``EXIT_CODES``, the
codes that only some verbs can give. ``run.run`` returns a function that runs the script, as none of
the script's errors are for this file. Its docstring is its help: the first line is the summary, and
the part after ``Example:`` comes last. It imports what it works with inside ``run``, so that help
and usage errors appear at once. To add a verb, add the file, and its name in ``_verbs.py``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from backspot._version import __version__
from backspot.commands._console import abandon_output, complain, flush_output
from backspot.commands._verbs import VERBS, verb
from backspot.errors import BackspotError, UsageError

__all__ = ["main"]

_ABOUT = """\
Find what makes a training step slow, by module and line, and what to change.

A trace is a file that torch.profiler exports. Record it inside
backspot.instrument(model) to get labels, which name the modules.
"""
_CODES = {
    0: "success",
    1: "any other error",
    2: "wrong usage",
    3: "file not found or not readable, or a folder without traces",
    4: "not a trace, or a broken one",
    5: "a trace without a backward pass",
    6: "the output file already exists",
    7: "an optional dependency is not installed",
    8: "slower than diff --fail-above allows",
    9: "too noisy to tell, with diff --fail-above --strict",
    130: "interrupted",
}
_EXAMPLE = """\
example:
  backspot run train.py --epochs 3
  backspot show trace.json.gz --top 10 --depth 2
  backspot show trace.json.gz -o report.html
  backspot diff before.json.gz after.json.gz
  backspot explain host-waits

completion with TAB, after pip install 'backspot[completion]':
  eval "$(register-python-argcomplete backspot)"                # bash and zsh
  register-python-argcomplete --shell fish backspot | source    # fish

"""


class _Parser(argparse.ArgumentParser):
    """Raises usage errors, which ``main`` prints in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``None`` takes the program's own arguments."""
    try:
        result = _run(argv)
        flush_output()
    except BrokenPipeError:
        # The reader of the output has enough, as head does: nothing is wrong.
        abandon_output()
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("BACKSPOT_DEBUG"):
            import traceback

            traceback.print_exc()
        return _failed(error)
    return result() if callable(result) else result


def _run(argv: Sequence[str] | None) -> int | Callable[[], int]:
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
        module = verb(name)
        about, _, example = (module.__doc__ or "").partition("Example:\n")
        prepared = verbs.add_parser(
            name,
            help=about.partition("\n")[0].rstrip("."),
            description=about.strip(),
            epilog=f"example:\n{example.rstrip()}\n\n{_exit_codes(module.EXIT_CODES)}"
            "  others: see backspot --help\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.prepare_parser(prepared)
        prepared.set_defaults(run=module.run)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could come next
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].endswith(".py"):
        raise UsageError(f"a script comes after run: backspot run {shlex.join(words)}")
    if words[:1] and words[0] in ("diff", "run"):
        words = verb(words[0]).worded(words)
    try:
        args, unknown = parser.parse_known_args(words)
    except SystemExit:  # --help and --version have printed everything
        return 0
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return UsageError.exit_code
    if unknown:
        order = _in_order(words, unknown[0]) or f"see {parser.prog} --help"
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)} ({order})")
    result: int | Callable[[], int] = args.run(args)
    return result


def _in_order(words: Sequence[str], unknown: str) -> str:
    """Say where the script's own options belong, if they came before the script."""
    at = words.index(unknown) if unknown in words else len(words)
    script = next((n for n in range(at, len(words)) if words[n].endswith(".py")), None)
    if words[0] != "run" or script is None:
        return ""
    ordered = [*words[:at], *words[script:], *words[at:script]]
    return f"put the script's own options after it: backspot {shlex.join(ordered)}"


def _exit_codes(codes: Sequence[int]) -> str:
    return "exit codes:\n" + "".join(f"  {code:<3}  {_CODES[code]}\n" for code in codes)


def _failed(error: Exception) -> int:
    if isinstance(error, BackspotError):
        complain(f"error: {error}")
        return error.exit_code
    if isinstance(error, OSError):
        # For example standard output on a full disk; the rest of its buffer would fail again.
        abandon_output()
        place = f"{error.filename}: " if error.filename else ""
        complain(f"error: {place}{error.strerror or error}")
        return 1
    complain(
        f"error: {type(error).__name__}: {error}. This is a bug in Backspot. Please report it "
        "with the traceback that BACKSPOT_DEBUG=1 prints"
    )
    return 1
