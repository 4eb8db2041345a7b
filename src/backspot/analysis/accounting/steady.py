"""Which steps of a recording nothing held up: those that a typical step is the mean of."""

from __future__ import annotations

import numpy as np

from backspot.analysis.accounting.activity import BACKWARD, NAMES
from backspot.analysis.accounting.phases import PhaseTimes
from backspot.analysis.accounting.pieces import summed_by_step
from backspot.analysis.accounting.steps import StepWindows, host_steps
from backspot.analysis.attribution.launches import Windows
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import numbered
from backspot.analysis.typical import TypicalStep, typical_step
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = ["choose_steps"]


def choose_steps(
    events: Events,
    ownership: Ownership,
    windows: StepWindows | Windows,
    wall: Ints,
    phases: PhaseTimes | None,
) -> TypicalStep:
    """Choose the steps that count, by their whole time and by that of each owner and phase.

    Args:
        events: the trace.
        ownership: its owners.
        windows: the clock time of its steps, or of its passes where the trace has nothing else.
        wall: the clock time of the backward, with one row an owner and one column a step.
        phases: the clock time of the phases, if the steps have any.
    """
    owners = np.flatnonzero(wall.any(axis=1))
    places, names = [wall[owners]], [ownership.owners.path(one) for one in owners.tolist()]
    if phases is not None:
        outside = np.flatnonzero(phases.wall.any(axis=1) & (np.arange(len(NAMES)) != BACKWARD))
        places.append(phases.wall[outside])
        names += [f"({NAMES[one]})" for one in outside.tolist()]
    length = windows.end - windows.start
    return typical_step(length, _work(events, ownership), np.concatenate(places), names)


def _work(events: Events, ownership: Ownership) -> Ints:
    """Number the steps by what they do: by how often they run each operator.

    Operators of other threads than the training's, such as a loader's, do not count.
    """
    spans, steps = ownership.spans, ownership.steps.count
    host = host_steps(events, ownership)
    ends = ownership.passes.end if host is None else host[1]
    operators = events.of(Category.OPERATOR)
    made = operators[events.sequence[operators] >= 0]
    threads = np.union1d(spans.thread, events.thread[made])
    operators = operators[np.isin(events.thread[operators], threads)]
    step = np.searchsorted(ends, events.start[operators], side="right")
    kept = step < steps
    known, name = numbered(events.name[operators[kept]].astype(np.int64))
    ones = np.ones(len(name), np.int64)
    counts = summed_by_step(name, step[kept], ones, len(known), steps)
    work: Ints = np.unique(counts, axis=1, return_inverse=True)[1].reshape(steps)
    return work
