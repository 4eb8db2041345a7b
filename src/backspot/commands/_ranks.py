"""Says which rank a trace is of, and that the traces of other ranks lie beside it."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from backspot.commands._console import note

__all__ = ["mention_ranks"]

_NUMBER = re.compile(r"(?<![a-z])rank[-_.=]?(\d+)", re.IGNORECASE)
_INFO = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}[\]]*?"rank"\s*:\s*(\d+)[^{}[\]]*')
_SIZE = re.compile(rb'"world_size"\s*:\s*(\d+)')
_HEAD = 1 << 16  # bytes: the profiler writes the rank before the events
_NAMED = 3


def mention_ranks(trace: str, shown: Collection[str]) -> None:
    """Write one line to standard error if a trace is of one rank of several.

    Args:
        trace: the path of the trace.
        shown: the traces that the command reads.
    """
    path = Path(trace)
    with suppress(OSError):  # a hint is not worth an error
        given = {Path(one).resolve() for one in shown}
        others = [other for other in _others(path) if other.resolve() not in given]
        rank, size = _rank_of(path)
        which = f"{path.name} is of rank {rank} of {size}" if size > 1 else ""
        if others:
            names = ", ".join(other.name for other in others[:_NAMED])
            more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            note(f"{which or path.name}; other ranks' traces lie beside it: {names}{more}")
        elif which and len(shown) == 1:
            note(which)


def _others(path: Path) -> list[Path]:
    """Return the files beside a trace with names that differ in the rank's number only."""
    numbers = list(_NUMBER.finditer(path.name))
    if not numbers:
        return []
    start, end = numbers[-1].span(1)
    before, after = path.name[:start], path.name[end:]
    found = {
        int(number): other
        for other in path.parent.iterdir()
        if other.name.startswith(before) and other.name.endswith(after)
        if (number := other.name[start : len(other.name) - len(after)]).isdecimal()
    }
    found.pop(int(numbers[-1][1]), None)
    return [found[number] for number in sorted(found)]


def _rank_of(path: Path) -> tuple[int, int]:
    """Return a trace's rank and the number of ranks, 0 and 1 if it does not say so."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            head = file.read(_HEAD)
        except (EOFError, zlib.error):  # cut short, which reading it has reported
            head = b""
    info = _INFO.search(head)
    size = _SIZE.search(info[0]) if info else None
    return (int(info[1]), int(size[1])) if info and size else (0, 1)
