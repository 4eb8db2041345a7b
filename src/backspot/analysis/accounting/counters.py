"""What sampled hardware counters say of each module.

A sample is one number for a stretch of time, in which the device may work for several modules. So
a sample counts for a module if the module's backward fills at least nine tenths of it, and for no
module otherwise. Short kernels need short samples.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import NOTHING, grouped
from backspot.results.costs import CountersOfModule
from backspot.trace import Events
from backspot.trace.events import Ints

__all__ = ["find_counters"]

_AMOUNT = ".sum"
_FILLED = 0.9
_LONGEST = 4
"""Longer stretches between two samples, in medians, are gaps: samples were lost."""


def find_counters(
    events: Events, ownership: Ownership
) -> tuple[CountersOfModule | None, ...] | None:
    """Return the counters of each owner; ``None`` if none were sampled."""
    samples, owners = events.samples, len(ownership.owners)
    if not len(samples.time):
        return None
    mean: list[dict[str, float]] = [{} for _ in range(owners)]
    sampled = np.zeros(owners, np.int64)
    for device, here in grouped(samples.device):
        for counter, of in grouped(samples.counter[here]):
            mine = here[of]
            begin, first = np.unique(samples.time[mine], return_index=True)
            if len(begin) < 2:  # a sample ends where the next one begins
                continue
            owner, spent = _filled_by(ownership, device, begin)
            value = samples.value[mine[first]][:-1]
            name = samples.counters[counter]
            if name.endswith(_AMOUNT):
                value = value / np.diff(begin) * 1e9
            known = np.flatnonzero(owner >= 0)
            weight = np.bincount(owner[known], spent[known], owners)
            total = np.bincount(owner[known], value[known] * spent[known], owners)
            for one in np.flatnonzero(weight).tolist():
                mean[one][name] = float(total[one] / weight[one])
            sampled = np.maximum(sampled, weight.astype(np.int64))
    return tuple(
        CountersOfModule(found, time) if found else None
        for found, time in zip(mean, sampled.tolist(), strict=True)
    )


def _filled_by(ownership: Ownership, device: int, begin: Ints) -> tuple[Ints, Ints]:
    """Return the owner that fills each sample, ``NOTHING`` for none, and its time in the sample.

    Args:
        begin: when each sample begins; the last one only ends the one before.
    """
    work, length, others = ownership.work, np.diff(begin), len(ownership.owners)
    mine = np.flatnonzero(work.device == device)
    owner = np.where(work.run[mine] >= 0, ownership.work_owner[mine], others)
    start, end = (np.clip(time[mine], begin[0], begin[-1]) for time in (work.start, work.end))
    low = np.searchsorted(begin, start, side="right") - 1
    count = np.searchsorted(begin, end, side="left") - low
    piece = np.repeat(np.arange(len(mine)), count)
    sample = low[piece] + np.arange(len(piece)) - (np.cumsum(count) - count)[piece]
    spent = np.minimum(end[piece], begin[sample + 1]) - np.maximum(start[piece], begin[sample])
    pairs, which = np.unique(sample * (others + 1) + owner[piece], return_inverse=True)
    time = np.bincount(which.reshape(-1), spent, len(pairs)).astype(np.int64)
    at, of = np.divmod(pairs, others + 1)
    busy = np.bincount(at, time, len(length))
    fills = (of < others) & (time >= _FILLED * length[at])
    fills &= busy[at] - time <= (1 - _FILLED) * length[at]  # nothing runs beside it
    fills &= length[at] <= _LONGEST * np.median(length)
    found, has = np.full(len(length), NOTHING, np.int64), np.zeros(len(length), np.int64)
    found[at[fills]], has[at[fills]] = of[fills], time[fills]
    return found, has
