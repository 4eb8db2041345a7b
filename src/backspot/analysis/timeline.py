"""Timelines: piecewise constant functions of time, which say what holds each nanosecond.

What holds a moment is an index, or -1 for nothing. Spans that overlap become a timeline by a rule:
``innermost`` or ``first_started``. ``layered`` lays timelines over each other; ``cut`` and ``over``
divide them along other times. No step loses a nanosecond or counts one twice, so all sums are
exact.

The functions at the end group and look up values in arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec
import numpy as np

from backspot.trace.events import Events, Ints, Mask

NOTHING = -1
FAR = int(np.iinfo(np.int64).max)
"""Nanoseconds, later than any moment."""
_FEW = 16  # an array is scanned this many times in less time than it is sorted


class Timeline(msgspec.Struct, frozen=True):
    """``values[i]`` holds from ``edges[i]`` until ``edges[i + 1]``; before the first, nothing does.

    Attributes:
        edges: nanoseconds, strictly increasing.
        values: what holds from each edge on, ``NOTHING`` for nothing. The last value holds for
            ever; in a timeline made of spans it is ``NOTHING``.
    """

    edges: Ints
    values: Ints

    def at(self, times: Ints) -> Ints:
        """Return what holds at each of ``times``."""
        if not len(self.edges):
            return np.full(len(times), NOTHING, np.int64)
        index = np.searchsorted(self.edges, times, side="right") - 1
        values: Ints = self.values.take(index, mode="clip")
        values[index < 0] = NOTHING
        return values

    def over(self, times: Ints) -> Ints:
        """Return what holds at each of ``times``, which are sorted; faster than ``at`` for many."""
        first = np.searchsorted(times, self.edges, side="left")
        lasting = np.diff(np.concatenate([[0], first, [len(times)]]))
        return np.repeat(np.append(NOTHING, self.values), lasting)

    def cut(self, times: Ints) -> Timeline:
        """Return the timeline with edges at ``times``, too, which are few, sorted and distinct."""
        place = np.searchsorted(self.edges, times, side="left")
        new = np.append(self.edges, times[-1:] + 1)[place] != times
        place, times = place[new], times[new]
        if not len(times):
            return self
        values = np.append(NOTHING, self.values)[place]
        return Timeline(np.insert(self.edges, place, times), np.insert(self.values, place, values))

    def where(self, keep: Mask) -> Timeline:
        """Return the timeline with only those values for which ``keep[value]`` is true."""
        values = np.where(take(keep, self.values, False), self.values, NOTHING)
        return Timeline(self.edges, values)


EMPTY = Timeline(np.empty(0, np.int64), np.empty(0, np.int64))
"""Nothing, at all times."""


class Nesting(msgspec.Struct, frozen=True):
    """The call stack of one thread.

    Attributes:
        timeline: the span that is on top of the stack at each moment.
        parent: the span directly around each span, ``NOTHING`` for none.
    """

    timeline: Timeline
    parent: Ints


def innermost(start: Ints, end: Ints, *, tolerance: int = 0) -> Nesting:
    """Nest spans as a call stack does.

    At each moment the span that was entered last holds::

        a  |-----------------------|
        b      |---------|   |---|  d
        c         |---|
           aaaabbbcccccbbbaaadddddaa

    The parent of ``c`` is ``b``; those of ``b`` and ``d`` are ``a``. The lengths that a span holds
    and those that its descendants hold sum to its duration.

    Nearly all threads nest as in the picture: each span ends within its parent. These are nested
    all at once, and all others one by one. Both ways give the same for spans that nest.

    Args:
        start: nanoseconds.
        end: nanoseconds, not before ``start``.
        tolerance: by how many nanoseconds a rounded clock may let a span end after its parent, or
            after the start of its next sibling.
    """
    order = np.lexsort((-end, start))
    nesting = _nested(start, end, order)
    return nesting or _unwound(start.tolist(), end.tolist(), order.tolist(), tolerance)


def _nested(start: Ints, end: Ints, order: Ints) -> Nesting | None:
    """Nest all spans at once; ``None`` if a span ends after the one around it.

    A span that starts after ``n`` others, of which ``m`` have ended, lies in ``n - m`` spans: this
    is its depth.

    Args:
        start: nanoseconds.
        end: nanoseconds.
        order: the spans by start; of equal starts, the longest first.
    """
    lasting = order[end[order] > start[order]]
    begin, finish = start[lasting], end[lasting]
    count = len(lasting)
    place = np.arange(count)
    ended = np.sort(finish, kind="stable")  # fast for spans that lie in each other
    depth = place - np.searchsorted(ended, begin, side="right")
    # The span around is the last one before with a depth of one less.
    by_level = np.argsort(depth.astype(np.uint16) if count < 1 << 16 else depth, kind="stable")
    levels = (depth * count + place)[by_level]
    around = np.full(count, NOTHING)
    around[by_level] = by_level[np.searchsorted(levels, levels - count) - 1]
    around[depth == 0] = NOTHING
    inside = np.flatnonzero(depth)
    if (finish[inside] > finish[around[inside]]).any():
        return None
    # At one moment, inner spans end first, then outer ones; then outer spans start, then inner
    # ones. What happens last decides what holds. Before a span ends, it and all that started
    # before have started, and those of them have ended that are not around it.
    started = np.searchsorted(begin, finish)
    outer = take(lasting, around)
    times, values = np.empty((2, 2 * count), np.int64)
    for row, time, value in (
        (2 * started - 1 - depth, finish, outer),
        (2 * place - depth, begin, lasting),
    ):
        times[row], values[row] = time, value
    last = np.append(times[1:] > times[:-1], True) if count else np.empty(0, bool)
    timeline = Timeline(times[last], values[last])
    parent = np.full(len(start), NOTHING, np.int64)
    parent[lasting] = outer
    momentary = end == start
    parent[momentary] = timeline.at(start[momentary])
    return Nesting(timeline, parent)


def _unwound(starts: list[int], ends: list[int], order: list[int], tolerance: int) -> Nesting:
    """Nest spans one by one, as a call stack grows and unwinds; arguments as in ``_nested``."""
    parent = np.full(len(starts), NOTHING, np.int64)
    edges: list[int] = []
    values: list[int] = []

    def hold(time: int, value: int) -> None:
        if edges and edges[-1] >= time:
            values[-1] = value
        else:
            edges.append(time)
            values.append(value)

    stack: list[int] = []

    def unwind(until: int) -> None:
        while stack and ends[stack[-1]] <= until:
            time = ends[stack.pop()]
            while stack and ends[stack[-1]] <= time:
                stack.pop()
            hold(time, stack[-1] if stack else NOTHING)

    for index in order:
        begin, finish = starts[index], ends[index]
        unwind(begin)
        # The sibling before ends after this start by no more than rounding: it ends here.
        while stack and ends[stack[-1]] - begin <= tolerance and finish > ends[stack[-1]]:
            ends[stack.pop()] = begin
            hold(begin, stack[-1] if stack else NOTHING)
        if stack:
            top = stack[-1]
            parent[index] = top
            if ends[top] < finish <= ends[top] + tolerance:
                ends[index] = finish = ends[top]
        if finish > begin:
            stack.append(index)
            hold(begin, index)
    if stack:
        unwind(max(ends[index] for index in stack))
    return Nesting(Timeline(np.array(edges, np.int64), np.array(values, np.int64)), parent)


def first_started(start: Ints, end: Ints, value: Ints) -> Timeline:
    """Make a timeline in which the span that started first holds until it ends.

    Later spans hold what the earlier ones leave of them::

        a  |---------|
        b      |---------|
        c        |---|
           aaaaaaaaaaabbbb
    """
    if not _in_order(start, end):
        order = np.lexsort((end, start))
        start, end, value = start[order], end[order], value[order]
    begin = start.copy()
    if len(begin) > 1:
        begin[1:] = np.maximum(start[1:], np.maximum.accumulate(end)[:-1])
    has_length = np.flatnonzero(end > begin)
    begin, end, value = begin[has_length], end[has_length], value[has_length]
    edges = np.empty(2 * len(begin), np.int64)
    values = np.full(2 * len(begin), NOTHING, np.int64)
    edges[0::2], edges[1::2], values[0::2] = begin, end, value
    # If one span ends as the next begins, the beginning counts.
    last = np.flatnonzero(np.append(edges[1:] > edges[:-1], True)[: len(edges)])
    return Timeline(edges[last], values[last])


def enclosing(
    events: Events, marks: Ints, thread: Ints, time: Ints, *, start: Ints | None = None
) -> Ints:
    """Return the mark (event index) around each moment on its thread, ``NOTHING`` for none.

    Of marks that overlap, the one that started first counts.

    Args:
        marks: the marks, as indices into ``events``.
        thread: for each moment its thread, ``NOTHING`` where that is not known.
        time: the moments, in nanoseconds.
        start: when each mark begins to hold, if that is later than it starts.
    """
    marks_around = np.full(len(time), NOTHING, np.int64)
    if not len(marks):
        return marks_around
    start = events.start[marks] if start is None else start
    end = events.end[marks]
    of_threads = [*grouped(events.thread[marks])]
    moments_of = dict(grouped(thread)) if len(of_threads) > _FEW else {}
    for number, own_marks in of_threads:
        moments = (
            moments_of.get(number, own_marks[:0])
            if moments_of
            else np.flatnonzero(thread == number)
        )
        marks_around[moments] = first_started(
            start[own_marks], end[own_marks], marks[own_marks]
        ).at(time[moments])
    return marks_around


def _in_order(first: Ints, second: Ints) -> bool:
    """Whether pairs are sorted."""
    if (first[1:] < first[:-1]).any():
        return False
    return not ((first[1:] == first[:-1]) & (second[1:] < second[:-1])).any()


def layered(*timelines: Timeline) -> Timeline:
    """Lay timelines over each other: at each moment, the first that holds anything decides.

    Without any timeline, nothing holds.
    """
    nonempty = [timeline for timeline in timelines if len(timeline.edges)]
    if len(nonempty) == 1:
        return nonempty[0]
    if len(nonempty) > _FEW:  # pairwise, so that the time does not grow with their number squared
        half = len(nonempty) // 2
        nonempty = [layered(*nonempty[:half]), layered(*nonempty[half:])]
    edges = merged(*(timeline.edges for timeline in nonempty))
    values = np.full(len(edges), NOTHING, np.int64)
    for timeline in nonempty:
        values = np.where(values == NOTHING, timeline.over(edges), values)
    return Timeline(edges, values)


def pieces(timeline: Timeline, windows: Timeline) -> tuple[Ints, Ints, Ints]:
    """Cut ``timeline`` along ``windows``, which are few.

    Returns:
        For each piece in a window: the window's value, the timeline's value, which may be
        ``NOTHING``, and the length. The lengths of a window's pieces sum to the window's length.
    """
    line = timeline.cut(windows.edges)
    window = windows.over(line.edges[:-1])
    inside = window != NOTHING
    return window[inside], line.values[:-1][inside], np.diff(line.edges)[inside]


def merged(*edges: Ints) -> Ints:
    """Return all edges, sorted and distinct; ten times as fast as ``np.unique``, which hashes."""
    merged = np.concatenate([np.empty(0, np.int64), *edges])
    merged.sort(kind="stable")  # fast for arrays that are sorted in parts
    return merged.compress(np.append(True, merged[1:] > merged[:-1])[: len(merged)])


@overload
def take(column: Mask, index: Ints, missing: bool) -> Mask: ...
@overload
def take(column: Ints, index: Ints, missing: int = NOTHING) -> Ints: ...
def take(column: np.ndarray, index: Ints, missing: int = NOTHING) -> np.ndarray:
    """Look up ``column[index]``, with ``missing`` where the index is negative.

    Args:
        column: integers or truth values; it may be empty.
        missing: what is returned for negative indices.
    """
    if len(column) <= len(index):
        extended = np.empty(len(column) + 1, bool if column.dtype == bool else np.int64)
        extended[0], extended[1:] = missing, column
        return extended.take(index + 1, mode="clip")
    values = column.take(index, mode="clip")  # a long column takes longer to extend than to look at
    values = values if values.dtype == bool else values.astype(np.int64, copy=False)
    values[index < 0] = missing
    return values


def distinct(values: Ints) -> list[int]:
    """Return the distinct values, sorted; fast if equal values come in runs, as threads do."""
    if not len(values):
        return []
    runs = np.sort(values[np.append(True, values[1:] != values[:-1])])
    distinct_values: list[int] = runs[np.append(True, runs[1:] != runs[:-1])].tolist()
    return distinct_values


def is_among(values: Ints, times: Ints) -> Mask:
    """Whether each value is one of these, which are sorted."""
    is_member: Mask = np.append(times, FAR)[np.searchsorted(times, values)] == values
    return is_member


def is_in(values: Ints, wanted: Ints | Sequence[int]) -> Mask:
    """Whether each value is one of those that are wanted; as ``np.isin``, but by a table."""
    wanted = np.asarray(wanted, np.int64)
    if not len(wanted):
        return np.zeros(len(values), bool)
    least = int(wanted.min())
    many = int(wanted.max()) - least + 1
    if many > 4 * (len(values) + len(wanted)) + 65_536:
        return np.isin(values, wanted)
    table = np.zeros(many + 2, bool)
    table[wanted - (least - 1)] = True
    is_member: Mask = table.take(values - (least - 1), mode="clip")  # both ends are of all others
    return is_member


def quantile(values: np.ndarray, share: float) -> np.ndarray:
    """Return a quantile along the first axis, as ``np.quantile``, which imports masked arrays."""
    ordered, position = np.sort(values, axis=0), share * (len(values) - 1)
    lower = int(position)
    low, high = ordered[lower], ordered[min(lower + 1, len(values) - 1)]
    fraction = position - lower
    quantiles: np.ndarray = (
        low + (high - low) * fraction if fraction < 0.5 else high - (high - low) * (1 - fraction)
    )
    return quantiles


def median(values: np.ndarray | Sequence[Any], axis: int = 0) -> np.ndarray:
    """Return the median of what is not NaN, as ``np.nanmedian``, which imports masked arrays."""
    ordered = np.sort(np.asarray(values, np.float64), axis=axis)
    count = np.sum(ordered == ordered, axis=axis, keepdims=True)  # NaNs are sorted last
    lower, upper = (
        np.take_along_axis(ordered, index, axis) for index in ((count - 1) // 2, count // 2)
    )
    medians: np.ndarray = ((lower + upper) / 2).squeeze(axis)
    return medians


def grouped(column: Ints, index: Ints | None = None) -> Iterator[tuple[int, Ints]]:
    """Group indices by their value in a column, such as events by their thread.

    The time is linear, however many values there are.

    Args:
        index: the indices to group, in any order; all of the column where left out.

    Yields:
        Each value that occurs, in ascending order, and its part of ``index``.
    """
    values = column if index is None else column[index]
    for value, positions in _places(values):
        yield value, positions if index is None else index[positions]


def _places(values: Ints) -> Iterator[tuple[int, Ints]]:
    values_found = distinct(values)
    if len(values_found) <= _FEW:
        for value in values_found:
            yield value, np.flatnonzero(values == value)
        return
    order = np.argsort(values, kind="stable")
    begins = np.searchsorted(values[order], values_found)
    yield from zip(values_found, np.split(order, begins[1:]), strict=True)


def numbered(values: Ints) -> tuple[Ints, Ints]:
    """Return the distinct values, sorted, and the position of each value among these.

    As ``np.unique`` with ``return_inverse``, but by a table, unless the table would be large.

    Args:
        values: integers, none negative.
    """
    most = int(values.max(initial=-1)) + 1
    if most > 4 * len(values) + 1024:
        distinct_values, positions = np.unique(values, return_inverse=True)
        return distinct_values.astype(np.int64), positions
    occurs = np.zeros(most, bool)
    occurs[values] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[values]
