"""One typical step as a picture: what host and devices do, in coarse pieces of time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from backspot.analysis.accounting.activity import IDLE, NAMES, OTHER
from backspot.analysis.host.lines import phases_of_host
from backspot.analysis.recording import Options, Recording
from backspot.analysis.timeline import FAR, NOTHING, Timeline, first_started, merged, take
from backspot.results.costs import PhaseName
from backspot.results.host import StepPicture
from backspot.results.report import Report, changed
from backspot.trace.events import Ints

_PIECES = 240
"""Parts of equal length into which the step is divided; each is what takes most of it."""
_WAITS = 30
"""How many waits are drawn at most, the longest."""
_TENTH = 10  # per cent to which the share of a device's work is rounded
_ROUNDING = 2_000  # nanoseconds between the clocks of host and device


def with_picture(report: Report, recording: Recording, _: Options) -> Report:
    """Add one step whose length is the closest to that of the typical step, if it has a picture.

    It is one with stacks, if any was recorded. Without a device and without lines, there is
    nothing to draw.
    """
    if len(recording.detailed.events.frames):
        recording = recording.detailed
    windows, typical, sites = recording.windows, recording.typical, recording.sites
    length = windows.end - windows.start
    far = np.where(typical.chosen, np.abs(length - typical.value(length)), FAR)
    step = int(far.argmin())
    begin, step_ns = int(windows.start[step]), int(length[step])
    edges = begin + step_ns * np.arange(_PIECES + 1) // _PIECES
    cut_short = recording.events.truncated
    if cut_short or step_ns < _PIECES or not (recording.clock.devices or sites.sites):
        return report
    activity = recording.activity if recording.step_windows else None
    phases = phases_of_host(recording.ownership, activity)
    host = _most(edges, phases)
    host[host < 0] = IDLE if activity else OTHER
    line, texts = sites.texts
    at_line = _runs(edges, _most(edges, line))
    picture = StepPicture(
        recorded_wall_ns=step_ns,
        host=tuple((start, end, NAMES[phase]) for start, end, phase in _runs(edges, host)),
        lines=tuple((start, end, texts[line]) for start, end, line in at_line),
        device=tuple(_device(edges, recording, phases)),
        waits=tuple(_waits(begin, recording, step)),
    )
    return changed(report, picture=picture)


def _shares(edges: Ints, line: Timeline) -> tuple[Ints, Ints]:
    """Return the values of a timeline, and for each piece how long each of them holds."""
    first, last = np.searchsorted(line.edges, edges[[0, -1]])
    cut = merged(edges, line.edges[first:last])
    piece = np.searchsorted(edges, cut[:-1], side="right") - 1
    values, value_of = np.unique(line.at(cut[:-1]), return_inverse=True)
    durations = np.zeros((len(edges) - 1, len(values)), np.int64)
    np.add.at(durations, (piece, value_of.reshape(-1)), np.diff(cut))
    return values, durations


def _most(edges: Ints, line: Timeline) -> Ints:
    """Return what holds longest in each piece."""
    values, durations = _shares(edges, line)
    longest: Ints = values[durations.argmax(axis=1)]
    return longest


def _runs(edges: Ints, values: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and value of each run of equal values, without those of nothing."""
    moments = (edges - edges[0]).tolist()
    first = 0
    for value, run in groupby(values.tolist()):
        last = first + len(list(run))
        if value >= 0:
            yield moments[first], moments[last], value
        first = last


def _device(
    edges: Ints, recording: Recording, phases: Timeline
) -> Iterator[tuple[int, int, PhaseName, int]]:
    """Yield when devices work, for which phase of the host, and for which per cent of a piece."""
    work = recording.ownership.work
    in_step = np.flatnonzero((work.device >= 0) & (work.end > edges[0]) & (work.start < edges[-1]))
    phase = phases.at(work.launch[in_step])
    phase[phase < 0] = OTHER
    values, durations = _shares(edges, first_started(work.start[in_step], work.end[in_step], phase))
    durations = np.where(values < 0, 0, durations)
    tenths = -(-100 * durations.sum(axis=1) // np.diff(edges) // _TENTH)
    both = np.where(tenths > 0, values[durations.argmax(axis=1)] * 1000 + tenths * _TENTH, NOTHING)
    for start, end, code in _runs(edges, both):
        yield start, end, NAMES[code // 1000], code % 1000


def _waits(begin: int, recording: Recording, step: int) -> Iterator[tuple[int, int, int, int, str]]:
    """Yield the longest waits of the step, each with the work that it waits for."""
    waits, work = recording.waits, recording.ownership.work
    in_step = np.flatnonzero(waits.step == step)
    length = waits.end[in_step] - waits.start[in_step]
    in_step = np.sort(in_step[np.argsort(-length, kind="stable")[:_WAITS]])
    by_end = np.argsort(work.end, kind="stable")
    last = np.searchsorted(work.end[by_end], waits.end[in_step] + _ROUNDING, side="right") - 1
    cause = take(by_end, last)
    columns = (
        waits.start[in_step],
        waits.end[in_step],
        take(work.start, cause),
        take(work.end, cause),
    )
    times = ((column - begin).tolist() for column in columns)
    for wait, start, end, since, until in zip(in_step.tolist(), *times, strict=True):
        if until > start:
            yield start, end, max(0, since), until, recording.lines_of_waits[wait]
