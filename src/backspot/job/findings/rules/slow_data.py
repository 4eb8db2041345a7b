"""A rank that waits longer for its batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backspot.comparison.noise import Limits
from backspot.formatting import duration
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import rule
from backspot.job.others import Others
from backspot.job.scatter import is_clear, least, middle
from backspot.results.job import JobFinding

__all__ = ["find"]


@rule("slow-data")
def find(evidence: Evidence) -> Iterator[JobFinding]:
    """Find ranks that wait longer for their batches."""
    # The later stages of a pipeline wait for other stages, not for data.
    data = np.maximum(evidence.phase("data") - evidence.stalled, 0)
    others = Others(data)
    worth = float(least(middle(data), len(data), evidence.step_ns))
    for now, rank in zip(data, evidence.ranks, strict=True):
        was = others.of(now)
        if is_clear(was, now, None, Limits.of_whole(worth)):
            usual, taken = int(middle(was)), int(middle(now))
            yield JobFinding(
                rule="",
                kind="data",
                rank=rank,
                path="",
                title=f"Rank {rank} waits longer for its data",
                seen=(
                    f"Its steps wait {duration(taken)} for the next batch, those of the other "
                    f"ranks {duration(usual)}."
                ),
                remedy="Compare the loader's workers, the storage and the samples of this rank.",
                cost_ns=taken - usual,
            )
