"""A rank whose kernels all take longer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from backspot.formatting import duration, percent
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import rule
from backspot.job.modules import PARTS
from backspot.job.scatter import middle, reach, shift_of
from backspot.results.job import JobFinding

__all__ = ["find"]

_CLOCK, _CLOCK_OF_MANY = 0.05, 0.01
"""Share by which the forward kernels of a slower GPU take longer, of few ranks and of many."""


@rule("slow-gpu")
def find(evidence: Evidence) -> Iterator[JobFinding]:
    """Find ranks whose forward kernels all take longer.

    Kernels of the backward run beside collectives, which slows them down on ranks that wait.
    """
    table, forward = evidence.table, PARTS.index("forward_gpu")
    times = table.times[:, :, forward]
    whole = middle(times.sum(axis=1))
    noise = reach(whole, len(whole))
    for row, rank in enumerate(table.ranks):
        was, now = table.others(rank)[:, forward], times[row]
        usual, taken = (int(middle(some.sum(axis=0))) for some in (was, now))
        if not usual:
            continue
        clock = _CLOCK if noise is None else max(_CLOCK_OF_MANY, float(noise) / usual)
        if taken <= (1 + clock) * usual:  # most ranks end here
            continue
        each = [shift_of(was[:, [step]], now[:, [step]]) for step in range(evidence.steps)]
        if len(each) < 2 or not all(
            shift and math.expm1(shift.common) > max(clock, 2 * shift.scatter)
            for shift in (shift_of(was, now), *each)
        ):
            continue
        yield JobFinding(
            rule="",
            kind="gpu",
            rank=rank,
            path="",
            title=f"All forward kernels take longer on rank {rank}",
            seen=(
                f"Those of all modules together take {duration(taken)} of a step there, and "
                f"{duration(usual)} on the other ranks ({percent(taken / usual - 1)} more)."
            ),
            remedy=(
                "Compare the shapes of its batches first. If they are alike, check the clock, the "
                "temperature and the power limit of this GPU (nvidia-smi)."
            ),
            cost_ns=taken - usual,
        )
