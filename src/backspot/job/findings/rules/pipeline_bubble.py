"""Stages of a pipeline that wait for each other."""

from __future__ import annotations

import numpy as np

from backspot.formatting import duration, percent
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import rule
from backspot.results.job import JobFinding

__all__ = ["find"]

_NORMAL = 0.1
"""Share of the step that a pipeline with enough microbatches may lose."""
_LONGER = 0.1
"""Share of its own time by which the longest stage takes longer than the typical one."""
_STARVED = 0.7
"""Share of the time in which a stage does not wait, below which its kernels leave the GPU idle."""
_EQUAL = "All stages have about the same work."


@rule("pipeline-bubble")
def find(evidence: Evidence) -> list[JobFinding]:
    """Find steps in which the stages of a pipeline wait for each other.

    The stage that stalls least takes longest. If it takes much longer than the others, these wait
    for it, and more microbatches do not help. On GPUs it must also have more work than the others:
    kernels. Otherwise its host is slow, as it is when microbatches are very small.
    """
    stalled = evidence.stalled
    if not (stalled.any(axis=1)).sum() > 1:
        return []
    ranks = list(evidence.ranks)
    of_rank = evidence.typical.mean(stalled)
    cost = int(np.median(of_rank))
    if cost < _NORMAL * evidence.step_ns:
        return []
    busy = evidence.step_ns - of_rank
    longest = int(busy.argmax())
    usual = int(np.median(np.delete(busy, longest)))
    kernels = evidence.typical.mean(evidence.kernels)
    unequal = all(
        of_stage[longest] > (1 + _LONGER) * np.median(np.delete(of_stage, longest))
        for of_stage in (busy, kernels)
        if of_stage.any()
    )
    starved = bool(kernels.any()) and np.median(kernels) < _STARVED * np.median(busy)
    slowest = (
        f"Rank {ranks[longest]} is busy for {duration(int(busy[longest]))}, the others for "
        f"{duration(usual)}."
    )
    shares = (
        f"Their kernels run for {duration(int(np.median(kernels)))} in the "
        f"{duration(int(np.median(busy)))} in which they do not wait: the host limits the stages."
    )
    return [
        JobFinding(
            rule="",
            kind="pipeline",
            rank=ranks[longest] if unequal else None,
            path="",
            title=(
                f"The pipeline waits for the stage of rank {ranks[longest]}"
                if unequal
                else "The stages of the pipeline wait for each other"
            ),
            seen=(
                f"For {duration(cost)} of a step ({percent(cost / evidence.step_ns)}) the typical "
                "rank computes nothing while it waits for another stage. "
                f"{slowest if unequal else shares if starved else _EQUAL}"
            ),
            remedy=(
                "Move layers from this stage to others."
                if unequal
                else "Use fewer, larger microbatches, or make the host faster (torch.compile, "
                "CUDA graphs)."
                if starved
                else "Divide the batch into more microbatches, or give each rank several smaller "
                "stages (ScheduleInterleaved1F1B)."
            ),
            cost_ns=cost,
        )
    ]
