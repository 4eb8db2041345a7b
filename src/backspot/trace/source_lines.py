"""The table of source lines: which line of the forward made which autograd node.

The live half writes one table for each profile into the trace's metadata, under ``KEY``. The
offline half reads it back. A node is identified by its thread and autograd's sequence number
together; a number that is not in the table has no line.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from backspot.trace.metadata import last_value

KEY = "backspot.lines"
"""The key in the trace's metadata."""

MOST_NODES = 1 << 21
"""The most nodes in one profile's table: a bound for memory and for the file."""

MOST_BYTES = 1 << 24
"""The most bytes of a table's text; a table of ``MOST_NODES`` has fewer, most have far fewer."""

live_tables: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The tables of this process's profiles, by torch's results object of the profile. The live half
puts them here. A table is dropped together with its results."""

_VERSION = 1
_KEPT = " !#$&'()*+,/:;<=>?@[]^`{|}"  # need not be percent-encoded
_Ints = NDArray[np.int64]


class SourceLine(msgspec.Struct, frozen=True):
    """A line of the forward, and the nodes that it makes.

    Attributes:
        file: the file's name without ``site-packages`` or the working folder.
        line: the line's number, from 1.
        text: the line itself, stripped; ``""`` if it could not be read.
        node: the class of the nodes (``GatherBackward0``); ``""`` if it is not known.
    """

    file: str
    line: int
    function: str
    text: str = ""
    node: str = ""


class Made(msgspec.Struct, frozen=True):
    """The nodes of one thread, in ranges of sequence numbers; arrays of equal length.

    Attributes:
        first: the first sequence number of each range, ascending.
        count: the number of sequence numbers in the range, at least 1.
        line: the index of the range's line in ``LineTable.lines``.
    """

    first: _Ints
    count: _Ints
    line: _Ints


class LineTable(msgspec.Struct, frozen=True):
    """The source lines of one profile.

    Attributes:
        lines: each distinct pair of a line and a class of nodes once.
        threads: the nodes by the operating system's number of the thread that made them.
        exact: whether each line is the node's own; else it is the line that called the module.
        complete: whether all nodes fit in the table.
        broken: whether the trace has a table that cannot be read.
    """

    lines: tuple[SourceLine, ...] = ()
    threads: dict[int, Made] = msgspec.field(default_factory=dict)
    exact: bool = True
    complete: bool = True
    broken: bool = False

    def at(self, thread: int, numbers: _Ints) -> _Ints:
        """Return the index in ``lines`` for each sequence number on a thread; -1 if unknown."""
        made_nodes = self.threads.get(thread)
        if made_nodes is None or not len(made_nodes.first):
            return np.full(len(numbers), -1, np.int64)
        run = np.searchsorted(made_nodes.first, numbers, side="right") - 1
        is_known = (run >= 0) & (
            numbers < (made_nodes.first + made_nodes.count)[np.maximum(run, 0)]
        )
        return np.where(is_known, made_nodes.line[run], -1)


# A JSON list: objects in a list would look like the boundary between two events.
class _Thread(msgspec.Struct, array_like=True):
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
    """Return the table as JSON in ASCII without a backslash, for the trace's metadata.

    Numbers are compressed: each training step makes the same nodes, so a thousand steps take little
    more space than one.
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
                len(made_nodes.first),
                _packed(np.diff(made_nodes.first, prepend=0)),
                _packed(made_nodes.count),
                _packed(np.diff(made_nodes.line, prepend=0)),
            )
            for tid, made_nodes in table.threads.items()
        ],
    )
    return json.dumps(msgspec.to_builtins(form), separators=(",", ":"))


def find_lines(text: bytes) -> LineTable | None:
    """Find the table around a trace's events; ``None``, or a ``broken`` one without lines."""
    value = last_value(text, KEY, MOST_BYTES)
    if value is None:
        return None
    try:
        return _table(msgspec.json.decode(value, type=_Form))
    except (ValueError, RecursionError, zlib.error):  # msgspec's errors are ValueErrors
        return LineTable(broken=True)


def _table(form: _Form) -> LineTable:
    if form.version != _VERSION:
        raise ValueError(form.version)
    threads = {}
    left = 2 * MOST_NODES  # no table that the live half wrote has as many
    for thread in form.threads:
        left -= thread.runs
        if thread.runs < 0 or left < 0:
            raise ValueError(thread.runs)
        made_nodes = Made(
            np.cumsum(_unpacked(thread.first, thread.runs)),
            _unpacked(thread.count, thread.runs),
            np.cumsum(_unpacked(thread.line, thread.runs)),
        )
        if thread.runs and (
            (made_nodes.count < 1).any()
            or (np.diff(made_nodes.first) < made_nodes.count[:-1]).any()
            or made_nodes.line.min() < 0
            or made_nodes.line.max() >= len(form.lines)
        ):
            raise ValueError(thread.tid)
        threads[thread.tid] = made_nodes
    lines = tuple(
        SourceLine(_plain(file), line, _plain(function), _plain(text), _plain(node))
        for file, line, function, text, node in form.lines
    )
    return LineTable(lines, threads, form.exact, form.complete)


def _safe(text: str) -> str:
    """Encode backslashes and the like: the profiler turns each backslash into a slash."""
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
