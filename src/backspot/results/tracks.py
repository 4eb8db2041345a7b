"""Tracks of a labelled trace: which module's backward runs when, on which thread or stream.

All times are integer nanoseconds on the clock of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TrackSpan:
    """One interval of a track that belongs to one owner.

    Attributes:
        start: Start in nanoseconds.
        end: End in nanoseconds.
        owner: Index into ``Tracks.names``.
        depth: Number of spans of the track around this one.
        run: Index of the backward pass. A span never crosses into another pass.
        call: Number of the module's call in forward, -1 where that is not known. A span never
            crosses into the work of another call of the module.
    """

    start: int
    end: int
    owner: int
    depth: int
    run: int
    call: int


@dataclass(frozen=True, slots=True)
class Track:
    """Spans of one host thread or of one device queue.

    Attributes:
        process: Process id in the trace.
        thread: Thread id of the host thread or device queue in the trace.
        on_device: Whether this is a device queue.
        spans: Spans by start, outer spans before inner ones.
    """

    process: object
    thread: object
    on_device: bool
    spans: list[TrackSpan]


@dataclass(frozen=True, slots=True)
class Arrow:
    """Arrow from a module's call in forward to the start of its backward.

    Attributes:
        process: Process id of the call in the trace.
        thread: Thread id of the call in the trace.
        start: Start of the call in nanoseconds.
        end: End of the call in nanoseconds.
        track: Index into ``Tracks.tracks``.
        span: Index into the spans of that track.
    """

    process: object
    thread: object
    start: int
    end: int
    track: int
    span: int


@dataclass(frozen=True, slots=True)
class Tracks:
    """Everything that a labelled trace adds to the original.

    Attributes:
        names: Name of the spans of each owner: ``backward: path (class)``.
        paths: Path of each owner, as rows of a report have it.
        tracks: One track for each host thread that ran nodes and each device queue that worked for
            them.
        arrows: Arrows from forward to backward.
    """

    names: list[str]
    paths: list[str]
    tracks: list[Track]
    arrows: list[Arrow]
