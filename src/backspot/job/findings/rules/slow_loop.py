"""A rank whose host takes longer outside of modules, somewhere in the training loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backspot.formatting import duration, visible
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import rule
from backspot.job.modules import Claim
from backspot.results.job import JobFinding

__all__ = ["find"]

_MOST = 0.5
"""Share of the difference from which one operator is what takes longer."""


@rule("slow-loop")
def find(evidence: Evidence) -> Iterator[JobFinding]:
    """Find places in the training loop where the host of a rank takes longer."""
    for claim in evidence.claims:
        if claim.module.is_module:
            continue
        place, longer = claim.module.path.strip("()"), claim.taken_ns - claim.usual_ns
        what, most = _longest(evidence, claim)
        seen = (
            f"It takes {duration(claim.taken_ns)} of a step there, and {duration(claim.usual_ns)} "
            "on the other ranks, in no module, collective or loader."
        )
        if most < _MOST * longer:
            remedy = "Look for what only this rank does there, or for a busy core."
        elif what:
            seen += f" {duration(most)} of the difference are in {visible(what)}."
            remedy = "Look for what this rank alone computes there, or computes on more data."
        else:
            seen += f" {duration(most)} of the difference are Python: no operator runs."
            remedy = (
                "Look for what only this rank does there: logging, saving, a metric, a wait for a "
                "file or a lock, or a busy core."
            )
        yield JobFinding(
            rule="",
            kind="host",
            rank=claim.rank,
            path="",
            title=f"Rank {claim.rank} takes longer {place}",
            seen=seen,
            remedy=remedy,
            cost_ns=longer,
        )


def _longest(evidence: Evidence, claim: Claim) -> tuple[str, int]:
    """Return what takes longer there most, and by how much."""
    times: dict[str, dict[int, int]] = {}
    for rank, summary in evidence.ranks.items():
        for one in summary.outside:
            if one.place == claim.module.path:
                hidden = one.hidden if rank != claim.rank else (0,) * len(one.host)
                by_step = np.add(one.host, hidden)[list(evidence.at[rank])]
                times.setdefault(one.doing, {})[rank] = evidence.typical.value(by_step)
    others = [rank for rank in evidence.ranks if rank != claim.rank]
    longer = {
        what: taken.get(claim.rank, 0) - int(np.median([taken.get(rank, 0) for rank in others]))
        for what, taken in times.items()
    }
    what = max(sorted(longer), key=lambda one: longer[one])
    return what, longer[what]
