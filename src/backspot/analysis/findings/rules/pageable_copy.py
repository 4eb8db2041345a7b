"""Copies to the GPU from pageable memory, during which the host has to wait."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import names

__all__ = ["find"]


@rule("pageable-copy", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find copies from pageable memory that no other work hides."""
    costs, say = evidence.costs, evidence.wording
    work = evidence.work_named(lambda name: name.startswith(names.PAGEABLE_TO_DEVICE))
    if not work.any():
        return None
    size = evidence.events.size[evidence.work.event[work]]
    return finding(
        costs.places_of_work(work, elsewhere="(data)"),
        title="Copies to the GPU come from pageable memory",
        seen=(
            f"{say.copies(size)}: {say.ms(costs.of_work(work))} in which nothing else runs. The "
            "driver copies pageable memory twice, and the host waits."
        ),
        remedy=(
            "Use DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True). If the "
            "step makes the tensors itself, create them on the device."
        ),
        link="https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        kernels=costs.top_kernels(work),
    )
