"""How long each phase and each row takes in a step that is not recorded.

Recording an event takes the host time, and a device none. Each event of the host is taken to cost
the same, but for labels: as much as makes the typical step as long as the steps that were timed
unrecorded, and not more than recording can cost. What a device works for keeps its length; a phase
or a module gets shorter by its own events, where no device has work. What is left of the
difference, as on a machine that was busier meanwhile, is taken from all of the host's time alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from backspot.analysis.accounting.activity import BACKWARD, IDLE, NAMES, Activity
from backspot.analysis.accounting.ledger import Ledger
from backspot.analysis.attribution.ownership import Special
from backspot.analysis.timeline import take
from backspot.analysis.typical import TypicalStep
from backspot.results.costs import Phase, Row
from backspot.trace import Category, Events
from backspot.trace.events import Ints

Floats: TypeAlias = NDArray[np.float64]
LABEL = 7
"""A label takes this many times as long to record as an operator, as ``replay.host`` has it."""
NODE = 4
"""So does the line of a node, where each has its own, in models of transformers on a CPU."""
_LEFT = 0.1  # of the host's time, whatever recording it costs
_MOST = 1_800.0  # nanoseconds that recording an operator can cost; beyond, all was slowed alike
_HALVINGS = 30


def without_recording(
    phases: Sequence[Phase],
    rows: Sequence[Row],
    step_ns: int,
    counts: tuple[Ints, Mapping[tuple[str, str], int]],
) -> tuple[list[Phase], list[Row]]:
    """Return the phases and the rows with their times in a step that takes so long.

    The phases sum to the step exactly, and so do the rows to the backward.

    Args:
        step_ns: the typical step without a recording.
        counts: the events of the host, as ``recorded_events`` has them.
    """
    backward = next((one.wall_ns for one in phases if one.name == NAMES[BACKWARD]), 0)
    others = [one for one in phases if one.name != NAMES[BACKWARD]]
    whole = backward / max(1, sum(row.wall_ns for row in rows))  # a pass may lie in no step
    of_phases, of_rows = counts
    parts: list[tuple[float, float, int]]
    parts = [(one.wall_ns, one.busy_ns, of_phases[NAMES.index(one.name)]) for one in others]
    for row in rows:
        host = (row.wall_on.sync_ns + row.wall_on.host_ns) * whole
        count = of_rows.get((row.path, row.class_name), 0)
        parts.append((row.wall_ns * whole, row.wall_ns * whole - host, count))
    wall, busy, counted = np.array(parts, np.float64).T
    ends = np.round(np.cumsum(_shortened(wall, busy, counted, step_ns)))
    real = np.diff(ends, prepend=0).astype(np.int64)
    of_phase, of_row = np.split(real, [len(others)])
    times = {one.name: ns for one, ns in zip(others, of_phase.tolist(), strict=True)}
    times[NAMES[BACKWARD]] = int(of_row.sum())
    new = [replace(one, unprofiled_ns=times[one.name]) for one in phases]
    return new, [
        replace(row, unprofiled_ns=round(ns / whole) if whole else row.wall_ns)
        for row, ns in zip(rows, of_row.tolist(), strict=True)
    ]


def _shortened(wall: Floats, busy: Floats, count: Floats, whole: float) -> Floats:
    """Return times without what recording adds, which sum to ``whole``.

    Args:
        wall: the recorded times.
        busy: the part of each that devices take.
        count: how many events of the host each has.
    """
    host = np.maximum(wall - busy, 0)
    fixed = wall - host
    found: Floats = fixed + unrecorded(host, count, whole - float(fixed.sum()))
    return found * (whole / max(1.0, float(found.sum())))


def unrecorded(host: Floats, cost: Floats, whole: float) -> Floats:
    """Return times of the host without what recording adds, which sum to no more than ``whole``.

    Args:
        host: the recorded times.
        cost: what recording adds to each, relative to an operator.
    """
    low, high = 0.0, _MOST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        left = np.maximum(host - middle * cost, _LEFT * host)
        low, high = (middle, high) if left.sum() > whole else (low, middle)
    left = np.maximum(host - low * cost, _LEFT * host)
    shorter: Floats = left * min(1.0, max(0.0, whole) / max(1.0, float(left.sum())))
    return shorter


def recorded_events(
    events: Events, ledger: Ledger, activity: Activity, typical: TypicalStep
) -> tuple[Ints, Mapping[tuple[str, str], int]]:
    """Count the host's events in a typical step, where no device has work: by phase and by owner.

    A label counts as the operators that take as long to record.

    Returns:
        The events of each phase, as ``NAMES`` has them, and in the backward those of each row, by
        the path and the class name.
    """
    ownership, spent, steps = ledger.ownership, ledger.whole, len(typical.weight)
    index = events.of(Category.OPERATOR, Category.RUNTIME, Category.ANNOTATION)
    at = np.searchsorted(spent.start, events.start[index], side="right") - 1
    free = (at >= 0) & (spent.step[at] >= 0) & (ledger.holders.work[spent.holder[at]] < 0)
    index, step = index[free], spent.step[at[free]]
    start = events.start[index]
    within = ledger.passes.at(start) >= 0
    spans, span = ownership.spans, ownership.spans.of(events, index)
    # A recording runs before an event starts and after it ends: that of a span is not in the span.
    own = (take(spans.start, span, -1) == start) & (take(spans.end, span, -1) == events.end[index])
    owner = take(ownership.owner, np.where(own, take(spans.parent, span), span))
    owner = np.where(owner >= 0, owner, np.where(own, Special.ENGINE, Special.OUTSIDE))
    phase = activity.host.at(start)
    phase[phase < 0] = IDLE
    weight = np.where(events.is_label[events.name[index]], LABEL, 1.0)
    weight += NODE * np.bincount(ownership.noted, minlength=len(events.start))[index]

    def counted(key: Ints, chosen: np.ndarray, number: int) -> Ints:
        flat = np.bincount(key[chosen] * steps + step[chosen], weight[chosen], number * steps)
        return typical.count(flat.reshape(number, steps).astype(np.int64))

    of_owners = counted(owner, within, len(ownership.owners)).tolist()
    of_rows: Counter[tuple[str, str]] = Counter()
    for one, count in enumerate(of_owners):
        of_rows[ownership.owners.named(one)] += count
    return counted(phase, ~within, len(NAMES)), of_rows
