"""The terminal, for all verbs: output, ``--format``, colour, one-line complaints, progress."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from backspot.formatting import visible
from backspot.interrupts import contained
from backspot.progress import Progress, is_terminal

if TYPE_CHECKING:
    from backspot.render.view import View
    from backspot.results.comparison import Comparison
    from backspot.results.report import Report

# For terminals and files with an encoding of little more than ASCII.
_PLAIN = {
    **dict.fromkeys("█▉▊▋▌", "#"),
    **dict.fromkeys("▏▎▍", " "),
    **dict.fromkeys("│├└", "|"),
    "─": "-",
    "−": "-",
    "±": "~",
    "→": ">",
    "←": "<",
    "…": "~",
    "·": "-",
    "×": "x",
    "µ": "u",
}


def write_text(text: str) -> None:
    """Write a text to standard output; characters that its encoding lacks are replaced."""
    if sys.stdout is not None:
        sys.stdout.write(encodable(text, sys.stdout) + "\n")


def encodable(text: str, stream: TextIO | Any) -> str:
    """The text with characters that a stream can encode, in place of those that it cannot."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    plain = {}
    for character in set(text):
        try:
            character.encode(encoding)
        except UnicodeEncodeError:
            plain[ord(character)] = _PLAIN.get(
                character, character.encode(encoding, "backslashreplace").decode(encoding)
            )
    return text.translate(plain) if plain else text


def write_bytes(data: bytes) -> None:
    """Write a file's content to standard output, byte for byte."""
    if sys.stdout is None:
        return
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:  # replaced by a text stream
        sys.stdout.write(data.decode())
        return
    sys.stdout.flush()
    buffer.write(data)


def flush_output() -> None:
    """Flush standard output, while an error can still be reported."""
    if sys.stdout is not None:
        sys.stdout.flush()


def abandon_output() -> None:
    """Discard the rest of standard output, which would fail again when Python ends."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def write_error(text: str) -> None:
    """Write a text to standard error, if that is possible; nothing is raised otherwise.

    A script may have closed standard error, or put any object in its place.
    """
    if sys.stderr is not None:
        with contained():
            # One write, as several processes may have one standard error.
            print(f"{encodable(text, sys.stderr)}\n", end="", file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """Write one line to standard error; names in it cannot break it or control the terminal."""
    write_error(f"backspot: {visible(message)}")


def note(message: str) -> None:
    """Write one dim line to standard error."""
    line = f"backspot: {visible(message)}"
    write_error(f"\x1b[2m{line}\x1b[0m" if use_color(sys.stderr) else line)


def use_color(stream: TextIO | Any) -> bool:
    """Whether to write colours: ``NO_COLOR``, then ``FORCE_COLOR``, then what the stream is."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return os.environ.get("TERM") != "dumb" and is_terminal(stream) and _takes_escapes()


def _takes_escapes() -> bool:
    """Whether the terminal takes escape sequences, which Windows' own must be asked to do."""
    if sys.platform == "win32":
        import ctypes

        console = ctypes.windll.kernel32
        handles = [console.GetStdHandle(number) for number in (-11, -12)]  # output, error
        mode = ctypes.c_uint32()
        taking = 4  # ENABLE_VIRTUAL_TERMINAL_PROCESSING
        return any(
            console.GetConsoleMode(handle, ctypes.byref(mode))
            and console.SetConsoleMode(handle, mode.value | taking)
            for handle in handles
        )
    return True


def count(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive(text: str) -> float:
    """Read a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def add_width(parser: argparse.ArgumentParser) -> None:
    """Declare ``--width``."""
    parser.add_argument(
        "--width",
        type=count,
        metavar="COLUMNS",
        help="how wide a table is (default: as the terminal; elsewhere 80, or $COLUMNS)",
    )


def reading(source: str) -> Progress:
    """The progress of reading a trace."""
    name = "standard input" if source == "-" else Path(source).name
    return Progress(f"reading {visible(name)[-40:]}", "bytes")


def add_preview(parser: argparse.ArgumentParser) -> None:
    """Declare ``--preview``."""
    parser.add_argument(
        "--preview",
        action="store_true",
        help="show the findings of preview rules too, which few have tried so far",
    )


def add_format(parser: argparse.ArgumentParser, kind: Literal["Report", "Comparison"]) -> None:
    """Declare ``--format``, ``--full`` and ``--width`` for a kind of result."""

    def known(name: str) -> str:
        if name == "table":  # the default, which imports no renderer
            return name
        import backspot
        from backspot.render.formats import formats_of

        names = [form.name for form in formats_of(getattr(backspot, kind)) if form.name]
        if name not in names:
            choices = ", ".join(["table", *names])
            raise argparse.ArgumentTypeError(f"{name!r} is not a format; choose from {choices}")
        return name

    parser.add_argument(
        "--format",
        type=known,
        default="table",
        metavar="FORMAT",
        help="table, or a file format such as json, csv or md (default: table)",
    )
    parser.add_argument(
        "--full", action="store_true", help="print everything, not only what fits on one screen"
    )
    add_width(parser)


def print_result(
    result: Report | Comparison,
    args: argparse.Namespace,
    view: View,
    warnings: Sequence[str],
) -> None:
    """Print a result, and on standard error the warnings that its format cannot hold.

    ``args`` has ``--format``, ``--full``, ``--width`` and ``--top``; ``view`` has the rest.
    """
    name, top = args.format, args.top
    if name == "table":
        from backspot.render.comparison import render_comparison
        from backspot.render.text import render_text
        from backspot.results.comparison import Comparison

        if top is not None or args.full:
            view = replace(view, top=top, fewest=top or 0)
        color = use_color(sys.stdout)
        if isinstance(result, Comparison):
            write_text(render_comparison(result, view, width=args.width, color=color))
            return
        write_text(
            render_text(
                result,
                view,
                width=args.width,
                color=color,
                full=args.full,
                regroup=args.by is None,
                more="--full",
            )
        )
        return
    from backspot.render.formats import formats_of

    kind = type(result)
    form = next(form for form in formats_of(kind) if form.name == name)
    view = replace(view, top=form.top if top is None else top)
    write_bytes(form.renderer(kind)(result, view))
    if not form.has_warnings:
        for warning in warnings:
            complain(f"warning: {warning}")
