"""Copies to the GPU from ordinary memory, for which the host has to wait."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding

__all__ = ["find"]


@rule("pageable-copy")
def find(evidence: Evidence) -> Finding | None:
    """Find copies from pageable memory that nothing hides."""
    work = evidence.work_named(lambda name: name.startswith("Memcpy HtoD (Pageable"))
    if not work.any():
        return None
    return evidence.finding(
        title="Copies to the GPU come from pageable memory",
        seen=(
            f"{evidence.per_step(int(work.sum()), 'copy', 'copies')}{evidence.volume(work)}: "
            f"{evidence.ms(int(evidence.work_ns[work].sum()))} in which nothing else runs. The "
            "driver copies such memory twice, and the host waits."
        ),
        remedy=(
            "DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True); for tensors "
            "made in the step, create them on the device."
        ),
        link="https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        places=evidence.places_of_work(work, elsewhere="(data)"),
        kernels=evidence.top_kernels(work),
    )
