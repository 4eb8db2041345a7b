"""Says which rank a trace is of, and that there are traces of other ranks."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from backspot.commands._console import note
from backspot.job.identity import RANK_IN_NAME, identify
from backspot.trace.read import traces_in

__all__ = ["is_job", "mention_ranks"]

_NAMED = 3


def is_job(source: str) -> bool:
    """Return whether a source is a folder with the traces of several ranks."""
    if source == "-" or not Path(source).is_dir():
        return False
    known: set[int | None] = set()
    with suppress(OSError):  # reading it reports the error
        for trace in traces_in(Path(source)):
            known.add(identify(trace).rank)
            if len(known - {None}) > 1:
                return True
    return False


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
        known = identify(path)
        several = known.world_size > 1
        which = f"{path.name} is of rank {known.rank} of {known.world_size}" if several else ""
        if others:
            names = ", ".join(other.name for other in others[:_NAMED])
            more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            note(f"{which or path.name}; other ranks' traces lie beside it: {names}{more}")
        elif which and len(shown) == 1:
            note(which)


def _others(path: Path) -> list[Path]:
    """Return the files beside a trace with names that differ in the rank's number only."""
    numbers = list(RANK_IN_NAME.finditer(path.name))
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
