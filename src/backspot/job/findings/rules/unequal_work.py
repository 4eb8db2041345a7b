"""Modules that have more work on some ranks than on others, on other ranks in other steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backspot.formatting import duration, visible
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import rule
from backspot.job.modules import PARTS
from backspot.job.scatter import MANY
from backspot.results.job import JobFinding

__all__ = ["find"]


@rule("unequal-work")
def find(evidence: Evidence) -> Iterator[JobFinding]:
    """Find modules whose forward kernels scatter widely over many ranks, without a single culprit.

    The ranks wait for the slowest one, so the job pays its distance from the typical rank.
    """
    table = evidence.table
    claimed = {claim.module.path for claim in evidence.claims}
    for here, rows in table.peers:
        if len(rows) < MANY:
            continue
        times = table.times[rows][:, here, PARTS.index("forward_gpu")]
        middle = np.median(times, axis=0)
        costs = evidence.typical.mean((times.max(axis=0) - middle).astype(np.int64))
        usual = evidence.typical.mean(middle.astype(np.int64))
        for place in np.flatnonzero(costs >= evidence.worth_ns).tolist():
            module = table.modules[here[place]]
            if module.path in claimed:
                continue
            name = visible(module.label)
            cost = int(costs[place])
            yield JobFinding(
                rule="",
                kind="gpu",
                rank=None,
                path=module.path,
                title=f"{name} has unequal work on the ranks",
                seen=(
                    f"In a step, its forward kernels take {duration(int(usual[place]))} on the "
                    f"typical rank and {duration(int(usual[place]) + cost)} on the slowest one, "
                    "which is not always the same, or one of several."
                ),
                remedy=(
                    "Balance the work: sequences of similar length in each batch, or the routing "
                    "of experts (auxiliary loss, capacity)."
                ),
                cost_ns=cost,
            )
