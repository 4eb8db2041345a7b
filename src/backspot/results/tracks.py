"""The labelled copy of a trace: which module's backward runs when, and on what."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Arrow", "Track", "TrackSpan", "Tracks"]


@dataclass(slots=True)
class TrackSpan:
    """One module's stretch of a track.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        owner: index into ``Tracks.names``.
        depth: how many spans of the track lie around it.
        run: the pass; a span never reaches into another.
    """

    start: int
    end: int
    owner: int
    depth: int
    run: int


@dataclass(frozen=True, slots=True)
class Track:
    """One host thread's or device queue's spans.

    Attributes:
        process: the process, as the trace numbers it.
        thread: the host thread or the device queue, as the trace numbers it.
        on_device: whether that is a device's queue.
        spans: by start, those around before those inside.
    """

    process: object
    thread: object
    on_device: bool
    spans: list[TrackSpan]


@dataclass(frozen=True, slots=True)
class Arrow:
    """From a module's call in forward to where its backward begins.

    Attributes:
        process: the process of the call, as the trace numbers it.
        thread: the thread of the call, as the trace numbers it.
        start: when the call begins, nanoseconds.
        end: when the call ends, nanoseconds.
        track: index into ``Tracks.tracks``.
        span: index of one of that track's spans.
    """

    process: object
    thread: object
    start: int
    end: int
    track: int
    span: int


@dataclass(frozen=True, slots=True)
class Tracks:
    """What a labelled trace shows in addition to the original.

    Attributes:
        names: how the spans of each owner are called: ``backward: path (class)``.
        tracks: one for each host thread that ran nodes and each queue that worked for them.
        arrows: from forward to backward.
    """

    names: list[str]
    tracks: list[Track]
    arrows: list[Arrow]
