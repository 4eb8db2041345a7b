"""Check the paths and the ``force`` that users give."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from backspot.errors import UsageError
from backspot.formatting import quoted, visible


def path_text(path: object, subject: str) -> str:
    """Return a path as text.

    Args:
        subject: the call that takes it, for the message: ``save(path)``.

    Raises:
        UsageError: If it is not a path, or one that no file can have.
    """
    try:
        text: object = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    except TypeError:  # an ``os.PathLike`` that returns no path
        text = None
    if not isinstance(text, str):
        raise UsageError(f"{subject} takes the path of a file, not {type(path).__name__}")
    if "\0" in text:
        raise UsageError(f"{subject}: {visible(text)} has a zero byte, which a path cannot have")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise UsageError(
            f"{subject}: {visible(text)} has characters that no path can have here"
        ) from None
    return text


def check_force(force: object) -> None:
    """Check that ``force`` is a bool: it decides whether a file is overwritten.

    Raises:
        UsageError: If it is not.
    """
    if not isinstance(force, bool):
        raise UsageError(
            f"force={quoted(force)}: give True, to overwrite an existing file, or False"
        )


def refuse_sources(
    output: str | os.PathLike[str], sources: Iterable[str | os.PathLike[str] | int]
) -> None:
    """Check that an output is none of its own inputs, under any name, link or hard link.

    ``force`` allows to overwrite an existing file, but never the file that is being read.

    Args:
        sources: paths of the inputs, or open file descriptors; anything else is ignored.

    Raises:
        UsageError: If it is one.
    """
    written = _identity(output)
    for source in sources:
        if written is not None and _identity(source) == written:
            raise UsageError(
                f"{visible(os.fspath(output))} is the trace itself, which is never overwritten: "
                "name another file"
            )


def _identity(file: str | os.PathLike[str] | int) -> tuple[int, int] | None:
    """Return a file's device and number, which all its names share; ``None`` without a file."""
    try:
        about = os.fstat(file) if isinstance(file, int) else Path(file).stat()
    except (OSError, ValueError):
        return None
    return about.st_dev, about.st_ino
