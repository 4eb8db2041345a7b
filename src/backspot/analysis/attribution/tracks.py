"""Ownership as tracks of nested spans: which module's backward runs when, and on what.

The span of a module covers consecutive work of that module and of the modules inside it. So two
spans of a track either nest or do not overlap. A compiled kernel that works for several modules is
in the span of the one with the largest share.
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
from backspot.trace.labels import Kind, Label, format_label

__all__ = ["find_tracks"]


def find_tracks(events: Events, ownership: Ownership) -> Tracks:
    """Make the tracks of the threads that ran nodes, and of the queues that worked for them."""
    parents = _parents(ownership.owners)
    depths = _depths(parents)
    tracks = [
        Track(*events.threads[thread], False, _nested(_on_host(ownership, thread), parents, depths))
        for thread in ownership.passes.threads
    ]
    work = ownership.work
    tracks += [
        Track(*events.threads[queue], True, _nested(_on_device(ownership, queue), parents, depths))
        for queue in distinct(work.queue[(work.run >= 0) & (work.device >= 0)])
    ]
    tracks = [track for track in tracks if track.spans]
    return Tracks(_names(ownership), tracks, _arrows(events, ownership, tracks))


def _arrows(events: Events, ownership: Ownership, tracks: list[Track]) -> list[Arrow]:
    """Make an arrow for each call and each pass that ran nodes made in the call.

    The arrow leads to the first span of the module on a host thread in that pass.
    """
    spans, of_span = ownership.spans, ownership.passes.of_span
    nodes = np.flatnonzero(spans.is_node & (of_span >= 0) & (ownership.join.operator >= 0))
    operator = ownership.join.operator[nodes]
    around = spans.of(events, operator)
    parent, module, run_of = spans.parent.tolist(), spans.module.tolist(), of_span.tolist()
    owner = ownership.owners.of_modules(spans.module).tolist()
    made: set[tuple[int, int]] = set()
    for call, run in set(zip(around.tolist(), of_span[nodes].tolist(), strict=True)):
        at = call
        while at >= 0 and (at, run) not in made:
            made.add((at, run))
            at = parent[at]
    first: dict[tuple[int, int], tuple[int, int, int]] = {}
    for number, track in enumerate(tracks):
        if track.on_device:
            continue
        for index, span in enumerate(track.spans):
            here = (span.start, number, index)
            key = (span.owner, span.run)
            first[key] = min(first.get(key, here), here)
    arrows = []
    for call, run in sorted(made):
        target = first.get((owner[call], run))
        # Calls that checkpointing runs again are part of the backward.
        if module[call] >= 0 and run_of[call] < 0 and target and target[0] > spans.start[call]:
            process, thread = events.threads[int(spans.thread[call])]
            start, end = int(spans.start[call]), int(spans.end[call])
            arrows.append(Arrow(process, thread, start, end, target[1], target[2]))
    return arrows


def _parents(owners: Owners) -> list[int]:
    """Return for each owner the one directly around it, ``NOTHING`` for none."""
    modules = [(owner, module) for owner, module in owners.each_module() if not module.is_region]
    known: dict[str, dict[str, tuple[int, Module]]] = defaultdict(dict)
    for owner, module in modules:
        known[module.root].setdefault(module.path, (owner, module))
    around = {
        root: parents_of(module for _, module in paths.values()) for root, paths in known.items()
    }
    parents = [NOTHING] * len(owners)
    for owner, module in modules:
        outer = around[module.root][module.path]
        if outer is not None:
            parents[owner], _ = known[module.root][outer]
    return parents


def _depths(parents: list[int]) -> list[int]:
    """Return how many owners are around each."""
    depths = [NOTHING] * len(parents)
    for owner in range(len(parents)):
        way = [owner]
        while depths[way[-1]] < 0 and parents[way[-1]] >= 0:
            way.append(parents[way[-1]])
        depth = max(0, depths[way[-1]])
        for at in reversed(way):
            depths[at], depth = depth, depth + 1
    return depths


_Piece = tuple[int, int, int, int]
"""Start, end, owner and pass; ``NOTHING`` as the pass where it is no backward."""


def _on_host(ownership: Ownership, thread: int) -> Iterable[_Piece]:
    """Return what the thread executes: the innermost span, or launch of compiled code."""
    indices, nesting = ownership.spans.nesting[thread]
    compiled = ownership.compiled
    timeline = nesting.timeline.cut(merged(compiled.start, compiled.end))
    edges, values = timeline.edges, timeline.values[:-1]
    held = np.flatnonzero(values >= 0)
    span = indices[values[held]]
    launch = compiled.at(ownership.spans, span, edges[held])
    launched = take(ownership.launch_shares.largest, launch)
    owner = np.where(launch >= 0, launched, ownership.owner[span])
    columns = (edges[held], edges[held + 1], owner, ownership.passes.of_span[span])
    return _rows(columns)


def _on_device(ownership: Ownership, queue: int) -> Iterable[_Piece]:
    """Return what the queue executes, by start."""
    work = ownership.work
    mine = np.flatnonzero(work.queue == queue)
    columns = (work.start, work.end, ownership.work_owner, work.run)
    return _rows(tuple(column[mine] for column in columns))


def _rows(columns: tuple[Ints, ...]) -> Iterable[_Piece]:
    start, end, owner, run = (column.tolist() for column in columns)
    return zip(start, end, owner, run, strict=True)


def _nested(pieces: Iterable[_Piece], parents: list[int], depths: list[int]) -> list[TrackSpan]:
    spans: list[TrackSpan] = []
    around: list[TrackSpan] = []  # the open spans, all of one pass
    until: int | None = None
    for begin, end, owner, run in pieces:
        start = begin if until is None else max(begin, until)
        if end <= start:
            continue
        # From the owner outwards, up to the first owner with an open span.
        opened: list[int] = []
        at = NOTHING if run < 0 else owner
        same_run = bool(around) and around[0].run == run
        while at >= 0 and not (
            same_run and depths[at] < len(around) and around[depths[at]].owner == at
        ):
            opened.append(at)
            at = parents[at]
        same = 0 if at < 0 else depths[at] + 1
        _end(around[same:], until)
        del around[same:]
        until = end
        for inner in reversed(opened):
            around.append(TrackSpan(start, end, inner, len(around), run))
            spans.append(around[-1])
    _end(around, until)
    return spans


def _end(spans: list[TrackSpan], time: int | None) -> None:
    for span in spans:
        span.end = span.end if time is None else time


def _names(ownership: Ownership) -> list[str]:
    """Return the names that spans of each owner have."""
    named = [f"backward: {special.path}" for special in Special]
    for _, module in ownership.owners.each_module():
        label = Label(Kind.BACKWARD, module.path, module.class_name)
        named.append(f"backward: {module.path}" if module.is_region else format_label(label))
    return named
