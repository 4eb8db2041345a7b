"""The terminal, for all verbs: output, colour, one-line complaints, progress."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from backspot.formatting import visible
from backspot.interrupts import contained
from backspot.progress import Progress, is_terminal

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
            print(encodable(text, sys.stderr), file=sys.stderr, flush=True)


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


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Declare ``--depth`` and ``--match``."""
    parser.add_argument(
        "--depth",
        type=count,
        metavar="D",
        help="fold every module deeper than this into its ancestor (0 is the root; a module that "
        "is never called, such as a ModuleList, is no level)",
    )
    parser.add_argument(
        "--match",
        action="append",
        metavar="PATTERN",
        help="keep modules such as 'model.layers.*' or '**.attn', and fold every other module into "
        "the nearest one around it that is kept, or into the root (can be repeated)",
    )


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Declare ``--jobs``."""
    parser.add_argument(
        "--jobs",
        type=count,
        metavar="N",
        help="maximum number of processes for a large uncompressed .json (default: automatic)",
    )


def add_peaks(parser: argparse.ArgumentParser) -> None:
    """Declare ``--peak-tflops`` and ``--peak-gbps``."""
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
        help="how wide a table is (default: as the terminal; elsewhere 80, or $COLUMNS, and no "
        "path is cut)",
    )


def reading(source: str) -> Progress:
    """The progress of reading a trace."""
    name = "standard input" if source == "-" else Path(source).name
    return Progress(f"reading {visible(name)[-40:]}", "bytes")
