"""How long each moment of a recording takes in a step that is not recorded.

Recording an event takes the host time, and a device none. Each event of the host is taken to cost
the same, but for labels: as much as makes the typical step as long as a real one, and not more than
recording can cost. What a device works for keeps its length; a phase or a module gets shorter by
its own events, where no device has work. What is left of the difference, as on a machine that was
busier meanwhile, is taken from all of the host's time alike.

What comes out is the pace of the clock. A ledger with it has all times of a real step, so that what
sums it up needs to know nothing of recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from backspot.analysis.accounting.activity import BACKWARD, IDLE, NAMES, Activity
from backspot.analysis.accounting.clock import WallKind
from backspot.analysis.accounting.ledger import Ledger, Spent
from backspot.analysis.accounting.phases import PhaseOfSpent, PhaseTimes
from backspot.analysis.attribution.ownership import Special
from backspot.analysis.timeline import take
from backspot.analysis.typical import TypicalStep
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


class RealStep(msgspec.Struct, frozen=True):
    """How long steps take while nothing is recorded, in nanoseconds.

    Attributes:
        step_ns: the mean.
        by_step: the steps that were timed one by one; none where only the mean is known.
        parts: how long some phases take of it together, by their names in ``NAMES``. The others
            take the rest, as the recording says.
        behind: share (0 to 1) of the batches of a loader that were late within an epoch.
    """

    step_ns: int
    by_step: tuple[int, ...] = ()
    parts: Mapping[tuple[str, ...], int] = {}
    behind: float = 0.0

    @classmethod
    def of(cls, by_step: Sequence[int]) -> RealStep | None:
        """Return the mean of steps, as a clock beside the training has it; ``None`` of no steps."""
        return cls(sum(by_step) // len(by_step), tuple(by_step)) if by_step else None


class Pace(msgspec.Struct, frozen=True):
    """How long each moment of a recording takes in a real step, as a part of its recorded time.

    Attributes:
        phase_of: the phase of each interval.
        of_phases: the parts of the phases, but for the backward: of the host's time (first row) and
            of that of devices.
        of_holders: those of what holds the clock in the backward.
        unseen_ns: what a real step has of phases that the recording has none of.
    """

    phase_of: PhaseOfSpent
    of_phases: Floats
    of_holders: Floats
    unseen_ns: Ints

    def __call__(self, spent: Spent) -> Spent:
        """Return the intervals as long as they are in a real step."""
        spent = spent.cut(self.phase_of.host.edges)
        phase = self.phase_of(spent)
        in_pass = phase == BACKWARD
        idle = (spent.kind == WallKind.SYNC) | (spent.kind == WallKind.HOST)
        on_device = np.where(in_pass, ~idle, spent.runs).astype(np.int64)
        holder = self.phase_of.ledger.holders.of_rows(spent.holder)
        fraction = np.where(
            in_pass, self.of_holders[on_device, holder], self.of_phases[on_device, phase]
        )
        # The ends are rounded, so that no sum is off by more than a nanosecond.
        ends = np.rint(np.cumsum(spent.length * fraction)).astype(np.int64)
        return spent._replace(length=np.diff(ends, prepend=0))


class Recorded(NamedTuple):
    """The backward of a typical recorded step by owner, in nanoseconds.

    Attributes:
        wall: its clock time.
        host: the part in which devices wait for the host.
    """

    wall: Ints
    host: Ints


def pace_of(
    events: Events,
    ledger: Ledger,
    activity: Activity,
    phases: PhaseTimes,
    typical: TypicalStep,
    rows: Recorded,
    real: RealStep,
) -> Pace:
    """Return the pace with which a typical recorded step takes as long as a real one.

    Args:
        ledger: the clock time as it was recorded.
        phases: that of the phases.
        typical: the steps that count.
        rows: that of the backward.
        real: the real step.
    """
    of_phases, of_owners = recorded_events(events, ledger, activity, typical)
    wall, busy = (typical.mean(table).astype(np.float64) for table in (phases.wall, phases.busy))
    scale = wall[BACKWARD] / max(1, int(rows.wall.sum()))  # a pass may lie in no step
    count = len(NAMES)
    # The phases, of which the backward is told by its owners, and then these.
    times = np.concatenate([wall, rows.wall * scale])
    host = np.concatenate([wall - busy, rows.host * scale])
    events_of = np.concatenate([of_phases, of_owners])
    times[BACKWARD] = host[BACKWARD] = 0.0
    phase = np.concatenate([np.arange(count), np.full(len(of_owners), BACKWARD)])
    known_ns = _known_parts(real)
    unseen = np.zeros(count, np.int64)
    fractions = np.ones((2, len(times)))
    others = np.ones(len(phase), bool)
    for numbers, ns in known_ns.items():
        in_phases = np.isin(phase, numbers)
        others &= ~in_phases
        if times[in_phases].any():
            fractions[:, in_phases] = _parts(
                times[in_phases], host[in_phases], events_of[in_phases], ns
            )
        else:
            unseen[numbers[0]] = ns
    left = real.step_ns - sum(known_ns.values())
    if times[others].any():
        fractions[:, others] = _parts(times[others], host[others], events_of[others], left)
    else:
        unseen[IDLE] += left
    return Pace(
        PhaseOfSpent.of(events, ledger, activity),
        fractions[:, :count],
        np.stack([ledger.holders.shares.mean(fraction) for fraction in fractions[:, count:]]),
        unseen,
    )


def _known_parts(real: RealStep) -> dict[tuple[int, ...], int]:
    """Return the times of the phases that are known, by their numbers; at most the step."""
    known_ns = sum(real.parts.values())
    most = min(1.0, real.step_ns / known_ns) if known_ns else 1.0
    return {tuple(map(NAMES.index, names)): int(ns * most) for names, ns in real.parts.items()}


def _parts(wall: Floats, host: Floats, count: Floats, whole_ns: float) -> Floats:
    """Return which parts of recorded times are left where they sum to ``whole_ns``.

    Args:
        wall: the recorded times.
        host: the part of each in which no device works.
        count: how many events of the host each has.

    Returns:
        The parts of the host's time, and of that of devices.
    """
    fixed = float((wall - host).sum())
    shorter = unrecorded(host, count, whole_ns - fixed)
    alike = whole_ns / max(1.0, fixed + float(shorter.sum()))
    of_host = np.divide(shorter, host, out=np.ones_like(host), where=host > 0)
    return np.stack([of_host * alike, np.full_like(host, alike)])


def unrecorded(host: Floats, cost: Floats, whole_ns: float) -> Floats:
    """Return times of the host without what recording adds, which sum to no more than ``whole_ns``.

    Args:
        host: the recorded times.
        cost: what recording adds to each, relative to an operator.
    """
    low, high = 0.0, _MOST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        left = np.maximum(host - middle * cost, _LEFT * host)
        low, high = (middle, high) if left.sum() > whole_ns else (low, middle)
    left = np.maximum(host - low * cost, _LEFT * host)
    shorter: Floats = left * min(1.0, max(0.0, whole_ns) / max(1.0, float(left.sum())))
    return shorter


def recorded_events(
    events: Events, ledger: Ledger, activity: Activity, typical: TypicalStep
) -> tuple[Ints, Ints]:
    """Count the host's events in a typical step, where no device has work: by phase and by owner.

    A label counts as the operators that take as long to record.

    Returns:
        The events of each phase, as ``NAMES`` has them, and in the backward those of each owner.
    """
    ownership, spent, steps = ledger.ownership, ledger.whole, len(typical.weight)
    index = events.of(Category.OPERATOR, Category.RUNTIME, Category.ANNOTATION)
    piece = np.searchsorted(spent.start, events.start[index], side="right") - 1
    free = (piece >= 0) & (spent.step[piece] >= 0) & (ledger.holders.work[spent.holder[piece]] < 0)
    index, step = index[free], spent.step[piece[free]]
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

    return counted(phase, ~within, len(NAMES)), counted(owner, within, len(ownership.owners))
