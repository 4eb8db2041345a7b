"""Which line of source made each autograd node, recorded while a profiler records.

From torch 2.14 on autograd calls a hook for each node that it makes, and the innermost frame
outside of PyTorch is the line. Before, the line that calls one of PyTorch's own modules is known,
and all nodes made within that call get that line. Code objects are kept, never frames: a frame
would keep every tensor in it alive. Lines and texts are looked up once, when the profiler stops.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
import sys
import threading
from array import array
from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from backspot.interrupts import pass_on
from backspot.live.torch_internals import autograd, dynamo, profiler
from backspot.trace.names import COMPILED_FUNCTION
from backspot.trace.source_lines import (
    KEY,
    MOST_NODES,
    LineTable,
    Made,
    SourceLine,
    format_lines,
    live_tables,
)

_LONGEST = 160
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_CELL = re.compile(r"<ipython-input-(\d+)-|[/\\]ipykernel_\d+[/\\]\d+\.py\Z")


def describe(code: CodeType, lasti: int, node: str) -> SourceLine:
    """Return the line of an instruction."""
    line = _line_at(code, lasti)
    text = linecache.getline(code.co_filename, line).strip()
    function = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
    return SourceLine(
        file_name(code.co_filename),
        line,
        function,
        text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…",
        node,
    )


def name_of(function: Any) -> str:
    """Return what a function is called, and where it is: ``Net.check (train.py:12)``."""
    while isinstance(function, partial):
        function = function.func
    call = function if hasattr(function, "__qualname__") else type(function).__call__
    name = str(call.__qualname__).replace("<locals>.", "")
    code = getattr(inspect.unwrap(call), "__code__", None)
    return name if code is None else f"{name} ({file_name(code.co_filename)}:{code.co_firstlineno})"


def _line_at(code: CodeType, lasti: int) -> int:
    for start, end, line in code.co_lines():
        if start <= lasti < end and line is not None:
            return line
    return code.co_firstlineno


def file_name(file: str) -> str:
    """Return a file's name as readers know it.

    An installed file is named from its package on; a file below the working folder, or below a
    folder that modules are imported from, by its path inside.
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


@lru_cache(1 << 12)
def place_of_frame(file: str, line: int, function: str) -> tuple[str, int]:
    """Return the name of a file that PyTorch's stacks have, and the line a function begins at.

    They leave out the folder that the file was imported from, the deepest one. Of a function that
    ran already when they began, such as the training loop's, they have the line of that moment.
    """
    path = _whole(file)
    begins = [
        first
        for name, first, last in _functions(path)
        if name == function and first <= line <= last
    ]
    return file_name(path), max(begins, default=line)


def _whole(file: str) -> str:
    if file.startswith("<") or os.path.isabs(file):  # noqa: PTH117
        return file
    folders = (os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))  # noqa: PTH100
    paths = (os.path.join(folder, file) for folder in sorted(folders, reverse=True))  # noqa: PTH118
    return next((path for path in paths if os.path.exists(path)), file)  # noqa: PTH110


@lru_cache(64)
def _functions(file: str) -> tuple[tuple[str, int, int], ...]:
    """Return the name, first and last line of each function in a file; its own is ``<module>``."""
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    functions = [
        (
            node.name,
            min([node.lineno, *(d.lineno for d in node.decorator_list)]),
            node.end_lineno or 0,
        )
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return (("<module>", 1, len(lines)), *functions)


def _cell_number(file: str) -> int | None:
    """Return the number in brackets before a cell, if IPython has it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", None)
    return numbers.get(file) if isinstance(numbers, dict) else None


_Key = tuple[int, int, type | None]

_push_node_hook, _pop_node_hook = autograd.push_node_hook, autograd.pop_node_hook
_number_of = autograd.number_of
_MOST_NUMBER = 1 << 62  # AccumulateGrad's is the largest of 64 bits; it belongs to no line


class Inside(dict[str, bool]):
    """Whether a file is inside PyTorch, or a package like it, by the file's name.

    The lines of such a file say nothing to the reader; the line that calls them does.
    """

    _PACKAGES = ("torch", "functorch", "einops", "opt_einsum")
    _STARTS = (
        *(
            os.path.dirname(path) + os.sep  # noqa: PTH120 - compared with what code objects hold
            for path in (torch.__file__, __file__)
        ),
        "<frozen ",
    )

    def __missing__(self, file: str) -> bool:
        """Classify a new file."""
        if len(self) > 1 << 16:  # code that is generated at run time has ever new names
            self.clear()
        verdict = self[file] = file.startswith(self._STARTS) or any(
            f"{os.sep}site-packages{os.sep}{package}{os.sep}" in file for package in self._PACKAGES
        )
        return verdict


_inside = Inside()


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside of PyTorch, from this frame outwards."""
    while frame is not None and _inside[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


class LineRecorder:
    """The nodes that one thread makes in one profiler session, with the line of each call.

    Attributes:
        exact: whether the line of each node is known, and not only the line of the call.
        store: where the recorder belongs; ``None`` once the session is over.
    """

    exact = False

    def __init__(self, store: Store) -> None:
        self.tid = threading.get_native_id()
        self.store: Store | None = store
        # The sequence number of a node and the place of its line, alternating: one call of C writes
        # both, so that no interrupt and no other thread comes in between.
        self._nodes = array("q")
        self._settled = 0
        self._ids: dict[_Key, int] = {}
        self._codes: dict[int, CodeType] = {}  # by place; kept, so that their ids stay unique

    def begin(self) -> None:
        """Record the nodes of an outermost call."""

    def enter(self, module: torch.nn.Module) -> int:
        """Give the nodes of a call their place, which is returned.

        The line that calls a module of PyTorch's own made all of the module's nodes; -1 for other
        modules.
        """
        home = type(module).__module__
        place = -1
        if home.startswith("torch.") and not home.endswith(".container"):
            place = self._call_site()
        self.turn(place)
        return place

    def turn(self, place: int) -> None:
        """Give the nodes made from now on a place; -1 for none."""
        number = autograd.sequence_number()
        if self.store is None or number < 0:
            return
        if self._nodes and self._nodes[-2] == number:
            self._nodes[-1] = place
        else:
            self._nodes.extend((number, place))

    def end(self, *, in_order: bool) -> None:
        """Stop recording: the outermost call has ended, in order or by an interrupt."""
        self.turn(-1)

    def settle(self) -> None:
        """Count the nodes of the outermost call that has ended."""
        if self.store is not None:
            count = len(self._nodes) // 2
            self.store.count += count - self._settled
            self._settled = count

    def close(self) -> None:
        """Record nothing more: the session is over."""
        self.store = None

    def forget(self) -> None:
        """Release code and classes of nodes: the thread may keep its recorder for long."""
        self._ids.clear()
        self._codes.clear()
        del self._nodes[:]

    def lines(self) -> list[SourceLine]:
        """Return the line of each place."""
        return [
            describe(self._codes[place], lasti, kind.__name__ if kind else "")
            for (_, lasti, kind), place in self._ids.items()
        ]

    def made(self) -> Made:
        """Return the nodes as runs, one for each call."""
        first, place = self._columns()
        # A call's nodes reach up to the next turn; the last run is open, and is given up.
        return Made(first[:-1], np.diff(first), place[:-1])

    def _columns(self) -> tuple[Any, Any]:
        first, place = np.array(self._nodes, np.int64).reshape(-1, 2).T
        return first, place

    def _call_site(self) -> int:
        frame = user_frame(sys._getframe(1))
        return -1 if frame is None else self._place((id(frame.f_code), frame.f_lasti, None), frame)

    def _place(self, key: _Key, frame: FrameType) -> int:
        place = self._ids.get(key)
        if place is None:
            place = len(self._ids)
            self._codes[place] = frame.f_code  # first: after an interrupt the place is used again
            self._ids[key] = place
        return place


class ExactLineRecorder(LineRecorder):
    """The nodes that one thread makes in one profiler session, with the line of each node."""

    exact = True

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._unnumbered = 0  # how many nodes without a number the hook has seen
        self._hook = self._make_hook()

    def _make_hook(self) -> Callable[..., None]:
        keep = self._nodes.extend
        ids, place_of, frame_at = self._ids, self._place, sys._getframe

        def made(node: torch.autograd.graph.Node) -> None:
            # Anything that this raised or returned would end the user's forward.
            try:
                number = _number_of(node)
                if number >= _MOST_NUMBER:
                    self._unnumbered += 1
                    return
                if self.store is None:
                    return
                frame = user_frame(frame_at(1))
                if frame is None:
                    return
                key = (id(frame.f_code), frame.f_lasti, type(node))
                try:
                    place = ids[key]
                except KeyError:
                    place = place_of(key, frame)
                keep((number, place))
            except Exception as error:
                pass_on(error)

        dynamo.keep_from_dynamo(made)
        return made

    def begin(self) -> None:
        """Have autograd call the hook for each node that this thread makes."""
        if _push_node_hook is not None:
            _push_node_hook(self._hook)

    def end(self, *, in_order: bool) -> None:
        """Stop that. After an interrupt the hook may be gone; another's must not be removed."""
        for _ in range(1 if in_order else self._times_pushed()):
            _pop_node_hook()

    def _times_pushed(self) -> int:
        """Return how often the hook is on this thread, by making a node that has no number.

        PyTorch has no query for it. Autograd restores its thread's state after each node, which can
        remove what an interrupt left behind.
        """
        before = self._unnumbered
        with torch.enable_grad():
            leaf = torch.empty(0, requires_grad=True)
            leaf.view_as(leaf)
        return self._unnumbered - before

    def made(self) -> Made:
        """Return the nodes as runs of one number each."""
        first, place = self._columns()
        return Made(first, np.ones_like(first), place)


_LineRecorder: type[LineRecorder] = LineRecorder if _push_node_hook is None else ExactLineRecorder
lines_are_exact = _LineRecorder.exact


class Store:
    """What one profiler session has recorded, on all threads.

    Attributes:
        complete: false once there was no more room.
        count: how many nodes the outermost calls that have ended made.
    """

    def __init__(self) -> None:
        self.complete = True
        self.count = 0
        self._recorders: list[LineRecorder] = []

    def recorder(self) -> LineRecorder:
        """Return a recorder for a new thread."""
        recorder = _LineRecorder(self)
        self._recorders.append(recorder)
        return recorder

    def has_room(self) -> bool:
        """Return whether another outermost call may be recorded."""
        if self.count >= MOST_NODES:
            self.complete = False
        return self.complete

    def close(self) -> LineTable | None:
        """Return the table; ``None`` if it has no lines."""
        lines: dict[SourceLine, int] = {}
        runs: dict[int, list[Made]] = {}
        for recorder in self._recorders:
            recorder.close()
            made_nodes = recorder.made()
            line_numbers = np.array([*(_known(lines, s) for s in recorder.lines()), -1], np.int64)
            runs.setdefault(recorder.tid, []).append(
                Made(made_nodes.first, made_nodes.count, line_numbers[made_nodes.line])
            )
            recorder.forget()
        threads = {tid: _tidied(thread_runs) for tid, thread_runs in runs.items()}
        if not lines:
            return None
        return LineTable(tuple(lines), threads, _LineRecorder.exact, self.complete)


def _known(lines: dict[SourceLine, int], line: SourceLine) -> int:
    if line.node.startswith(COMPILED_FUNCTION):  # one node for many lines
        return -1
    return lines.setdefault(line, len(lines))


def _tidied(pieces: list[Made]) -> Made:
    """Return the runs of one thread in order, and join runs of one line that follow each other.

    Runs that overlap are left out, as their lines are not known: the number of a thread that ended
    was used again, or autograd's counter was set back.
    """
    first, count, line = (
        np.concatenate([getattr(piece, name) for piece in pieces])
        for name in Made.__struct_fields__
    )
    has_nodes = (line >= 0) & (count > 0)
    first, count, line = first[has_nodes], count[has_nodes], line[has_nodes]
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
    """The lines of the running session, until they go into its trace and its profile."""

    def __init__(self) -> None:
        # By session, one at most. No lock: an interrupt while a ``with`` releases it would leave it
        # locked for good.
        self._stores: dict[int, Store] = {}

    @property
    def is_open(self) -> bool:
        """Whether a session has lines that are in no trace yet."""
        return bool(self._stores)

    def recorder(self, session: int, own: LineRecorder | None) -> LineRecorder | None:
        """Return the calling thread's recorder for a session; ``None`` if there is no more room."""
        store = self._stores.get(session)
        if store is None:
            if self._stores:  # of a session that did not end in order
                self._stores = {}
            store = self._stores.setdefault(session, Store())  # another thread may be first
        if not store.has_room():
            return None
        return own if own is not None and own.store is store else store.recorder()

    def write(self) -> str | None:
        """Put the table into the trace that is being recorded, just before the recording stops.

        Returns:
            The table as text, for ``keep``; ``None`` if there are no lines.
        """
        stores, self._stores = self._stores, {}
        tables = [table for store in stores.values() if (table := store.close()) is not None]
        if not tables:
            return None
        form = format_lines(tables[-1])
        profiler.add_metadata(KEY, form)
        return form

    def keep(self, results: Any, form: str) -> None:
        """Keep a stopped profile's table for as long as its results live."""
        live_tables[results] = form


book = Book()
