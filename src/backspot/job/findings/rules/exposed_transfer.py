"""Transfers that hold the clock of all ranks, so that no rank is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import numpy as np

from backspot.formatting import duration
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import fallback_rule
from backspot.results.job import JobFinding

__all__ = ["find"]

_EXPOSED = 0.1
"""Share of the step from which exposed transfers are worth a claim."""


@fallback_rule("exposed-transfer")
def find(evidence: Evidence, found: Sequence[JobFinding]) -> list[JobFinding]:
    """Find transfers that nothing hides, on half of the ranks, and that no other rule explains.

    Waits that nothing hides count as exposed, and others do not. So what all waits, and twice the
    uncertainty of the clock, leave of the exposed time is transfer for certain.
    """
    certain = median_low(
        cost.exposed_ns - cost.stalled_ns - cost.wait_ns - 2 * cost.uncertainty_ns
        for cost in evidence.costs
    )
    certain -= sum(one.cost_ns for one in found if one.kind == "transfer")
    if not evidence.waits or certain < _EXPOSED * evidence.step_ns:
        return []
    sums: dict[str, int] = {}
    for one in evidence.waits:
        for column, call in enumerate(one.group.call):
            moved = int(np.median(one.transfer[:, column]))
            sums[call.kind] = sums.get(call.kind, 0) + moved
    most = max(sorted(sums), key=lambda kind: sums[kind])
    gathers = "gather" in most
    return [
        JobFinding(
            rule="",
            kind="transfer",
            rank=None,
            path="",
            title=f"Transfers hold up all ranks, mostly {most}",
            seen=(
                f"In at least {duration(certain)} of a step, data moves between the ranks "
                "and nothing else runs, on the typical rank, waits for other ranks left out."
            ),
            remedy=(
                "Gather parameters earlier (FSDP2: set_modules_to_forward_prefetch and "
                "set_modules_to_backward_prefetch), or in larger groups of layers."
                if gathers
                else "Let the exchange run beside the backward: larger or smaller buckets, fewer "
                "bytes (bf16), or fewer exchanges (gradient accumulation with no_sync)."
            ),
            cost_ns=certain,
        )
    ]
