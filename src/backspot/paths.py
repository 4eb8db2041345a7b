"""Paths as people give them: what can be one, and what must not be written over."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from backspot.errors import UsageError
from backspot.formatting import quoted, visible

__all__ = ["check_force", "path_text", "refuse_sources"]


def path_text(path: object, what: str) -> str:
    """A path as text.

    Args:
        path: what was given for one.
        what: what it was given for, as the complaint calls it: ``save(path)``.

    Raises:
        UsageError: where no file can be called so, whatever files there are.
    """
    try:
        text: object = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    except TypeError:  # it calls itself a path, and gives none
        text = None
    if not isinstance(text, str):
        raise UsageError(f"{what} takes the path of a file, not {type(path).__name__}")
    if "\0" in text:
        raise UsageError(f"{what}: {visible(text)} holds a zero byte, which no path can")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise UsageError(f"{what}: {visible(text)} holds what no path can on this system") from None
    return text


def check_force(force: object) -> None:
    """Complain about what is neither true nor false: it decides whether a file is overwritten.

    Raises:
        UsageError: where it is neither.
    """
    if not isinstance(force, bool):
        raise UsageError(f"force={quoted(force)}: give True, to overwrite what is there, or False")


def refuse_sources(
    output: str | os.PathLike[str], sources: Iterable[str | os.PathLike[str] | int]
) -> None:
    """Complain where an output is one of its own inputs, by whichever name, link or hard link.

    Overwriting is asked for a file that is there from before, never for what is being read.

    Args:
        output: where something is to be written.
        sources: paths of what it is made of, or open file descriptors; those that are no file are
            let pass.

    Raises:
        UsageError: where it is.
    """
    there = _identity(output)
    for source in sources:
        if there is not None and _identity(source) == there:
            raise UsageError(
                f"{visible(os.fspath(output))} is the trace itself, which stays as it is: "
                "name another file"
            )


def _identity(file: str | os.PathLike[str] | int) -> tuple[int, int] | None:
    """What two names of one file have in common; ``None`` where there is no file."""
    try:
        about = os.fstat(file) if isinstance(file, int) else Path(file).stat()
    except (OSError, ValueError):
        return None
    return about.st_dev, about.st_ino
