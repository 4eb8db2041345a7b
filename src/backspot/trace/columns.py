"""Where columns come to be: events are gathered piece by piece, from one reader or from several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from backspot.trace.events import Category, Events, Flows, Ints
from backspot.trace.source_lines import LineTable
from backspot.trace.unknown import Unknown

__all__ = ["LONGEST_NS", "Columns", "Index"]

LONGEST_NS = 30 * 24 * 3600 * 10**9
"""Nanoseconds, thirty days: what no recording lasts, and so nothing in one."""
_MOST_NS = 1 << 60
"""Nanoseconds that all events may last together, 36 years of threads: any sum of times, each of
which counts an event once for each of a few purposes, then fits 64 bits."""
_MARKS = ("ProfilerStep#", "enumerate(DataLoader)#")
_TOGETHER = 1 << 17
"""Rows to join at a time: many small arrays would leave memory in shreds."""
# What is bounded by its making takes fewer bytes.
_NARROW: dict[str, Any] = {"category": np.int8, "name": np.int32, "thread": np.int32}


class Index(dict[Any, int]):
    """Numbers things in the order in which they are first asked for; ``None`` is ``""``."""

    def __missing__(self, key: object) -> int:
        if key is None:
            return self[""]
        self[key] = number = len(self)
        return number


class Columns:
    """Gathers columns piece by piece; the only place where they come to be."""

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
    )
    FLOWS = ("identity", "forward", "thread", "time")

    def __init__(self) -> None:
        self.names = Index()
        self.threads = Index()
        self.logical_threads: dict[int, int] = {}
        self.lines = LineTable()
        self.unknown = Unknown()
        self._pieces: dict[str, list[Ints]] = {field: [] for field in self.FIELDS}
        self._flows: dict[str, list[Ints]] = {field: [] for field in self.FLOWS}
        self._whole, self._apart = 0, 0  # pieces joined already, rows in those that are not
        # Apart from the others: which threads come first must not hang on where pieces end.
        self._flow_threads = Index()
        self._odd_identities = Index()

    def add(self, *columns: Ints) -> None:
        """Add a piece: arrays of equal length in the order of ``FIELDS``."""
        if len(columns[0]):
            for (field, gathered), column in zip(self._pieces.items(), columns, strict=True):
                gathered.append(column.astype(_NARROW.get(field, np.int64), copy=False))
            self._apart += len(columns[0])
            if self._apart >= _TOGETHER:
                self._apart = 0
                for gathered in self._pieces.values():
                    gathered[self._whole :] = [np.concatenate(gathered[self._whole :])]
                self._whole += 1

    def add_flows(
        self,
        identities: Sequence[object],
        forward: Sequence[bool],
        threads: Sequence[tuple[object, object]],
        times: Ints,
    ) -> None:
        """Note ends of ``fwdbwd`` arrows.

        Args:
            identities: the two ends of an arrow share one.
            forward: whether each is the end on the forward's side.
            threads: (process, thread) of each, as the trace names them.
            times: nanoseconds, on the clock of the pieces' ``start``.
        """
        number, odd = self._flow_threads, self._odd_identities
        columns = (
            # Text and the like is numbered, below all that can be an identity itself.
            [
                key if isinstance(key, int) and 0 <= key < 1 << 62 else -1 - odd[repr(key)]
                for key in identities
            ],
            forward,
            [number[thread] for thread in threads],
            times,
        )
        for gathered, column in zip(self._flows.values(), columns, strict=True):
            gathered.append(np.array(column, np.int64))

    def __len__(self) -> int:
        return sum(map(len, self._pieces["start"]))

    def extend(self, other: Columns) -> None:
        """Add what another reader gathered behind what is here, as if one had read both."""
        if other.lines.lines or other.lines.broken:
            self.lines = other.lines
        self.unknown.extend(other.unknown)
        names, threads = (
            _renumbered(other.names, self.names),
            _renumbered(other.threads, self.threads),
        )
        pieces = {
            **other._pieces,
            "name": [names[piece] for piece in other._pieces["name"]],
            "thread": [threads[piece] for piece in other._pieces["thread"]],
        }
        flow_threads = _renumbered(other._flow_threads, self._flow_threads)
        odd = -1 - _renumbered(other._odd_identities, self._odd_identities)
        flows = {
            **other._flows,
            "identity": [
                np.where(piece < 0, odd[-1 - np.minimum(piece, -1)], piece) if len(odd) else piece
                for piece in other._flows["identity"]
            ],
            "thread": [flow_threads[piece] for piece in other._flows["thread"]],
        }
        for mine, theirs in ((self._pieces, pieces), (self._flows, flows)):
            for field, gathered in mine.items():
                gathered += theirs[field]
        self._whole, self._apart = len(self._pieces["start"]), 0

    def compact(self) -> None:
        """Join the pieces, to hand them on."""
        for gathered in (*self._pieces.values(), *self._flows.values()):
            gathered[:] = [_joined(gathered)]
        self._whole, self._apart = 1, 0

    def _leave_out_impossible(self) -> int:
        """Leave out events that cannot be of one recording.

        What starts as far from the middle one as no recording lasts is left out, and where all
        together last longer than can be, the longest.

        Returns:
            How many there were.
        """
        self.compact()
        start, duration = self._pieces["start"][0], self._pieces["duration"][0]
        kept = duration <= LONGEST_NS
        if len(start) and int(start.max()) - int(start.min()) > LONGEST_NS:
            middle = np.partition(start, len(start) // 2)[len(start) // 2]
            kept &= np.abs(start - middle) < LONGEST_NS
        if duration.sum(dtype=np.float64, where=kept) > _MOST_NS:
            shortest = np.argsort(np.where(kept, duration, 0), kind="stable")
            lasting = np.cumsum(np.where(kept, duration, 0)[shortest], dtype=np.float64)
            kept[shortest[lasting > _MOST_NS]] = False
        left_out = len(kept) - int(np.count_nonzero(kept))
        if left_out:
            for gathered in self._pieces.values():
                gathered[0] = gathered[0][kept]
        return left_out

    def _tell_marks_from_operators(self) -> None:
        """Make annotations of marks that were written as operators.

        ``backspot.profile`` writes its marks in the way that an interrupt cannot leave open, which
        Kineto takes for operators.
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
        """All pieces as one ``Events``, its clock set to zero at the first event.

        The pieces are given up on the way, so that nothing is held twice.

        Args:
            source: what was read, for people.
            warnings: what was wrong with it.
            impossible: how many events were left out because their times are impossible; those that
                are so beside the others are left out here.
            truncated: whether the trace is cut short.
        """
        impossible += self._leave_out_impossible()
        self._tell_marks_from_operators()
        arrays: dict[str, Ints] = {
            field: _joined(gathered).astype(_NARROW.get(field, np.int64), copy=False)
            for field, gathered in self._pieces.items()
        }
        origin = int(arrays["start"].min()) if len(arrays["start"]) else 0
        arrays["start"] -= origin
        flows = self._arrows(origin)
        return Events(
            **arrays,
            names=tuple(self.names),
            threads=tuple(self.threads),
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
            lines=self.lines,
        )

    def _arrows(self, origin: int) -> Flows:
        """The arrows of which both ends are there; the last beginning of an identity counts."""
        identity, forward, place, time = (_joined(gathered) for gathered in self._flows.values())
        begins, ends = np.flatnonzero(forward), np.flatnonzero(forward == 0)
        begins = begins[np.argsort(identity[begins], kind="stable")]
        at = np.searchsorted(identity[begins], identity[ends], side="right") - 1
        begin = np.append(begins, -1)[at]
        matched = (at >= 0) & (np.append(identity, -1)[begin] == identity[ends])
        begin, end = begin[matched], ends[matched]
        number = self.threads
        thread = np.array([number[place] for place in self._flow_threads], np.int64)
        if not len(thread):
            thread = np.empty(0, np.int64)
        return Flows(thread[place[begin]], thread[place[end]], time[end] - origin)


def _impossible_times(count: int) -> list[str]:
    """The warning for events that were left out, where there are any."""
    if not count:
        return []
    return [
        f"{count} events with impossible times (negative, missing, no number, or beyond any "
        "recording's) were left out."
    ]


def _joined(pieces: list[Ints]) -> Ints:
    """All pieces in a row; the list is emptied."""
    if len(pieces) == 1:
        return pieces.pop()
    whole = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    pieces.clear()
    return whole


def _renumbered(theirs: Index, mine: Index) -> Ints:
    """For each number in one index the number in the other."""
    return np.array([mine[key] for key in theirs], np.int64)
