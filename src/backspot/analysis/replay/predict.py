"""Savings and steps as a report has them: typical values in whole nanoseconds, with their range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.replay.cost import MEASURED, ProfilerCost
from backspot.analysis.replay.host import Floats
from backspot.analysis.replay.recording import Recording, Refusal, Windows, prepare
from backspot.analysis.replay.replay import fit
from backspot.analysis.replay.saving import Change, Replays, change_of_paths, replays
from backspot.analysis.typical import typical_value
from backspot.results.savings import ReplayedStep, Saving, WhatIf
from backspot.trace import Events

__all__ = ["Prediction", "predict"]

_BUSY = 0.9  # of the step: from here on a device decides how long the step takes
_ERRORS = {True: 0.02, False: 0.04}
"""How far a prediction may be off, as a share of the step: where a device decides, and where not.

``benchmarks/accuracy/what_if.py`` made 48 real changes; 40 saved what the range says.
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A recording without the profiler's cost, ready to be asked what a change would save.

    Attributes:
        recording: the recording.
        cost: what the profiler cost.
        fitted: whether the cost was fitted to measured steps.
    """

    recording: Recording
    cost: ProfilerCost
    fitted: bool

    @property
    def is_device_bound(self) -> bool:
        """Whether devices run something for nearly all of the recorded steps."""
        work, steps = self.recording.ownership.work, self.recording.steps
        busy = int((work.end - work.start)[steps.of_work >= 0].sum())
        return busy >= _BUSY * int((steps.end - steps.start).sum())

    def savings(self, changes: Sequence[Change]) -> tuple[ReplayedStep, list[Saving]]:
        """Return the step without any change, and what it saves with each change alone."""
        found = replays(self.recording, self.cost, changes)
        step = self._step(found)
        error = _ERRORS[self.is_device_bound] * step.ns
        return step, [_saving(found, at, error) for at in range(len(changes))]

    def what_if(self, factors: Mapping[str, float]) -> WhatIf:
        """Return the step if the backward of these modules takes so much of its time.

        Args:
            factors: as ``change_of_paths`` takes them.
        """
        step, (saving,) = self.savings([change_of_paths(self.recording.ownership, factors)])
        return WhatIf(step.ns - saving.ns, saving.ns, saving.low_ns, saving.high_ns)

    def _step(self, found: Sequence[Replays]) -> ReplayedStep:
        times = [typical_value(np.round(one.steps).astype(np.int64)) for one in found]
        return ReplayedStep(times[0], min(times), max(times), self.fitted)


def predict(
    events: Events, ownership: Ownership, windows: Windows, real_step_ns: int | None
) -> Prediction | Refusal:
    """Compile a recording for predictions.

    Args:
        events: the trace.
        ownership: its owners.
        windows: the clock time of each step.
        real_step_ns: the typical step without profiler and labels, ``None`` where it is not known.
            Then the cost of the profiler is the one that was measured on another machine.

    Returns:
        The prediction, or why the recording cannot be replayed.
    """
    recording = prepare(events, ownership, windows)
    if isinstance(recording, Refusal):
        return recording
    if real_step_ns is None:
        return Prediction(recording, MEASURED, fitted=False)
    cost = fit(recording, real_step_ns)
    return cost if isinstance(cost, Refusal) else Prediction(recording, cost, fitted=True)


def _saving(found: Sequence[Replays], at: int, error: float) -> Saving:
    """Return one saving with the error of predictions on both sides.

    A change saves at least nothing, and at most the time of all work that it makes shorter.
    """
    by_level = [_typical(one.saved[:, at]) for one in found]
    spread = [np.quantile(one.saved[:, at], [0.25, 0.75]) for one in found]
    most = max(float(one.shorter[at]) for one in found)
    low = max(0.0, float(np.min(spread)) - error)
    high = min(most, max(float(np.max(spread)), *by_level) + error)
    ns = by_level[0]
    return Saving(ns, min(ns, round(low)), max(ns, round(high)))


def _typical(by_step: Floats) -> int:
    return typical_value(np.maximum(np.round(by_step), 0).astype(np.int64))
