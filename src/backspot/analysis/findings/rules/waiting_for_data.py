"""A step that stands still until its next batch is there."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding, Place

__all__ = ["find"]


@rule("waiting-for-data")
def find(evidence: Evidence) -> Finding | None:
    """Find the step's data phase."""
    phase = evidence.phase("data")
    if phase is None or not phase.wall_ns:
        return None
    return evidence.finding(
        title="The step waits for its data",
        seen=(
            f"{evidence.ms(phase.wall_ns)} of each step, {evidence.share(phase.wall_ns)}, pass "
            "before the next batch is there: waiting, not work of the model."
        ),
        remedy=(
            "DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…, "
            "pin_memory=True); move decoding and augmentation into the workers, or onto the GPU."
            if evidence.report.has_gpu
            else "DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…); move "
            "decoding and augmentation into the workers."
        ),
        link="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
        places=(Place("(data)", "", evidence.report.steps, phase.wall_ns),),
    )
