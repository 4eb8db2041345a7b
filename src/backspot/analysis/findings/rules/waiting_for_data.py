"""A step that waits until its next batch is ready."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding, Place

__all__ = ["find"]

_WORKERS = (
    "Use DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…), and move decoding "
    "and augmentation into the workers."
)
_WORKERS_AND_GPU = (
    "Use DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…, pin_memory=True), "
    "and move decoding and augmentation into the workers or onto the GPU."
)


@rule("waiting-for-data")
def find(evidence: Evidence) -> Finding | None:
    """Find the data phase of the step."""
    phase = evidence.phase("data")
    if phase is None or not phase.wall_ns:
        return None
    say = evidence.wording
    return finding(
        (Place("(data)", "", evidence.report.steps, phase.wall_ns),),
        title="The step waits for its data",
        seen=(
            f"{say.ms(phase.wall_ns)} of each step, {say.share(phase.wall_ns)}, pass before the "
            "next batch is ready. The model does not run in this time."
        ),
        remedy=_WORKERS_AND_GPU if evidence.report.has_gpu else _WORKERS,
        link="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
    )
