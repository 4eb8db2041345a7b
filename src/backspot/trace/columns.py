"""Collect the columns of a trace piece by piece, from one reader or from several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from backspot.trace.compiled import CompiledTable
from backspot.trace.events import Allocations, Category, Events, Flows, Ints, Signature
from backspot.trace.frames import OF_OTHERS, OF_TORCH, Frames
from backspot.trace.names import (
    BACKWARD_HOOK,
    BATCH,
    COLLECTION,
    NEXT_BATCH,
    OPTIMIZER_FORMS,
    OPTIMIZER_GROUPS,
    PROFILER_STEP,
    SAVING,
    WAITED_AT,
)
from backspot.trace.source_lines import LineTable
from backspot.trace.unknown_categories import UnknownCategories

LONGEST_NS = 30 * 24 * 3600 * 10**9
"""Nanoseconds, thirty days: longer than any recording, and so longer than any event."""
_MOST_NS = 1 << 60
"""Nanoseconds that all events may last together, 36 years of threads. Then any sum of times that
counts an event a few times fits 64 bits."""
_MOST_NUMBER = 1 << 62
BETWEEN_TEXTS = b"\0"
"""Joins the texts of a ``Signature``; no JSON has this byte."""
# What the host writes about itself. What is written about a node, as ``UNREAD``, is read as an
# operator of that node.
_MARKS = (
    PROFILER_STEP,
    NEXT_BATCH,
    COLLECTION,
    SAVING,
    WAITED_AT,
    BATCH,
    OPTIMIZER_FORMS,
    OPTIMIZER_GROUPS,
    BACKWARD_HOOK,
)
_TOGETHER = 1 << 17
"""Rows per chunk: keeping many small arrays would fragment the heap."""
# Columns with few distinct values take fewer bytes.
_NARROW: dict[str, Any] = {
    "category": np.int8,
    "name": np.int32,
    "thread": np.int32,
    "group": np.int32,
    "peer": np.int32,
    "signature": np.int32,
}


class Index(dict[Any, int]):
    """Numbers keys in the order in which they are first looked up; ``None`` is ``""``."""

    def __missing__(self, key: object) -> int:
        if key is None:
            return self[""]
        self[key] = number = len(self)
        return number


class Columns:
    """Columns that grow piece by piece.

    Attributes:
        names: the number of each name.
        threads: the number of each (process, thread).
        groups: the number of each process group.
        signatures: the number of each operator's inputs, by the texts of ``Signature`` as bytes,
            with ``BETWEEN_TEXTS`` in between.
        frame_texts: the number of each function and line of the user's code.
        logical_threads: as in ``Events``.
        lines: as in ``Events``.
        device_names: as in ``Events``.
        base_ns: the time that the times of events are relative to, nanoseconds.
        unknown: the events that were left out because their category is unknown.
    """

    FIELDS = (
        "start",
        "duration",
        "category",
        "name",
        "thread",
        "sequence",
        "forward_thread",
        "correlation",
        "device",
        "size",
        "group",
        "peer",
        "signature",
    )
    FLOWS = ("identity", "forward", "thread", "time")
    FRAMES = ("start", "thread", "duration", "function", "line")
    ALLOCATIONS = ("time", "thread", "address", "size", "allocated", "reserved", "device")

    def __init__(self) -> None:
        self.names = Index()
        self.threads = Index()
        self.groups = Index()
        self.signatures = Index()
        self.frame_texts = Index()
        self.logical_threads: dict[int, int] = {}
        self.lines = LineTable()
        self.device_names: dict[int, str] = {}
        self.base_ns = 0
        self.compiled = CompiledTable()
        self.unknown = UnknownCategories()
        self._pieces: dict[str, list[Ints]] = {field: [] for field in self.FIELDS}
        self._flows: dict[str, list[Ints]] = {field: [] for field in self.FLOWS}
        self._blocks: dict[str, list[Ints]] = {field: [] for field in self.ALLOCATIONS}
        self._frames: dict[str, list[Ints]] = {field: [] for field in self.FRAMES}
        self._chunks, self._loose_rows = 0, 0  # pieces that are chunks, rows in those that are not
        # Apart from ``threads``: the order of threads must not depend on where pieces end.
        self._other_threads = Index()
        self._identities = Index()

    def add(self, *columns: Ints) -> None:
        """Add a piece: arrays of equal length in the order of ``FIELDS``."""
        if len(columns[0]):
            for (field, gathered), column in zip(self._pieces.items(), columns, strict=True):
                gathered.append(column.astype(_NARROW.get(field, np.int64), copy=False))
            self._loose_rows += len(columns[0])
            if self._loose_rows >= _TOGETHER:
                for gathered in self._pieces.values():
                    gathered[self._chunks :] = [np.concatenate(gathered[self._chunks :])]
                self._chunks, self._loose_rows = self._chunks + 1, 0

    def add_flows(
        self,
        identities: Sequence[object],
        forward: Sequence[bool],
        threads: Sequence[tuple[object, object]],
        times: Ints,
    ) -> None:
        """Add ends of ``fwdbwd`` arrows.

        Args:
            identities: the two ends of an arrow share one.
            forward: whether each is the end on the forward's side.
            threads: (process, thread) of each, as the trace names them.
            times: nanoseconds, on the clock of the pieces' ``start``.
        """
        columns = (
            list(map(self._identities.__getitem__, identities)),
            forward,
            self._threads_apart(threads),
            times,
        )
        for gathered, column in zip(self._flows.values(), columns, strict=True):
            gathered.append(np.array(column, np.int64))

    def add_allocations(self, threads: Iterable[tuple[object, object]], *columns: Ints) -> None:
        """Add blocks of memory that came or went.

        Args:
            threads: (process, thread) of each, as the trace names them.
            columns: the other columns of ``ALLOCATIONS``, in this order.
        """
        self._add_apart(self._blocks, threads, columns)

    def add_frames(self, threads: Iterable[tuple[object, object]], *columns: Ints) -> None:
        """Add calls of Python functions; arguments as for ``add_allocations``, with ``FRAMES``."""
        self._add_apart(self._frames, threads, columns)

    def _add_apart(
        self,
        into: dict[str, list[Ints]],
        threads: Iterable[tuple[object, object]],
        columns: tuple[Ints, ...],
    ) -> None:
        time, *others = columns
        added = (time, np.array(self._threads_apart(threads), np.int64), *others)
        for gathered, column in zip(into.values(), added, strict=True):
            gathered.append(column)

    def _threads_apart(self, threads: Iterable[tuple[object, object]]) -> list[int]:
        return list(map(self._other_threads.__getitem__, threads))

    def __len__(self) -> int:
        return sum(map(len, self._pieces["start"]))

    def extend(self, other: Columns) -> None:
        """Add what another reader collected of the text that follows; ``other`` is used up."""
        if other.lines.lines or other.lines.broken:
            self.lines = other.lines
        if other.compiled.recorded:
            self.compiled = other.compiled
        self.unknown.extend(other.unknown)
        for columns, field, numbers in (
            (other._pieces, "name", _numbers(self.names, other.names)),
            (other._pieces, "thread", _numbers(self.threads, other.threads)),
            # The last is what -1 finds: no group.
            (other._pieces, "group", np.append(_numbers(self.groups, other.groups), -1)),
            (
                other._pieces,
                "signature",
                np.append(_numbers(self.signatures, other.signatures), -1),
            ),
            (other._flows, "identity", _numbers(self._identities, other._identities)),
            (other._flows, "thread", _numbers(self._other_threads, other._other_threads)),
            (other._blocks, "thread", _numbers(self._other_threads, other._other_threads)),
            (other._frames, "thread", _numbers(self._other_threads, other._other_threads)),
            *(
                (
                    other._frames,
                    text,
                    np.append(_numbers(self.frame_texts, other.frame_texts), [OF_TORCH, OF_OTHERS]),
                )
                for text in ("function", "line")
            ),
        ):
            columns[field] = [numbers[piece] for piece in columns[field]]
        for own, others in (
            (self._pieces, other._pieces),
            (self._flows, other._flows),
            (self._blocks, other._blocks),
            (self._frames, other._frames),
        ):
            for field, gathered in own.items():
                gathered += others[field]
        self._chunks, self._loose_rows = len(self._pieces["start"]), 0

    def compact(self) -> None:
        """Join all pieces into one."""
        tables = (self._pieces, self._flows, self._blocks, self._frames)
        for gathered in chain.from_iterable(columns.values() for columns in tables):
            gathered[:] = [_joined(gathered)]
        self._chunks, self._loose_rows = 1, 0

    def _leave_out_impossible(self) -> int:
        """Leave out events that cannot belong to one recording, and return their number.

        An event is left out if it starts further from the median start than a recording lasts. If
        all events together last impossibly long, the longest are left out.
        """
        self.compact()
        start, duration = self._pieces["start"][0], self._pieces["duration"][0]
        is_possible = duration <= LONGEST_NS
        if len(start) and int(start.max()) - int(start.min()) > LONGEST_NS:
            middle = np.partition(start, len(start) // 2)[len(start) // 2]
            is_possible &= np.abs(start - middle) < LONGEST_NS
        if duration.sum(dtype=np.float64, where=is_possible) > _MOST_NS:
            shortest = np.argsort(np.where(is_possible, duration, 0), kind="stable")
            lasting = np.cumsum(np.where(is_possible, duration, 0)[shortest], dtype=np.float64)
            is_possible[shortest[lasting > _MOST_NS]] = False
        left_out = len(is_possible) - int(np.count_nonzero(is_possible))
        if left_out:
            for gathered in self._pieces.values():
                gathered[0] = gathered[0][is_possible]
        return left_out

    def _turn_marks_into_annotations(self) -> None:
        """Make annotations of marks that were recorded as operators.

        ``backspot.profile`` writes its marks so that an interrupt cannot leave them open, with a
        range of PyTorch that Kineto records as an operator (``torch_internals.profiler``).
        """
        is_mark = np.fromiter((name.startswith(_MARKS) for name in self.names), bool)
        if is_mark.any():
            category, name = self._pieces["category"][0], self._pieces["name"][0]
            category[is_mark[name] & (category == Category.OPERATOR)] = Category.ANNOTATION

    def finish(
        self,
        source: str,
        warnings: Sequence[str] = (),
        *,
        impossible: int = 0,
        truncated: bool = False,
    ) -> Events:
        """Return all pieces as one ``Events``, on a clock that is zero at the first event.

        This object is empty afterwards, so that nothing is held twice.

        Args:
            source: what was read, for people.
            warnings: what was wrong with it.
            impossible: the number of events that were left out so far because of their times.
            truncated: whether the trace is cut short.
        """
        impossible += self._leave_out_impossible()
        self._turn_marks_into_annotations()
        arrays: dict[str, Ints] = {
            field: _joined(gathered).astype(_NARROW.get(field, np.int64), copy=False)
            for field, gathered in self._pieces.items()
        }
        origin = int(arrays["start"].min()) if len(arrays["start"]) else 0
        arrays["start"] -= origin
        flows = self._arrows(origin)
        allocations = self._allocations(origin)
        return Events(
            **arrays,
            names=tuple(self.names),
            threads=tuple(self.threads),
            groups=tuple(self.groups),
            flows=flows,
            logical_threads=dict(self.logical_threads),
            source=source,
            warnings=(
                *warnings,
                *_impossible_times(impossible),
                *self.unknown.warnings(),
            ),
            origin_ns=origin,
            truncated=truncated,
            unread=self.unknown.any,
            lines=self.lines,
            signatures=self._signatures(),
            allocations=allocations,
            frames=self._kept_frames(origin),
            device_names=self.device_names,
            clock_ns=self.base_ns + origin,
            compiled=self.compiled,
        )

    def _arrows(self, origin: int) -> Flows:
        """Match the ends of arrows; the last start with an identity counts."""
        identity, forward, place, time = (_joined(gathered) for gathered in self._flows.values())
        starts, ends = np.flatnonzero(forward), np.flatnonzero(forward == 0)
        starts = starts[np.argsort(identity[starts], kind="stable")]
        position = np.searchsorted(identity[starts], identity[ends], side="right") - 1
        ends, starts = ends[position >= 0], starts[position[position >= 0]]
        matched = identity[starts] == identity[ends]
        start, end = starts[matched], ends[matched]
        thread = _numbers(self.threads, self._other_threads)
        return Flows(thread[place[start]], thread[place[end]], time[end] - origin)

    def _signatures(self) -> tuple[Signature, ...]:
        texts = (key.split(BETWEEN_TEXTS) for key in self.signatures)
        return tuple(Signature(*(text.decode("utf-8", "replace") for text in key)) for key in texts)

    def _allocations(self, origin: int) -> Allocations:
        """Sort by time: Kineto writes one thread after the other."""
        columns = {field: _joined(gathered) for field, gathered in self._blocks.items()}
        if len(columns["time"]):
            columns["time"] -= origin
            columns["thread"] = _numbers(self.threads, self._other_threads)[columns["thread"]]
            order = np.argsort(columns["time"], kind="stable")
            columns = {field: column[order] for field, column in columns.items()}
        return Allocations(**columns)

    def _kept_frames(self, origin: int) -> Frames:
        columns = {field: _joined(gathered) for field, gathered in self._frames.items()}
        if not len(columns["start"]):
            return Frames()
        columns["start"] -= origin
        columns["thread"] = _numbers(self.threads, self._other_threads)[columns["thread"]]
        calls = np.sort(columns["start"])
        return Frames(**columns, texts=tuple(self.frame_texts), calls=calls)


def integers(values: Sequence[int | None]) -> Ints:
    """Return numbers as an array; -1 for ``None`` and for numbers that are out of range."""
    try:
        numbers = np.fromiter(values, np.int64, len(values))
    except (TypeError, OverflowError):
        # null; and AccumulateGrad's number in some versions, the largest of 64 bits
        values_or_none = (value if value is not None else -1 for value in values)
        numbers = np.array([v if -1 <= v < _MOST_NUMBER else -1 for v in values_or_none], np.int64)
    numbers[(numbers < -1) | (numbers >= _MOST_NUMBER)] = -1
    return numbers


def _impossible_times(count: int) -> list[str]:
    """Return the warning for events that were left out, if there are any."""
    if not count:
        return []
    return [
        f"{count} events with impossible times (negative, missing, no number, or beyond any "
        "recording's) were left out."
    ]


def _joined(pieces: list[Ints]) -> Ints:
    """Return all pieces as one array; the list is empty afterwards."""
    if len(pieces) == 1:
        return pieces.pop()
    joined = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    pieces.clear()
    return joined


def _numbers(index: Index, keys: Index) -> Ints:
    """Return the number in ``index`` of each key, in the order of the keys' own numbers."""
    return np.array([index[key] for key in keys], np.int64)
