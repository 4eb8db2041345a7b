"""Communication between ranks that no computation hides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backspot.analysis.attribution.launches import Tier
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import NOTHING
from backspot.results.findings import Finding

__all__ = ["find"]


@rule("exposed-communication")
def find(evidence: Evidence) -> Finding | None:
    """Find communication kernels that run while no device computes or copies."""
    costs, say = evidence.costs, evidence.wording
    work = (evidence.work.tier == Tier.COMMUNICATION) & evidence.recorded
    cost = costs.of_work(work)
    if not cost:
        return None
    owners = evidence.ownership.owners
    owner = np.where(work, evidence.ownership.work_owner, NOTHING)
    spent = costs.places_by_step(costs.work_by_step(owner, len(owners))).places
    parts = ", ".join(f"{say.ms(one.wall_ns)} in {one.path}" for one in spent if one.wall_ns)
    return finding(
        replace(costs.places_of_work(work), removable=costs.removable(None, work)),
        title="Communication between ranks is not hidden",
        seen=(
            f"{say.per_step(int(work.sum()), 'collective')}, "
            f"{say.ms(costs.of_device(work))} in all. For {say.ms(cost)} this rank "
            f"computes nothing and waits for other ranks: {parts}."
        ),
        remedy=(
            "If one rank is late, the others wait for it here: backspot ranks says which. "
            "Otherwise use larger or earlier buckets (bucket_cap_mb of DistributedDataParallel), "
            "FSDP's prefetching, gradients in bf16, or no_sync() while gradients accumulate."
        ),
        link="https://docs.pytorch.org/docs/stable/notes/ddp.html",
        nodes=costs.top_nodes(evidence.spans_of_work(work)),
        kernels=costs.top_kernels(work),
    )
