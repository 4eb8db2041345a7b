"""The host's side of the whole step: where it waits, what it launches, which lines it runs.

``waits`` finds the calls in which the host waits for a device, with the phase, the module and the
operator of each. ``batches`` finds which batches of worker processes were late. ``launches`` counts
the device work of each phase and module, and what the device waits for.
``lines`` deals out the host's time to lines of Python, of steps that were recorded with
stacks; ``real_time`` has how long these parts of a step take without stacks and profiler.

``report`` adds all that to the report.

The functions of this file ask a recording for that, each thing once.
"""

from __future__ import annotations

from backspot.analysis.host.lines import HostSites, find_sites
from backspot.analysis.host.real_time import HostSteps
from backspot.analysis.host.waits import (
    HostWaits,
    find_host_waits,
    lines_as_in,
    lines_by_turn,
    lines_of_waits,
    places_of_waits,
)
from backspot.analysis.recording import Recording, once
from backspot.results.host import Wait
from backspot.trace.events import Ints


@once
def waits_in(recording: Recording) -> HostWaits:
    """Return the calls of the steps in which the host waits for a device."""
    activity = recording.activity if recording.step_windows else None
    return find_host_waits(recording.events, recording.ledger, activity)


@once
def places_in(recording: Recording) -> tuple[list[Wait], list[Ints]]:
    """Return where the host waits, and for each place its calls as indices into the events."""
    waits, lines = waits_in(recording), lines_in(recording)
    return places_of_waits(recording.events, recording.ownership, waits, recording.typical, lines)


@once
def lines_in(recording: Recording) -> list[str]:
    """Return the line of each of ``waits_in``, ``""`` where it is not known."""
    stacked = recording.detailed
    waits = waits_in(stacked)
    lines = lines_of_waits(stacked.events, waits, *sites_in(stacked).texts)
    if stacked is recording:
        return lines
    known = lines_by_turn(stacked.events, stacked.ownership, waits, lines)
    return lines_as_in(known, recording.events, recording.ownership, waits_in(recording))


@once
def sites_in(recording: Recording) -> HostSites:
    """Return which line of the user's Python the host runs at each moment; needs stacks."""
    return find_sites(recording.events, recording.ownership)


def steps_in(recording: Recording) -> HostSteps:
    """Return the steps as the host has them: as marked, else as on the clock."""
    marks, windows = recording.ownership.steps, recording.windows
    marked = marks if len(marks.start) == len(windows.start) else windows
    chosen, noted = recording.typical.chosen, recording.ownership.noted
    return HostSteps(recording.events, marked.start, marked.end, chosen, noted)
