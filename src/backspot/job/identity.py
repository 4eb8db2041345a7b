"""Which rank a trace is of, and on which host it ran."""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import dataclass
from json import JSONDecoder
from pathlib import Path

import msgspec

from backspot.trace.names import process_group

RANK_IN_NAME = re.compile(r"(?<![a-z])rank[-_.=]?(\d+)", re.IGNORECASE)
"""The number of the rank in a file name."""
_INFO = re.compile(r'"distributedInfo"\s*:\s*')
_RANK = re.compile(r'\{[^{}[\]]*?"rank"\s*:\s*(\d+)[^{}[\]]*')
_SIZE = re.compile(r'"world_size"\s*:\s*(\d+)')
_HOST = re.compile(r"(.+)_\d+\.\d+\.pt\.trace\.json")
"""How ``tensorboard_trace_handler`` names a file: host, process and time."""
_HEAD = 1 << 20  # bytes: the profiler writes the ranks of all groups before the events


class _Group(msgspec.Struct, frozen=True):
    description: str = msgspec.field(name="pg_desc", default="")
    number: str = msgspec.field(name="pg_name", default="")
    ranks: tuple[int, ...] = ()


class _Info(msgspec.Struct, frozen=True):
    groups: tuple[_Group, ...] = msgspec.field(name="pg_config", default=())


@dataclass(frozen=True, slots=True)
class Identity:
    """What a trace says of its place in the job.

    Attributes:
        world_size: the number of ranks, 1 if the trace does not say so.
        host: the host's name, ``""`` if it is not known.
        groups: name and ranks of each process group of this rank.
    """

    rank: int | None
    world_size: int
    host: str
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def ranks_of(self, group: str) -> tuple[int, ...]:
        """Return the ranks of a process group, ``()`` if they are not known.

        A group without a name can be any.
        """
        ranks_found = {
            ranks for name, ranks in self.groups if group in ("", name) and len(ranks) > 1
        }
        return ranks_found.pop() if len(ranks_found) == 1 else ()

    @property
    def has_several(self) -> bool:
        """Whether the rank has process groups of different ranks."""
        return len({ranks for _, ranks in self.groups if len(ranks) > 1}) > 1


def identify(path: Path) -> Identity:
    """Read which rank a trace file is of. The trace decides, and otherwise the file's name.

    Raises:
        OSError: If the file cannot be read.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            head = file.read(_HEAD).decode(errors="replace")
        except (EOFError, zlib.error):  # cut short, which reading the trace reports
            head = ""
    named = _HOST.match(path.name)
    host = named[1] if named else ""
    info = _INFO.search(head)
    rank = _RANK.match(head, info.end()) if info else None
    size = _SIZE.search(rank[0]) if rank else None
    if info and rank and size:
        return Identity(int(rank[1]), int(size[1]), host, _groups(head[info.end() :]))
    numbers = RANK_IN_NAME.findall(path.name)
    return Identity(int(numbers[-1]) if numbers else None, 1, host)


def _groups(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the process groups of the object with which a text begins."""
    try:
        value, _ = JSONDecoder().raw_decode(text)
        info = msgspec.convert(value, _Info)
    except (ValueError, msgspec.ValidationError):  # cut short by the limit, or of another shape
        return ()
    return tuple(
        (process_group(group.description, group.number), group.ranks) for group in info.groups
    )
