"""One typical step as a picture: what host and devices do, in coarse pieces of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from backspot.analysis.accounting.activity import IDLE, NAMES, OTHER, Activity
from backspot.analysis.accounting.clock import Clock
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.host.lines import HostSites, phases_of_host
from backspot.analysis.host.waits import HostWaits
from backspot.analysis.timeline import NOTHING, Timeline, first_started, merged, take
from backspot.results.costs import PhaseName
from backspot.results.host import StepPicture
from backspot.trace.events import Ints

_PIECES = 240
"""Parts of equal length into which the step is divided; each is what takes most of it."""
_WAITS = 30
"""How many waits are drawn at most, the longest."""
_TENTH = 10  # per cent to which the share of a device's work is rounded
_ROUNDING = 2_000  # nanoseconds between the clocks of host and device


def find_picture(
    ownership: Ownership,
    clock: Clock,
    activity: Activity | None,
    sites: HostSites,
    waits: HostWaits,
    lines: Sequence[str],
    step: int,
    window: tuple[int, int],
) -> StepPicture | None:
    """Draw a step; ``None`` if there is neither a device nor a line to draw.

    Args:
        sites: the places of the user's code, none without stacks.
        waits: the waits of all steps.
        lines: the line of each wait, ``""`` where it is not known.
        step: which step.
        window: when it begins and ends, in nanoseconds.
    """
    begin, end = window
    edges = begin + (end - begin) * np.arange(_PIECES + 1) // _PIECES
    if not (clock.devices or sites.sites) or edges[0] == edges[-1]:
        return None
    phases = phases_of_host(ownership, activity)
    host = _most(edges, phases)
    host[host < 0] = IDLE if activity else OTHER
    line, texts = sites.texts
    at_line = _most(edges, line)
    return StepPicture(
        wall_ns=end - begin,
        host=tuple((start, end, NAMES[one]) for start, end, one in _runs(edges, host)),
        lines=tuple((start, end, texts[one]) for start, end, one in _runs(edges, at_line)),
        device=_device(edges, ownership, phases) if clock.devices else (),
        waits=_waits(begin, ownership, waits, lines, step),
    )


def _shares(edges: Ints, line: Timeline) -> tuple[Ints, Ints]:
    """Return the values of a timeline, and for each piece how long each of them holds."""
    cut = merged(edges, line.edges)
    cut = cut[(cut >= edges[0]) & (cut <= edges[-1])]
    piece = np.searchsorted(edges, cut[:-1], side="right") - 1
    known, which = np.unique(line.over(cut[:-1]), return_inverse=True)
    held = np.zeros((len(edges) - 1, len(known)), np.int64)
    np.add.at(held, (piece, which.reshape(-1)), np.diff(cut))
    return known, held


def _most(edges: Ints, line: Timeline) -> Ints:
    """Return what holds longest in each piece."""
    known, held = _shares(edges, line)
    found: Ints = known[held.argmax(axis=1)]
    return found


def _runs(edges: Ints, values: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and value of each run of equal values, without those of nothing."""
    at = (edges - edges[0]).tolist()
    first = 0
    for value, run in groupby(values.tolist()):
        last = first + len(list(run))
        if value >= 0:
            yield at[first], at[last], value
        first = last


def _device(
    edges: Ints, ownership: Ownership, phases: Timeline
) -> tuple[tuple[int, int, PhaseName, int], ...]:
    """Return when devices work, for which phase of the host, and for which per cent of a piece."""
    work = ownership.work
    mine = np.flatnonzero(work.device >= 0)
    phase = phases.at(work.launch[mine])
    phase[phase < 0] = OTHER
    known, held = _shares(edges, first_started(work.start[mine], work.end[mine], phase))
    held = held[:, known >= 0]
    known = known[known >= 0]
    if not len(known):
        return ()
    busy = held.sum(axis=1) / np.diff(edges)
    rounded = (np.ceil(100 * busy / _TENTH) * _TENTH).astype(np.int64)
    most = known[held.argmax(axis=1)]
    both = np.where(rounded > 0, most * 1000 + rounded, NOTHING)
    return tuple(
        (start, end, NAMES[code // 1000], code % 1000) for start, end, code in _runs(edges, both)
    )


def _waits(
    begin: int, ownership: Ownership, waits: HostWaits, lines: Sequence[str], step: int
) -> tuple[tuple[int, int, int, int, str], ...]:
    """Return the longest waits of the step, each with the work that it waits for."""
    mine = np.flatnonzero(waits.step == step)
    length = waits.end[mine] - waits.start[mine]
    mine = np.sort(mine[np.argsort(-length, kind="stable")[:_WAITS]])
    work = ownership.work
    by_end = np.argsort(work.end, kind="stable")
    last = np.searchsorted(work.end[by_end], waits.end[mine] + _ROUNDING, side="right") - 1
    cause = take(by_end, last)
    columns = (waits.start[mine], waits.end[mine], take(work.start, cause), take(work.end, cause))
    return tuple(
        (start, end, max(0, since), until, lines[wait])
        for start, end, since, until, wait in zip(
            *((column - begin).tolist() for column in columns), mine.tolist(), strict=True
        )
        if until > start
    )
