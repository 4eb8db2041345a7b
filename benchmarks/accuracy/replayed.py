"""Recordings for replays, as the benchmarks make them of traces."""

from __future__ import annotations

from pathlib import Path

from backspot.analysis.accounting.clock import Clock
from backspot.analysis.accounting.rows import account
from backspot.analysis.accounting.steps import step_windows
from backspot.analysis.attribution.ownership import attribute
from backspot.analysis.attribution.partial import without_partial
from backspot.analysis.replay.cost import MEASURED, ProfilerCost
from backspot.analysis.replay.recording import Recording, Refusal, prepare
from backspot.analysis.replay.replay import fit, replay
from backspot.results.costs import Row
from backspot.results.grouping import fold
from backspot.trace import read_events

__all__ = ["corrected_rows", "cost_of", "read_recording"]


def read_recording(path: Path) -> Recording:
    """Compile a trace for replays.

    Raises:
        RuntimeError: If it cannot be replayed.
    """
    events = read_events(path)
    events = without_partial(events, attribute(events))
    ownership = attribute(events)
    windows = step_windows(events, ownership, Clock(ownership)) or ownership.windows
    recording = prepare(events, ownership, windows)
    if isinstance(recording, Refusal):
        raise RuntimeError(recording.reason)  # noqa: TRY004 - what the trace is, not a type
    return recording


def cost_of(recording: Recording, real_step_ns: float) -> tuple[ProfilerCost, str]:
    """Return the costs fitted to a real step, or the usual ones and why they do not fit."""
    cost = fit(recording, real_step_ns)
    return (MEASURED, cost.reason) if isinstance(cost, Refusal) else (cost, "")


def corrected_rows(recording: Recording, cost: ProfilerCost, depth: int | None) -> tuple[Row, ...]:
    """Return the rows of a report without the profiler's cost."""
    events = replay(recording, cost).events
    ownership = attribute(events)
    clock = Clock(ownership)
    windows = step_windows(events, ownership, clock) or ownership.windows
    rows = account(events, ownership, clock, windows).modules
    return rows if depth is None else fold(rows, depth)
