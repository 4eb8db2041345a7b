"""Recordings compiled for replays, of files and of traces made by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from backspot.analysis.accounting.clock import Clock
from backspot.analysis.accounting.steps import StepWindows, step_windows
from backspot.analysis.attribution.launches import Windows
from backspot.analysis.attribution.ownership import Ownership, attribute
from backspot.analysis.attribution.partial import without_partial
from backspot.analysis.replay.recording import Recording, Refusal, prepare
from backspot.trace import Events, read_events

DATA = Path(__file__).parents[1] / "data"
WITHOUT_BACKWARD = ("cuda_graph_step", "tracelens_qwen_forward_only")
PATHS = {
    name: path
    for path in sorted(DATA.glob("*/*.json.gz"))
    if (name := path.name.partition(".json")[0].removesuffix(".trace")) not in WITHOUT_BACKWARD
}


def read(path: Path) -> Events:
    """The events of whole steps."""
    events = read_events(path)
    return without_partial(events, attribute(events))


def windows_of(events: Events, ownership: Ownership) -> StepWindows | Windows:
    return step_windows(events, ownership, Clock(ownership)) or ownership.windows


def prepared(path: Path) -> Recording | Refusal:
    events = read(path)
    ownership = attribute(events)
    return prepare(events, ownership, windows_of(events, ownership))


def recording(path: Path) -> Recording:
    found = prepared(path)
    assert isinstance(found, Recording), found
    return found


@cache
def recorded(name: str) -> Recording:
    """The recording of this name in ``tests/data``."""
    return recording(PATHS[name])
