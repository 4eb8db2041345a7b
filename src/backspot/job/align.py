"""One clock for all ranks, by the collectives.

All ranks of a process group leave a collective nearly together: on GPUs of one host within about
ten microseconds. So the difference of two ranks' times at the ends of their collectives is the
difference of their clocks. Its median over all collectives is the offset, and the median of the
slopes between them (Theil 1950, Sen 1968) is the drift, if it moves the offset by far more than the
ends scatter. Neither follows a few collectives that end apart. The root of a broadcast leaves
before the others, so rooted collectives do not count.

The lowest rank has the job's clock. Ranks that share no process group with it are aligned by way of
other ranks, and their uncertainties add up as independent errors do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backspot.job.matching import Matched
from backspot.trace.events import Ints

ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Collectives that some ranks leave while others have not entered."""
_NORMAL = 1.4826
"""Standard deviation of normal noise in median absolute deviations."""
_FEWEST = 3
"""Collectives from which a drift is estimated."""
_MOST = 200
"""Collectives from which slopes are taken; all pairs of them count."""
_DEVIATIONS = 4.0
"""Standard deviations of an end by which a drift must move the offset."""


@dataclass(frozen=True, slots=True)
class RankClock:
    """How a rank's clock relates to the job's clock.

    Attributes:
        offset_ns: what to add to the rank's time at ``middle_ns``.
        drift: by how many nanoseconds the offset grows in one nanosecond.
        middle_ns: a time of the rank's clock, in the middle of its collectives.
        uncertainty_ns: standard deviation of a time on the job's clock.
    """

    offset_ns: int
    drift: float
    middle_ns: int
    uncertainty_ns: float

    def to_job(self, times: Ints) -> Ints:
        """Return times of the rank's clock in nanoseconds of the job's clock."""
        grown = np.rint((times - self.middle_ns) * self.drift).astype(np.int64)
        job_times: Ints = times + self.offset_ns + grown
        return job_times


def align(groups: Sequence[Matched], ranks: Sequence[int]) -> dict[int, RankClock]:
    """Find the clock of each rank; one that shares no collective with the others has none."""
    if not ranks:
        return {}
    clocks = {min(ranks): RankClock(0, 0.0, 0, 0.0)}
    useful = sorted(
        (
            (group, np.flatnonzero([call.kind not in ROOTED for call in group.call]))
            for group in groups
        ),
        key=lambda pair: (-len(pair[1]), pair[0].name, pair[0].ranks),
    )
    useful = [(group, collectives) for group, collectives in useful if len(collectives)]
    growing = True
    while growing:
        growing = False
        for group, collectives in useful:
            ranks_known = [rank for rank in group.ranks if rank in clocks]
            missing = [rank for rank in group.ranks if rank not in clocks]
            if ranks_known and missing:
                row = group.ranks.index(ranks_known[0])
                reference = clocks[ranks_known[0]]
                job = reference.to_job(group.end[row, collectives])
                for rank in missing:
                    own = group.end[group.ranks.index(rank), collectives]
                    clocks[rank] = _fit(own, job, reference.uncertainty_ns)
                growing = True
    return clocks


def _fit(own: Ints, job: Ints, before: float) -> RankClock:
    """Fit one clock to another, which has the uncertainty ``before``."""
    middle = int(own.min()) + int(own.max() - own.min()) // 2
    apart = job - own
    usual = int(np.median(apart))
    time, rest = (own - middle).astype(float), (apart - usual).astype(float)
    drift = _slope(time, rest)
    left = rest - drift * time
    offset = float(np.median(left))
    scatter = _NORMAL * float(np.median(np.abs(left - offset)))
    return RankClock(usual + round(offset), drift, middle, math.hypot(before, scatter))


def _slope(time: np.ndarray, rest: np.ndarray) -> float:
    """Return the median slope; 0 if its effect is lost in the scatter."""
    if len(time) < _FEWEST or not np.ptp(time):
        return 0.0
    if len(time) > _MOST:
        chosen = np.linspace(0, len(time) - 1, _MOST).round().astype(int)
        time, rest = time[chosen], rest[chosen]
    first, second = np.triu_indices(len(time), 1)
    run = time[second] - time[first]
    rise = rest[second] - rest[first]
    slope = float(np.median(rise[run != 0] / run[run != 0]))
    left = rest - slope * time
    scatter = _NORMAL * float(np.median(np.abs(left - np.median(left))))
    return slope if abs(slope) * float(np.ptp(time)) > _DEVIATIONS * scatter else 0.0


def aligned(group: Matched, clocks: Mapping[int, RankClock]) -> tuple[Ints, Ints, tuple[int, ...]]:
    """Return start and end of collectives on the job's clock, and the ranks of the rows."""
    rows = [row for row, rank in enumerate(group.ranks) if rank in clocks]
    ranks = tuple(group.ranks[row] for row in rows)
    start, end = (
        np.array(
            [clocks[rank].to_job(times[row]) for row, rank in zip(rows, ranks, strict=True)],
            np.int64,
        ).reshape(len(rows), len(group.call))
        for times in (group.start, group.end)
    )
    return start, end, ranks
