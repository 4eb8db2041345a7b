"""The events of a trace with their owners, without what was recorded in part."""

from __future__ import annotations

from pathlib import Path

from backspot.analysis.attribution.ownership import Ownership, attribute
from backspot.analysis.attribution.partial import without_partial
from backspot.analysis.caveats import why_no_backward
from backspot.errors import NoBackwardError
from backspot.trace import Events, read_events

__all__ = ["owned", "read_whole", "whole"]


def read_whole(path: Path) -> tuple[Events, Ownership]:
    """Read a trace file in this process alone.

    Args:
        path: a trace file.

    Returns:
        The events without passes and steps that were recorded in part, and their owners.

    Raises:
        SourceNotFoundError: If the file is missing or cannot be read.
        NotATraceError: If the file is not a trace, or is too broken to use.
        NoBackwardError: If the trace has no backward pass.
    """
    events = read_events(path, jobs=1)
    return whole(events, owned(events))


def owned(events: Events) -> Ownership:
    """Return the owners of events.

    Raises:
        NoBackwardError: If the trace has no backward pass.
    """
    ownership = attribute(events)
    if not len(ownership.passes.start):
        raise NoBackwardError(why_no_backward(events))
    return ownership


def whole(events: Events, ownership: Ownership) -> tuple[Events, Ownership]:
    """Leave out what was recorded in part, as ``without_partial`` says, if a pass is left then."""
    complete = without_partial(events, ownership)
    if complete is events:
        return events, ownership
    found = attribute(complete)
    return (complete, found) if len(found.passes.start) else (events, ownership)
