"""Where the clock time of whole steps goes: data, forward, backward, optimizer and the rest.

The rule is the same as for modules: what runs or is queued on a device decides; otherwise what the
host does. So a phase is what the step was waiting for, and not always where the host was.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from backspot.analysis.accounting.activity import (
    BACKWARD,
    COPY,
    DATA,
    HOST,
    IDLE,
    NAMES,
    OTHER,
    USES,
    Activity,
    to_device,
)
from backspot.analysis.accounting.amounts import summed, summed_by_step
from backspot.analysis.accounting.ledger import Ledger, Spent
from backspot.analysis.accounting.steps import host_steps
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import Timeline, is_in, merged, numbered, take
from backspot.analysis.typical import RareSteps, TypicalStep, typical_step
from backspot.results.costs import Phase
from backspot.trace import Category, Events, names as trace_names
from backspot.trace.events import Ints

_AS_LONG_AS_IT_TAKES = (DATA, *USES)
"""Phases that hold up no step: a wait for a batch, and what runs a model as often as it needs."""


class PhaseTimes(msgspec.Struct, frozen=True):
    """The clock time of the phases, with one row a phase as in ``NAMES`` and one column a step.

    Attributes:
        wall: nanoseconds. In each step, the phases sum to it exactly.
        busy: the part in which any device was running something.
        activity: what the host does at each moment.
    """

    wall: Ints
    busy: Ints
    activity: Activity

    def summing_to(self, step_ns: int, unseen_ns: Ints, typical: TypicalStep) -> PhaseTimes:
        """Return the same of a real step, to the nanosecond.

        Args:
            step_ns: the real step.
            unseen_ns: what each step has of phases that were not recorded.
            typical: the steps that count.
        """
        wall, busy = self.wall + unseen_ns[:, None], self.busy.copy()
        # What the rounding of moments leaves belongs to the phase with most time of the host, or
        # to the longest one where devices work all the time.
        step = int(typical.weight.argmax())
        lacking = typical.lacking(wall.sum(axis=0), step_ns, step)
        idle, whole_ns = (wall - busy)[:, step], wall[:, step].copy()
        idle[BACKWARD] = whole_ns[BACKWARD] = -1  # its time is that of the rows
        has_room = idle.max() > 0 and idle.max() >= -lacking
        phase = int((idle if has_room else whole_ns).argmax())
        wall[phase, step] += lacking
        busy[phase, step] = min(busy[phase, step], wall[phase, step])
        return PhaseTimes(wall, busy, self.activity)

    def typical(self, typical: TypicalStep, recorded: PhaseTimes) -> tuple[Phase, ...]:
        """Return the phases that take any time in a typical step, in the order of a step.

        Args:
            typical: the steps that count.
            recorded: the phases as they were recorded.
        """
        before = recorded.apportioned(typical).sum(axis=1).tolist()
        busy, idle = self.apportioned(typical).T.tolist()
        return tuple(
            Phase(
                name=name,
                wall_ns=busy[number] + idle[number],
                recorded_wall_ns=before[number],
                busy_ns=busy[number],
                wall_ns_by_step=tuple(by_step.tolist()),
            )
            for number, (name, by_step) in enumerate(zip(NAMES, self.wall, strict=True))
            if by_step.any() or before[number]
        )

    def apportioned(self, typical: TypicalStep) -> Ints:
        """Return what a typical step has of each phase (rows), while a device runs and while none.

        The sum is that of the typical step exactly.
        """
        table = np.stack([self.busy, self.wall - self.busy], axis=1)
        # The backward comes first, to be rounded as that of the rows is.
        phase, _, step = (index.ravel() for index in np.indices(table.shape))
        amount = typical.apportioned(table.ravel(), step, phase != BACKWARD, phase)
        typical_ns: Ints = amount.reshape(table.shape).sum(axis=2)
        return typical_ns


def phase_times(events: Events, ledger: Ledger, activity: Activity) -> PhaseTimes:
    """Deal out the clock time of the steps to the phases, which sum to each step exactly.

    The backward is the wall time of the rows: if the steps contain all of the passes, the phase is
    as long as the report's ``wall_ns``. As for the rows, the device that a pass waits for decides
    until the pass ends, also before it begins.
    """
    passes, phase_of = ledger.ownership.windows, PhaseOfSpent.of(events, ledger, activity)
    phases, steps = len(NAMES), len(ledger.windows.start)
    sums = np.zeros((2 * phases, steps), np.int64)  # while no device runs, then while one does
    for device, spent in ledger.by_device.items():
        turn = np.searchsorted(passes.end, spent.start, side="right")
        decides = passes.device[np.minimum(turn, len(passes.end) - 1)] == device
        spent = spent.where(decides & (spent.step >= 0)).cut(activity.host.edges)
        key = phase_of(spent) + phases * spent.runs
        sums += summed_by_step(key, spent.step, spent.length, 2 * phases, steps)
    return PhaseTimes(sums[:phases] + sums[phases:], sums[phases:], activity)


class PhaseOfSpent(msgspec.Struct, frozen=True):
    """Which phase each interval of the clock belongs to.

    Attributes:
        ledger: the clock time of the trace.
        host: the phase of the host at each moment.
        work: the phase of each piece of device work.
    """

    ledger: Ledger
    host: Timeline
    work: Ints

    @classmethod
    def of(cls, events: Events, ledger: Ledger, activity: Activity) -> PhaseOfSpent:
        """Look at a recording."""
        return cls(ledger, activity.host, phases_of_work(events, ledger.ownership, activity))

    def __call__(self, spent: Spent) -> Ints:
        """Return the phases of intervals that are cut where the phase of the host changes."""
        work = self.ledger.holders.work[spent.holder]
        # Where a span holds, the activity of the host decides.
        phase = np.where(work >= 0, take(self.work, work), self.host.over(spent.start))
        phase[phase < 0] = IDLE
        # The rows of a pass hold the host's time, and work without a launch record.
        within = self.ledger.passes.over(spent.start) >= 0
        phase[within & (take(self.ledger.ownership.work.launch, work) < 0)] = BACKWARD
        return phase


def phases_of_work(events: Events, ownership: Ownership, activity: Activity) -> Ints:
    """Return the phase of each piece of device work."""
    work = ownership.work
    phase = activity.of_launches(work.thread, work.launch)
    # Work that is launched while a batch is fetched is other work, and no waiting for data.
    phase[(phase < 0) | is_in(phase, (DATA, HOST)) | (work.launch < 0)] = OTHER
    phase[to_device(events, work.name)] = COPY
    of_node = take(ownership.passes.of_span, work.span) >= 0
    of_engine = (work.span < 0) & (work.run >= 0) & (work.launch >= 0)
    phase[of_node | of_engine] = BACKWARD
    return phase


def device_times(ledger: Ledger) -> Ints:
    """Return how long the work on devices runs in each step, added up."""
    work = ledger.ownership.work
    step = ledger.steps.at(work.start)
    counted = (work.device >= 0) & (step >= 0)
    return summed(step[counted], (work.end - work.start)[counted], len(ledger.windows.start))


def choose_steps(
    events: Events,
    ledger: Ledger,
    wall: Ints,
    phases: PhaseTimes | None,
    rare: Sequence[RareSteps] = (),
) -> TypicalStep:
    """Choose the steps that count, by their whole time and by that of each owner and phase.

    Args:
        wall: the clock time of the backward, with one row an owner and one column a step.
        phases: the clock time of the phases, if the steps have any.
        rare: the steps of which it is known how often the training has such steps.
    """
    ownership, windows = ledger.ownership, ledger.windows
    owners = np.flatnonzero(wall.any(axis=1))
    places, names = [wall[owners]], [ownership.owners.path(owner) for owner in owners.tolist()]
    if phases is not None:
        outside = np.flatnonzero(phases.wall.any(axis=1) & (np.arange(len(NAMES)) != BACKWARD))
        places.append(phases.wall[outside])
        names += [f"({NAMES[phase]})" for phase in outside.tolist()]
    places.append(_collections(events, ledger)[None])
    names.append("(garbage collector)")
    length = windows.end - windows.start
    if phases is not None:
        rare = [kind.waiting(length, phases.wall[DATA]) for kind in rare]
    return typical_step(
        length,
        _work(events, ownership, phases),
        np.concatenate(places),
        names,
        never=[f"({NAMES[phase]})" for phase in _AS_LONG_AS_IT_TAKES],
        rare=rare,
    )


def _collections(events: Events, ledger: Ledger) -> Ints:
    """Return how long the garbage collector runs in each step, whatever phase it interrupts."""
    marks = events.prefixed(Category.ANNOTATION, trace_names.COLLECTION)
    step = ledger.steps.at(events.start[marks])
    inside = step >= 0
    return summed(step[inside], events.duration[marks][inside], len(ledger.windows.start))


def _work(events: Events, ownership: Ownership, phases: PhaseTimes | None) -> Ints:
    """Number the steps by what they do: by how often they run each operator.

    Operators of other threads than the training's, such as a loader's, do not count. Of what models
    run without gradients it counts whether there is any, as a rollout is as long as it gets, and
    the work of loading a batch does not count.
    """
    spans, steps = ownership.spans, ownership.steps.count
    host = host_steps(events, ownership)
    ends = ownership.passes.end if host is None else host[1]
    operators = events.of(Category.OPERATOR)
    makers = operators[events.sequence[operators] >= 0]
    threads = merged(spans.thread, events.thread[makers])
    operators = operators[is_in(events.thread[operators], threads)]
    step = np.searchsorted(ends, events.start[operators], side="right")
    operators, step = operators[step < steps], step[step < steps]
    uses = np.zeros((0, steps), np.int64)
    if phases is not None:
        phase = phases.activity.host.at(events.start[operators])
        counted = ~is_in(phase, _AS_LONG_AS_IT_TAKES)
        operators, step = operators[counted], step[counted]
        uses = (phases.wall[list(USES)] > 0).astype(np.int64)
    distinct_names, name = numbered(events.name[operators].astype(np.int64))
    counts = summed_by_step(name, step, np.ones(len(name), np.int64), len(distinct_names), steps)
    work = np.unique(np.concatenate([counts, uses]), axis=1, return_inverse=True)[1]
    return np.asarray(work, np.int64).reshape(steps)
