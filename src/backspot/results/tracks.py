"""The labelled copy of a trace: which module's backward runs when, and on what."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Arrow", "Track", "TrackSpan"]


@dataclass(slots=True)
class TrackSpan:
    """One module's stretch of a track.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        owner: as ``Ownership.owner`` counts.
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
        thread: index into ``Events.threads``.
        on_device: whether that is a device's queue.
        spans: by start, those around before those inside.
    """

    thread: int
    on_device: bool
    spans: list[TrackSpan]


@dataclass(frozen=True, slots=True)
class Arrow:
    """From a module's call in forward to where its backward begins.

    Attributes:
        call: index of a span of ``Ownership.spans``.
        track: index of a track.
        span: index of one of its spans.
    """

    call: int
    track: int
    span: int
