"""The step without the profiler's cost, which is fitted to a real step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from backspot.analysis.replay.host import MEASURED, Floats, ProfilerCost
from backspot.analysis.replay.replayable import Refusal, Replayable
from backspot.analysis.replay.simulation import simulate
from backspot.analysis.typical import TypicalStep, every_step
from backspot.formatting import duration

_FACTORS = np.linspace(0.0, 6.0, 13)
_ONE = 2  # the place of 1 among these
_USUAL = 2.5  # on hosts of GPUs, as ``MEASURED`` says; on a CPU, 1
_FINER = np.linspace(-0.5, 0.5, 21)  # around the best of these
_OF_COSTS = 1.5  # the greatest factor that is put down to the costs alone
_FITTED = 0.1  # of fitted costs, that is uncertain
_EQUAL = 0.005  # of the step: a difference that is noise of the measured step
_SAME = 0.001  # of the longest step: by what a replay without any change may miss the recording
_LONGER = 0.05  # of the longest step: what one step can grow by where the one before ends earlier
_APART = 0.1  # of the step: the recorded steps are of another kind than the measured one


def fit(
    recording: Replayable,
    real_step_ns: float,
    typical: TypicalStep | None = None,
    data_ns: float = 0.0,
) -> ProfilerCost | Refusal:
    """Scale the costs by one factor so that the typical replayed step takes as long as the real.

    A factor above 1.5 is not the profiler's alone: then the whole host was slower while it was
    recorded, as on a busy machine, and the rest of the factor goes into ``slowdown``. Where many
    factors fit, because the step waits for the device, the usual or the one closest to it is taken.

    Args:
        real_step_ns: the typical step without profiler and labels, in nanoseconds.
        typical: the steps that count; ``None`` for all.
        data_ns: which part of the real step fetches batches that workers load. Where these are
            late, the step takes as long as they do at any cost, and the rest of it says the cost.

    Returns:
        The scaled costs, a tenth of which is uncertain. If no factor from 0 to 6 brings the
        replayed step within 10% of the real one and the real one is longer, the machine was busier
        then, which says nothing against the recording: ``MEASURED``, and without a device a host
        that is as much slower, as rows are made as long as real steps too. Else a refusal, as if
        the times contradict one another.
    """
    factor = 1.0
    typical = typical or every_step(len(recording.steps.start))
    usual = _USUAL if len(recording.ownership.work.start) else 1.0
    at_hand = data_ns > 0 and any(wait.follows >= 0 for wait in recording.waits)
    if at_hand:
        real_step_ns = max(1.0, real_step_ns - data_ns)
    for factors in (_FACTORS, _FINER):
        tried = np.unique(np.maximum(factors + (factor if factors is _FINER else 0.0), 0.0))
        costs = [_scaled(MEASURED, factor) for factor in tried.tolist()]
        step_times = steps_at(recording, costs)
        if factors is _FACTORS and (refusal := contradiction(recording, step_times[:, [0, _ONE]])):
            return refusal
        if at_hand:
            step_times = steps_at(recording, costs, at_hand=True)
        steps = step_times[typical.chosen].mean(axis=0)
        off = np.abs(steps - real_step_ns)
        fits = np.flatnonzero(off <= off.min() + _EQUAL * real_step_ns)
        best = int(fits[np.argmin(np.abs(tried[fits] - usual))])
        factor = float(tried[best])
    if off.min() > _APART * real_step_ns:
        if (nearest := float(steps[best])) < real_step_ns:
            if len(recording.ownership.work.start):
                return MEASURED
            usual_steps = steps_at(recording, [MEASURED], at_hand=at_hand)[typical.chosen, 0]
            return replace(MEASURED, slowdown=float(usual_steps.mean()) / real_step_ns)
        return Refusal(
            f"A real step takes {duration(real_step_ns)}, and the replayed one "
            f"{duration(nearest)} at the nearest. Not the profiler alone slowed the recording, but "
            "other programs or ranks too."
        )
    return costs[best]


def contradiction(recording: Replayable, steps: Floats) -> Refusal | None:
    """Refuse if the recorded steps do not come out, or one is longer without the costs.

    So it is where events are damaged, so that one comes before another that it waits for.

    Args:
        steps: the steps (rows) with no cost taken out, and with the measured ones.
    """
    recorded = (recording.steps.end - recording.steps.start)[:, None]
    longer = (steps - recorded) / max(1, int(recorded.max()))
    if np.abs(longer[:, 0]).max() <= _SAME and longer[:, 1].max() <= _LONGER:
        return None
    return Refusal("The times of the trace contradict one another.")


def _scaled(cost: ProfilerCost, factor: float) -> ProfilerCost:
    return replace(
        cost.scaled(min(factor, _OF_COSTS)),
        slowdown=cost.slowdown * max(1.0, factor / _OF_COSTS),
        uncertainty=_FITTED,
    )


def steps_at(
    recording: Replayable,
    costs: Sequence[ProfilerCost],
    *,
    at_hand: bool = False,
    host: Sequence[float] = (1.0,),
    device: Sequence[float] = (1.0,),
) -> Floats:
    """Return how long each step (rows) takes at each of these costs (columns), in nanoseconds.

    Args:
        at_hand: whether the batches that workers load are at hand, and need not be fetched.
        host: what the host's time is multiplied by, at each cost or at all of them.
        device: what the devices' time is multiplied by, as ``host``.
    """
    lengths, skipped = recording.host(*costs) * np.array(host), {}
    if at_hand:
        batches, edges = recording.batches, recording.line.edges
        for start, end in np.searchsorted(edges, [batches.start, batches.end]).T.tolist():
            lengths[start:end] = 0.0
        skipped = {event: np.ones(len(costs), bool) for event in batches.event.tolist()}
    times, work = host_times(recording, lengths), recording.work(*costs) * np.array(device)
    return simulate(recording, times, work, skipped).step_lengths(recording, work)


def apart(recording: Replayable, cost: ProfilerCost, typical: TypicalStep) -> tuple[float, float]:
    """Return what a step takes if no device has any work, and if the host takes no time.

    Each is what host or devices need by themselves. Batches that workers load late are at hand.
    """
    late = any(wait.follows >= 0 for wait in recording.waits)
    steps = steps_at(recording, [cost] * 2, at_hand=late, host=(1, 0), device=(0, 1))
    host, device = steps[typical.chosen].mean(axis=0).tolist()
    return host, device


def host_times(recording: Replayable, lengths: Floats) -> Floats:
    """Return how long the host takes to each station (rows) in each variant (columns).

    Args:
        lengths: how long each interval of the host (rows) takes.
    """
    bounds = np.searchsorted(recording.station, np.arange(len(recording.stations) + 1))
    summed: Floats = np.empty((len(bounds) - 1, lengths.shape[1]), order="F")
    total = np.zeros(len(lengths) + 1)  # one for all: new memory takes longer than sums
    for variant, column in enumerate(lengths.T):
        np.cumsum(column, out=total[1:])
        summed[:, variant] = np.diff(total[bounds])
    return summed
