"""Gradients that are exchanged in many small pieces."""

from __future__ import annotations

import numpy as np

from backspot.formatting import counted, duration
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import rule
from backspot.results.job import JobFinding

__all__ = ["find"]

_SMALL = 1_000_000
"""Bytes below which starting an exchange takes longer than moving its bytes; the default bucket of
DistributedDataParallel has 26 times as many."""
_MANY = 8
"""Small exchanges that a step may have: first, last and odd buckets."""


@rule("small-buckets")
def find(evidence: Evidence) -> list[JobFinding]:
    """Find exchanges of gradients that are small, if nothing hides them or their launches.

    What else each exchange costs, such as the copies into its bucket, is not counted.
    """
    exchanges = evidence.transfers("gradients")
    small = (exchanges.bytes >= 0) & (exchanges.bytes < _SMALL)
    number = int(small.sum()) / evidence.steps
    cost, launching = (
        exchanges.typical_ns(np.where(small, time, 0))
        for time in (exchanges.cost + exchanges.launching, exchanges.launching)
    )
    if number <= _MANY or 2 * small.sum() < len(small) or cost < evidence.worth_ns:
        return []
    sharded = any(call.kind == "reduce_scatter" for call in exchanges.calls)
    size = int(np.median(exchanges.bytes[small]))
    return [
        JobFinding(
            rule="",
            kind="transfer",
            rank=None,
            path="",
            title="Gradients are exchanged in many small pieces",
            seen=(
                f"A step has {counted(round(number), 'exchange')} of less than 1 MB, half of them "
                f"of {size / 1000:,.0f} kB or less. For {duration(cost)} of the step, the host "
                "launches one of them or one of them runs, and the device does nothing else, "
                f"waits for other ranks left out; {duration(launching)} of that are launches."
            ),
            remedy=(
                "Give fully_shard larger groups of layers, so that each exchange has more bytes."
                if sharded
                else "Use larger buckets: DistributedDataParallel(bucket_cap_mb=…), 25 by default."
            ),
            cost_ns=cost,
            at_least=True,
        )
    ]
