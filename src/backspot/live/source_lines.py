"""Which line of source made each autograd node, kept while a profiler records.

From torch 2.14 on autograd calls back for every node that it makes, and the innermost frame outside
of PyTorch is the line. Before, the line that called a module of PyTorch's own is known, and all
nodes made within that call are its. Code objects are kept, never frames: a frame would keep every
tensor in it alive. Lines and texts are looked up once, when the profiler stops.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
from array import array
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from backspot.live import torch_internals
from backspot.trace.source_lines import (
    KEY,
    MOST_NODES,
    LineTable,
    Made,
    SourceLine,
    format_lines,
    live_tables,
)

__all__ = ["Book", "Recorder", "book", "describe"]

_Key = tuple[int, int, type | None]

# Packages whose own lines say nothing: the line that called them does.
_BENEATH = ("torch", "functorch", "einops", "opt_einsum")
_MOST_NUMBER = 1 << 62  # AccumulateGrad's is the largest of 64 bits; it is nobody's line
# A compiled region is one node for many lines.
_COMPILED = "CompiledFunction"

_folders = tuple(
    os.path.dirname(path) + os.sep  # noqa: PTH120 - compared with what code objects hold
    for path in (torch.__file__, __file__)
)
_beneath: dict[str, bool] = {}


def _is_beneath(file: str) -> bool:
    """Whether a line of this file says nothing to the reader; remembered by file."""
    verdict = file.startswith((*_folders, "<frozen ")) or any(
        f"{os.sep}site-packages{os.sep}{package}{os.sep}" in file for package in _BENEATH
    )
    if len(_beneath) > 1 << 16:  # code made on the run bears ever new names
        _beneath.clear()
    _beneath[file] = verdict
    return verdict


class Recorder:
    """The nodes that one thread makes within one profiler session.

    Attributes:
        tid: the operating system's number of the thread.
        hook: what autograd calls with each node.
        heard: how often it called with a node that takes no number of its own.
    """

    def __init__(self, store: Store) -> None:
        self.tid = threading.get_native_id()
        self.store: Store | None = store
        # The number of a node and the place of its line, in turns: one call of C writes both, so
        # that no interrupt and no other thread comes between them.
        self._nodes = array("q")
        self._settled = 0
        self.heard = 0
        self._ids: dict[_Key, int] = {}
        self._codes: dict[int, CodeType] = {}  # by place; kept, so that their ids stay theirs
        self.hook: Callable[[Any], None] = self._make_hook()

    def _make_hook(self) -> Callable[[Any], None]:
        keep = self._nodes.extend
        ids, beneath, frame_at = self._ids, _beneath, sys._getframe

        def made(node: Any) -> None:
            # Whatever this raised or returned would kill the user's forward.
            try:
                number = node._sequence_nr()
                if number >= _MOST_NUMBER:
                    self.heard += 1
                    return
                if self.store is None:
                    return
                frame: FrameType | None = frame_at(1)
                while frame is not None:
                    file = frame.f_code.co_filename
                    under = beneath.get(file)
                    if under is None:
                        under = _is_beneath(file)
                    if not under:
                        break
                    frame = frame.f_back
                else:
                    return
                key = (id(frame.f_code), frame.f_lasti, type(node))
                place = ids.get(key)
                if place is None:
                    place = self._new(key, frame.f_code)
                keep((number, place))
            except Exception:
                return

        torch_internals.keep_from_dynamo(made)
        return made

    def _new(self, key: _Key, code: CodeType) -> int:
        place = len(self._ids)
        self._codes[place] = code  # first: an interrupt in between leaves a place that is reused
        self._ids[key] = place
        return place

    def call_site(self) -> int:
        """The place of the innermost line outside of PyTorch, -1 for none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not (_beneath[file] if file in _beneath else _is_beneath(file)):
                key = (id(frame.f_code), frame.f_lasti, None)
                place = self._ids.get(key)
                return self._new(key, frame.f_code) if place is None else place
            frame = frame.f_back
        return -1

    def turn(self, place: int) -> None:
        """Nodes made from now on belong to the call made at ``place``; -1 to none."""
        number = torch_internals.sequence_number()
        if self.store is None or number < 0:
            return
        if self._nodes and self._nodes[-2] == number:
            self._nodes[-1] = place
        else:
            self._nodes.extend((number, place))

    def settle(self) -> None:
        """An outermost call has ended: tell the store how many nodes it took."""
        if self.store is not None:
            count = len(self._nodes) // 2
            self.store.count += count - self._settled
            self._settled = count

    def times_pushed(self) -> int:
        """How often the hook stands on this thread, found out by making a node that has no number.

        PyTorch does not tell, and what an interrupt left behind may be gone already: autograd sets
        its thread's state back after each node.
        """
        before = self.heard
        with torch.enable_grad():
            leaf = torch.empty(0, requires_grad=True)
            leaf.view_as(leaf)
        return self.heard - before

    def close(self) -> None:
        """The session is over: keep nothing more, and let the hook do nothing."""
        self.store = None

    def forget(self) -> None:
        """Let go of code and of the classes of nodes: the thread may keep its recorder for long."""
        self._ids.clear()
        self._codes.clear()
        del self._nodes[:]

    def lines(self) -> list[SourceLine]:
        """The line of each place."""
        return [
            describe(self._codes[place], lasti, kind.__name__ if kind else "")
            for (_, lasti, kind), place in self._ids.items()
        ]

    def made(self) -> Made:
        """The nodes as runs of one number each, or of one call each."""
        first, line = np.array(self._nodes, np.int64).reshape(-1, 2).T
        if torch_internals.push_node_hook is not None:
            return Made(first, np.ones_like(first), line)
        # A call's nodes reach to the next turn; the last one is open, and is given up.
        return Made(first[:-1], np.diff(first), line[:-1])


class Store:
    """What one profiler session has heard, on all threads.

    Attributes:
        session: the session's number.
        complete: false once there was no more room.
        count: how many nodes the outermost calls that have ended took.
    """

    def __init__(self, session: int) -> None:
        self.session = session
        self.complete = True
        self.count = 0
        self._recorders: list[Recorder] = []

    def recorder(self) -> Recorder:
        """A new thread's."""
        recorder = Recorder(self)
        self._recorders.append(recorder)
        return recorder

    def has_room(self) -> bool:
        """Whether another outermost call may be kept."""
        if self.count >= MOST_NODES:
            self.complete = False
        return self.complete

    def close(self) -> LineTable | None:
        """The table; ``None`` where nothing was heard."""
        lines: dict[SourceLine, int] = {}
        runs: dict[int, list[Made]] = {}
        for recorder in self._recorders:
            recorder.close()
            made = recorder.made()
            known = np.array([*(_known(lines, s) for s in recorder.lines()), -1], np.int64)
            runs.setdefault(recorder.tid, []).append(Made(made.first, made.count, known[made.line]))
            recorder.forget()
        threads = {tid: _tidied(parts) for tid, parts in runs.items()}
        if not lines:
            return None
        exact = torch_internals.push_node_hook is not None
        return LineTable(tuple(lines), threads, exact, self.complete)


def _known(lines: dict[SourceLine, int], line: SourceLine) -> int:
    if line.node.startswith(_COMPILED):
        return -1
    return lines.setdefault(line, len(lines))


def _tidied(parts: list[Made]) -> Made:
    """One thread's runs in order, joined where one line made the next node too.

    A number that stands twice with two lines (a thread's number that was used again, a counter that
    was set back) tells nothing, and is left out.
    """
    first, count, line = (
        np.concatenate([getattr(part, name) for part in parts]) for name in Made.__slots__
    )
    kept = (line >= 0) & (count > 0)
    first, count, line = first[kept], count[kept], line[kept]
    order = np.argsort(first, kind="stable")
    first, count, line = first[order], count[order], line[order]
    if not len(first):
        return Made(first, count, line)
    end = first + count
    furthest = np.maximum.accumulate(end)
    overlaps = np.zeros(len(first), bool)
    overlaps[1:] = first[1:] < furthest[:-1]
    overlaps[:-1] |= overlaps[1:]
    first, end, line = first[~overlaps], end[~overlaps], line[~overlaps]
    if not len(first):
        return Made(first, end, line)
    starts = np.ones(len(first), bool)
    starts[1:] = (line[1:] != line[:-1]) | (first[1:] != end[:-1])
    last = np.append(np.flatnonzero(starts)[1:] - 1, len(first) - 1)
    return Made(first[starts], end[last] - first[starts], line[starts])


class Book:
    """The lines of the session that runs, until it hands them to its trace and its profile."""

    def __init__(self) -> None:
        # By session, one at most. No lock: an interrupt on the way out of its ``with`` would leave
        # it locked for good.
        self._stores: dict[int, Store] = {}

    @property
    def is_open(self) -> bool:
        """Whether a session has lines that no trace holds yet."""
        return bool(self._stores)

    def recorder(self, session: int, own: Recorder | None) -> Recorder | None:
        """The calling thread's recorder for this session; ``None`` where there is no more room."""
        store = self._stores.get(session)
        if store is None:
            if self._stores:  # a session that never ended in order
                self._stores = {}
            store = self._stores.setdefault(session, Store(session))  # one of several threads'
        if not store.has_room():
            return None
        return own if own is not None and own.store is store else store.recorder()

    def write(self) -> str | None:
        """Put the table into the trace that is being recorded; the last moment is the best one."""
        stores, self._stores = self._stores, {}
        tables = [table for store in stores.values() if (table := store.close()) is not None]
        if not tables:
            return None
        form = format_lines(tables[-1])
        torch_internals.add_metadata(KEY, form)
        return form

    def keep(self, results: Any, form: str) -> None:
        """Remember a stopped profile's table for as long as its results live."""
        live_tables[results] = form


book = Book()


_LONGEST = 160
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_CELL = re.compile(r"<ipython-input-(\d+)-|[/\\]ipykernel_\d+[/\\]\d+\.py\Z")


def describe(code: CodeType, lasti: int, node: str) -> SourceLine:
    """The line that ``code`` was at, with its text where the source can be read."""
    line = _line_at(code, lasti)
    text = linecache.getline(code.co_filename, line).strip()
    function = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
    return SourceLine(
        _short(code.co_filename),
        line,
        function,
        text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…",
        node,
    )


def _line_at(code: CodeType, lasti: int) -> int:
    for start, end, line in code.co_lines():
        if start <= lasti < end and line is not None:
            return line
    return code.co_firstlineno


def _short(file: str) -> str:
    """A file's name as people know it.

    What is installed is named by its package; what lies below the working folder, or in a folder
    that modules are imported from, by its path within.
    """
    cell = _CELL.search(file)
    if cell:
        number = cell[1] or _cell_number(file)
        return f"<cell {number}>" if number else "<notebook cell>"
    if file.startswith("<"):
        return file
    installed = _INSTALLED.match(file)
    if installed:
        return file[installed.end() :]
    folders = {os.path.abspath(entry or ".") for entry in sys.path if isinstance(entry, str)}  # noqa: PTH100
    try:
        below = [os.getcwd()]  # noqa: PTH109
    except OSError:  # the working folder is gone
        below = []
    for folder in [*below, *sorted(folders, key=len, reverse=True)]:
        lead = folder.rstrip(os.sep) + os.sep
        if file.startswith(lead) and lead != os.sep:
            return file[len(lead) :]
    return file.removeprefix(f".{os.sep}")


def _cell_number(file: str) -> Any:
    """The number in brackets before the cell, if IPython tells it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", None)
    return numbers.get(file) if isinstance(numbers, dict) else None
