"""Communication between ranks that no computation hides."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding

__all__ = ["find"]

_COMMUNICATION = 2  # DeviceWork.tier


@rule("exposed-communication")
def find(evidence: Evidence) -> Finding | None:
    """Find communication kernels that run while no device computes or copies."""
    work = (evidence.work.tier == _COMMUNICATION) & evidence.recorded
    cost = int(evidence.work_ns[work].sum())
    if not cost:
        return None
    whole = int((evidence.work.end - evidence.work.start)[work].sum())
    return evidence.finding(
        title="Communication between ranks is not hidden",
        seen=(
            f"{evidence.per_step(int(work.sum()), 'collective')}, {evidence.ms(whole)} in all; for "
            f"{evidence.ms(cost)} this rank computes nothing, but waits for them to start or end."
        ),
        remedy=(
            "Larger or earlier buckets (DistributedDataParallel's bucket_cap_mb), FSDP's prefetch, "
            "gradients sent in bf16, no_sync() while accumulating. If one rank is late, the others "
            "wait for it here: compare ranks."
        ),
        link="https://docs.pytorch.org/docs/stable/notes/ddp.html",
        places=evidence.places_of_work(work),
        nodes=evidence.top_nodes(evidence.spans_of_work(work)),
        kernels=evidence.top_kernels(work),
    )
