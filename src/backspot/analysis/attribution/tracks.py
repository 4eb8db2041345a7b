"""Ownership as tracks of nested spans: which module's backward runs when, and on what.

The span of a module covers consecutive work of that module and of the modules inside it, for one
call of the module. So two spans of a track either nest or do not overlap. A compiled kernel that
works for several modules is in the span of the one with the largest share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from backspot.analysis.attribution.ownership import Owners, Ownership, Special
from backspot.analysis.attribution.spans import Module
from backspot.analysis.timeline import NOTHING, distinct, merged, take
from backspot.results.grouping import parents_of
from backspot.results.tracks import Arrow, Track, Tracks, TrackSpan
from backspot.trace import Events
from backspot.trace.events import Ints
from backspot.trace.labels import Kind, Label, readable_label


def find_tracks(events: Events, ownership: Ownership) -> Tracks:
    """Make the tracks of the threads that ran nodes, and of the queues that worked for them."""
    calls = _Calls(events, ownership)
    owners = _Around(ownership, calls)
    tracks = [
        Track(*events.threads[thread], False, _nested(_on_host(ownership, thread, calls), owners))
        for thread in ownership.passes.threads
    ]
    work = ownership.work
    tracks += [
        Track(*events.threads[queue], True, _nested(_on_device(ownership, queue, calls), owners))
        for queue in distinct(work.queue[(work.run >= 0) & (work.device >= 0)])
    ]
    tracks = [track for track in tracks if track.spans]
    paths = [ownership.owners.path(owner) for owner in range(len(ownership.owners))]
    return Tracks(_names(ownership), paths, tracks, _arrows(events, ownership, calls, tracks))


class _Calls:
    """The module's call in forward that made each node.

    Attributes:
        of_span: for each node the innermost call around the operator that made the node, and for
            other spans in the backward the call of the node around; ``NOTHING`` where no recorded
            call made it. A call that checkpointing runs again is backward itself, and not meant.
    """

    def __init__(self, events: Events, ownership: Ownership) -> None:
        spans, join, of_pass = ownership.spans, ownership.join, ownership.passes.of_span
        is_call = (spans.module >= 0) & (of_pass < 0)
        # The span that decides: around the operator, the node that fed this one, or the parent.
        decides = np.where(join.feeder >= 0, join.feeder, spans.parent)
        joined = np.flatnonzero(join.operator >= 0)
        decides[joined] = spans.of(events, join.operator[joined])
        up = np.where((decides >= 0) & ~is_call, decides, np.arange(len(decides)))
        for _ in range(len(up).bit_length()):  # each round doubles the distance covered
            up = up[up]
        self.of_span = np.where(is_call[up] & (of_pass >= 0), up, NOTHING)
        self._is_call = is_call.tolist()
        self._parent = spans.parent.tolist()
        self._owner = ownership.owners.of_modules(spans.module).tolist()
        self._around: dict[int, dict[int, int]] = {}

    def around(self, call: int) -> dict[int, int]:
        """Return the calls around a call and itself: for each owner the innermost one."""
        if call not in self._around:
            innermost_calls: dict[int, int] = {}
            span = call
            while span >= 0:
                if self._is_call[span]:
                    innermost_calls.setdefault(self._owner[span], span)
                span = self._parent[span]
            self._around[call] = innermost_calls
        return self._around[call]


def _arrows(
    events: Events, ownership: Ownership, calls: _Calls, tracks: list[Track]
) -> list[Arrow]:
    """Make an arrow for each call and each pass that ran nodes made in the call.

    The arrow leads to the first span of the call on a host thread in that pass.
    """
    spans, of_span = ownership.spans, ownership.passes.of_span
    nodes = np.flatnonzero(spans.is_node & (of_span >= 0) & (calls.of_span >= 0))
    runs_of_calls = {
        (around, owner, run)
        for call, run in set(
            zip(calls.of_span[nodes].tolist(), of_span[nodes].tolist(), strict=True)
        )
        for owner, around in calls.around(call).items()
    }
    first: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for number, track in enumerate(tracks):
        if track.on_device:
            continue
        for index, span in enumerate(track.spans):
            node_place = (span.start, number, index)
            key = (span.owner, span.run, span.call)
            first[key] = min(first.get(key, node_place), node_place)
    arrows = []
    for call, owner, run in sorted(runs_of_calls):
        target = first.get((owner, run, call))
        if target and target[0] > spans.start[call]:
            process, thread = events.threads[int(spans.thread[call])]
            start, end = int(spans.start[call]), int(spans.end[call])
            arrows.append(Arrow(process, thread, start, end, target[1], target[2]))
    return arrows


def _parents(owners: Owners) -> list[int]:
    """Return for each owner the one directly around it, ``NOTHING`` for none."""
    modules = [(owner, module) for owner, module in owners.each_module() if not module.is_region]
    by_root: dict[str, dict[str, tuple[int, Module]]] = defaultdict(dict)
    for owner, module in modules:
        by_root[module.root].setdefault(module.path, (owner, module))
    around = {
        root: parents_of(module for _, module in paths.values()) for root, paths in by_root.items()
    }
    parents = [NOTHING] * len(owners)
    for owner, module in modules:
        outer = around[module.root][module.path]
        if outer is not None:
            parents[owner], _ = by_root[module.root][outer]
    return parents


class _Around:
    """What lies around each owner."""

    def __init__(self, ownership: Ownership, calls: _Calls) -> None:
        self._parents = _parents(ownership.owners)
        self._calls = calls

    def way(self, owner: int, call: int) -> list[tuple[int, int]]:
        """Return the owners from the outermost one to this one, each with its call."""
        around = self._calls.around(call)
        way = []
        while owner >= 0:
            way.append((owner, around.get(owner, NOTHING)))
            owner = self._parents[owner]
        return way[::-1]


_Piece = tuple[int, int, int, int, int]
"""Start, end, owner, pass and call; ``NOTHING`` as the pass where it is no backward."""


def _on_host(ownership: Ownership, thread: int, calls: _Calls) -> Iterable[_Piece]:
    """Return what the thread executes: the innermost span, or launch of compiled code."""
    indices, nesting = ownership.spans.nesting[thread]
    compiled = ownership.compiled
    timeline = nesting.timeline.cut(merged(compiled.start, compiled.end))
    edges, values = timeline.edges, timeline.values[:-1]
    executing = np.flatnonzero(values >= 0)
    span = indices[values[executing]]
    launch = compiled.at(ownership.spans, span, edges[executing])
    launched = take(ownership.launch_shares.largest, launch)
    owner = np.where(launch >= 0, launched, ownership.owner[span])
    run, call = ownership.passes.of_span[span], calls.of_span[span]
    return _rows((edges[executing], edges[executing + 1], owner, run, call))


def _on_device(ownership: Ownership, queue: int, calls: _Calls) -> Iterable[_Piece]:
    """Return what the queue executes, by start."""
    work = ownership.work
    own_work = np.flatnonzero(work.queue == queue)
    call = take(calls.of_span, work.span)
    columns = (work.start, work.end, ownership.work_owner, work.run, call)
    return _rows(tuple(column[own_work] for column in columns))


def _rows(columns: tuple[Ints, ...]) -> Iterable[_Piece]:
    start, end, owner, run, call = (column.tolist() for column in columns)
    return zip(start, end, owner, run, call, strict=True)


def _nested(pieces: Iterable[_Piece], owners: _Around) -> list[TrackSpan]:
    spans: list[TrackSpan] = []
    around: list[TrackSpan] = []  # the open spans, all of one pass
    until: int | None = None
    last: tuple[int, int, int] | None = None
    for begin, end, owner, run, call in pieces:
        start = begin if until is None else max(begin, until)
        if end <= start:
            continue
        if (owner, run, call) != last:
            last = owner, run, call
            way = [] if run < 0 else owners.way(owner, call)
            same = 0 if not around or around[0].run != run else _common(around, way)
            _end(around[same:], until)
            del around[same:]
            for inner, of_call in way[same:]:
                around.append(TrackSpan(start, end, inner, len(around), run, of_call))
                spans.append(around[-1])
        until = end
    _end(around, until)
    return spans


def _common(around: list[TrackSpan], way: list[tuple[int, int]]) -> int:
    """Return how many of the open spans go on, and say in them whose call they are, if new."""
    same = 0
    for span, (owner, call) in zip(around, way, strict=False):
        if span.owner != owner or (span.call != call and NOTHING not in (span.call, call)):
            break
        span.call = max(span.call, call)  # ``NOTHING`` is less than any call
        same += 1
    return same


def _end(spans: list[TrackSpan], time: int | None) -> None:
    for span in spans:
        span.end = span.end if time is None else time


def _names(ownership: Ownership) -> list[str]:
    """Return the names that spans of each owner have."""
    named = [f"backward: {special.path}" for special in Special]
    for _, module in ownership.owners.each_module():
        label = Label(Kind.BACKWARD, module.path, module.class_name)
        named.append(f"backward: {module.path}" if module.is_region else readable_label(label))
    return named
