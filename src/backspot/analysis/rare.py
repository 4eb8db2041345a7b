"""Rare work of the recorded steps: phases that only some of them have, or have much more of."""

from __future__ import annotations

from collections import Counter

import numpy as np

from backspot.analysis.accounting.activity import NAMES
from backspot.analysis.recording import Options, Recording
from backspot.analysis.training import BOTH, EVALUATION, OUTSIDE, SAVING
from backspot.analysis.typical import TypicalStep
from backspot.results.costs import WITHOUT_GRADIENTS, Phase, PhaseName
from backspot.results.rare import RareWork
from backspot.results.report import Report, changed
from backspot.results.training import Training
from backspot.trace.events import Ints, Mask

_OTHERS = 3
"""One in so many steps without a phase shows what the others have; at most every second step has
rare work."""
_LITTLE = 0.1
"""Share of the time of a phase in the steps that have it, up to which others do not have it."""
_PHASES: dict[str, tuple[PhaseName, ...]] = {
    EVALUATION: ("evaluation",),
    SAVING: ("saving",),
    BOTH: ("evaluation", "saving"),
}
"""Which phases the names of a training's rare work stand for."""
_TWICE = 2
"""A wait for a batch is rare if it takes so many times as long as in the other steps."""
_LEAST = 0.01
"""Share of a mean step from which rare work counts."""
_KNOWN: tuple[PhaseName, ...] = ("saving", *WITHOUT_GRADIENTS)
_OF_ITS_OWN = frozenset(("data", *_KNOWN))
"""Phases that are known by more than the operators that run in them."""


def with_rare_work(report: Report, recording: Recording, _: Options) -> Report:
    """Add what recurs in some of the recorded steps only."""
    typical, steps = recording.typical, report.steps
    if steps < 2 or not report.phases:
        return report
    work = np.zeros(steps, np.int64) if typical.work is None else typical.work
    rare_phases = [rare_work(phase, report, typical, work) for phase in report.phases]
    rare = [work for work in rare_phases if work is not None]
    return changed(report, rare=tuple(sorted(rare, key=lambda work: -work.per_step_ns)))


def rare_parts(recording: Recording, training: Training) -> dict[tuple[str, ...], int]:
    """Return how long phases take in a mean step that only some steps have, by their names.

    Recorded steps are few, and recording makes small operators longest, as a rollout has. The log
    of the training knows by how much all the steps are longer that have such work.
    """
    phases, typical = recording.recorded_phases, recording.typical
    if phases is None:
        return {}
    step_ns = typical.value(phases.wall.sum(axis=0))
    rows = dict(zip(NAMES, phases.wall, strict=True))
    left = [name for name in _KNOWN if _has(name, rows[name], typical.chosen, step_ns) is not None]
    known_ns: Counter[tuple[str, ...]] = Counter()
    for work in training.rare:
        names = _PHASES.get(work.name, ())
        if names and all(name in left or not rows[name][typical.chosen].any() for name in names):
            known_ns[names] += work.per_step_ns
    if _PHASES[BOTH] in known_ns:  # of what is in both, the shares are not known
        known_ns = Counter({_PHASES[BOTH]: sum(known_ns.values())})
    together = tuple(name for name in left if not any(name in names for names in known_ns))
    outside = sum(work.per_step_ns for work in training.rare if work.name == OUTSIDE)
    if together and outside:
        known_ns[together] = outside
    return dict(known_ns)


def rare_work(phase: Phase, report: Report, typical: TypicalStep, work: Ints) -> RareWork | None:
    """Return what a phase has of rare work, ``None`` for none.

    Args:
        work: a number for each step; steps with the same number do the same work.
    """
    times = np.array(phase.wall_ns_by_step, np.int64)
    has_phase = _has(phase.name, times, typical.chosen, report.step_ns)
    if has_phase is None or (
        phase.name not in _OF_ITS_OWN and _is_in_both(has_phase, typical.chosen, work)
    ):
        return None
    usual = int(times[typical.chosen & ~has_phase].mean())
    more = np.where(has_phase, np.maximum(times - usual, 0), 0)
    per_step = typical.value(more)
    share = per_step / max(1, report.step_ns)
    if share < _LEAST:
        return None
    share_of_steps = int(typical.weight[has_phase].sum()) / int(typical.weight.sum())
    return RareWork(
        phase.name,
        1 / share_of_steps,
        int(per_step / share_of_steps),
        per_step,
        min(1.0, share),
        tuple(np.flatnonzero(has_phase).tolist()),
    )


def _has(name: str, times: Ints, counted: Mask, step_ns: int) -> Mask | None:
    """Return which steps have a phase that the others do not have; ``None`` for none of them."""
    ordered = np.sort(times[counted])
    usual = int(ordered[(len(ordered) - 1) // _OTHERS])
    limit = max(_TWICE * usual, usual + int(_LEAST * step_ns))
    has_phase: Mask = counted & (times > limit)
    count = int(np.count_nonzero(has_phase))
    if not count or count > (len(ordered) + 1) // 2:
        return None
    if name != "data" and usual > _LITTLE * times[has_phase].mean():
        return None
    return has_phase


def _is_in_both(has_phase: Mask, counted: Mask, work: Ints) -> bool:
    """Whether steps with the same work are among those that have a phase, and among the others."""
    return bool(set(work[has_phase].tolist()) & set(work[counted & ~has_phase].tolist()))
