"""The contract for source lines: which line of the forward made which autograd node.

The live half writes one table a profile into the trace's metadata, under ``KEY``; the offline half
reads it back. A node is told by its thread and autograd's sequence number, and by nothing less: a
number that the table does not hold has no line.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from backspot.trace.brackets import value_end

__all__ = [
    "KEY",
    "MOST_BYTES",
    "MOST_NODES",
    "LineTable",
    "Made",
    "SourceLine",
    "find_lines",
    "format_lines",
    "live_tables",
]

KEY = "backspot.lines"
"""The key in the trace's metadata."""

MOST_NODES = 1 << 21
"""How many nodes one profile's table holds at most: a bound for memory and for the file."""

MOST_BYTES = 1 << 24
"""How long a table's text is at most: that of so many nodes has no more, and is mostly far less."""

live_tables: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The tables of the profiles of this process, by what torch hands out as a profile's results: the
live half puts them here, and a table goes when the results do."""

_AT_KEY = re.compile(rb'"backspot\.lines"\s*:\s*')
_VERSION = 1
_KEPT = " !#$&'()*+,/:;<=>?@[]^`{|}"  # what need not be %-encoded
_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the forward, and what it makes.

    Attributes:
        file: the file's name, as people know it: without ``site-packages`` or the working folder.
        line: the line's number, from 1.
        function: the function that it stands in.
        text: the line itself, stripped, ``""`` where it could not be read.
        node: the class of the nodes made here (``GatherBackward0``); ``""`` where it is not known.
    """

    file: str
    line: int
    function: str
    text: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Made:
    """The nodes of one thread, in runs of consecutive numbers; arrays of equal length.

    Attributes:
        first: the first sequence number of each run, ascending.
        count: how many numbers it has, at least 1.
        line: the index of its line in ``LineTable.lines``.
    """

    first: _Ints
    count: _Ints
    line: _Ints


@dataclass(frozen=True, slots=True)
class LineTable:
    """What one profile knows of source lines.

    Attributes:
        lines: each distinct line (and kind of node) once.
        threads: the nodes by the operating system's number of the thread that made them.
        exact: whether each node's own line is known; else it is the line that called the module.
        complete: whether every node had room.
        broken: whether the trace holds a table that cannot be read.
    """

    lines: tuple[SourceLine, ...] = ()
    threads: dict[int, Made] = field(default_factory=dict)
    exact: bool = True
    complete: bool = True
    broken: bool = False

    def at(self, thread: int, numbers: _Ints) -> _Ints:
        """The index in ``lines`` for each sequence number on a thread, -1 where it is not known."""
        made = self.threads.get(thread)
        if made is None or not len(made.first):
            return np.full(len(numbers), -1, np.int64)
        run = np.searchsorted(made.first, numbers, side="right") - 1
        known = (run >= 0) & (numbers < (made.first + made.count)[np.maximum(run, 0)])
        return np.where(known, made.line[run], -1)


class _Thread(msgspec.Struct, array_like=True):  # no objects in a list: events are cut at such
    tid: int
    runs: int
    first: str
    count: str
    line: str


class _Form(msgspec.Struct):
    version: int
    exact: bool
    complete: bool
    lines: list[tuple[str, int, str, str, str]]
    threads: list[_Thread]


def format_lines(table: LineTable) -> str:
    """The table as JSON in ASCII without a backslash, for the trace's metadata.

    Numbers are packed: a training step makes the same nodes over and over, so that a thousand steps
    take little more room than one.
    """
    form = _Form(
        version=_VERSION,
        exact=table.exact,
        complete=table.complete,
        lines=[
            (_safe(s.file), s.line, _safe(s.function), _safe(s.text), _safe(s.node))
            for s in table.lines
        ],
        threads=[
            _Thread(
                tid,
                len(made.first),
                _packed(np.diff(made.first, prepend=0)),
                _packed(made.count),
                _packed(np.diff(made.line, prepend=0)),
            )
            for tid, made in table.threads.items()
        ],
    )
    return json.dumps(msgspec.to_builtins(form), separators=(",", ":"))


def find_lines(text: bytes) -> LineTable | None:
    """The table that stands as a value of ``KEY`` in a piece of a trace outside its events.

    Returns:
        ``None`` where there is none; a ``broken`` table without lines where it cannot be read.
    """
    keys = list(_AT_KEY.finditer(text))
    if not keys:
        return None
    value = text[keys[-1].end() :][: MOST_BYTES + 1]  # the last one counts, as in every JSON object
    end = value_end(value)
    if not 0 <= end <= MOST_BYTES:
        return LineTable(broken=True)
    try:
        return _table(msgspec.json.decode(value[:end], type=_Form))
    except (ValueError, RecursionError, zlib.error):  # msgspec's errors are values' errors
        return LineTable(broken=True)


def _table(form: _Form) -> LineTable:
    if form.version != _VERSION:
        raise ValueError(form.version)
    threads = {}
    left = 2 * MOST_NODES  # what an honest table never reaches
    for thread in form.threads:
        left -= thread.runs
        if thread.runs < 0 or left < 0:
            raise ValueError(thread.runs)
        made = Made(
            np.cumsum(_unpacked(thread.first, thread.runs)),
            _unpacked(thread.count, thread.runs),
            np.cumsum(_unpacked(thread.line, thread.runs)),
        )
        if thread.runs and (
            (made.count < 1).any()
            or (np.diff(made.first) < made.count[:-1]).any()
            or made.line.min() < 0
            or made.line.max() >= len(form.lines)
        ):
            raise ValueError(thread.tid)
        threads[thread.tid] = made
    lines = tuple(
        SourceLine(_plain(file), line, _plain(function), _plain(text), _plain(node))
        for file, line, function, text, node in form.lines
    )
    return LineTable(lines, threads, form.exact, form.complete)


def _safe(text: str) -> str:
    """Text without what the profiler spoils: it turns a backslash into a slash, escapes and all."""
    return quote(text, safe=_KEPT, errors="surrogatepass")


def _plain(text: str) -> str:
    return unquote(text, errors="surrogatepass")


def _packed(numbers: Sequence[int] | _Ints) -> str:
    raw = np.asarray(numbers, "<i8").tobytes()
    return base64.b64encode(zlib.compress(raw)).decode()


def _unpacked(text: str, count: int) -> _Ints:
    unpacking = zlib.decompressobj()
    raw = unpacking.decompress(base64.b64decode(text, validate=True), 8 * count + 1)
    if len(raw) != 8 * count:
        raise ValueError(count)
    return np.frombuffer(raw, "<i8").astype(np.int64)
