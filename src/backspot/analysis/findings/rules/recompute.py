"""Forward work that activation checkpointing runs again inside backward."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.formatting import percent
from backspot.results.findings import Finding

__all__ = ["find"]


@rule("recompute")
def find(evidence: Evidence) -> Finding | None:
    """Find what runs again, as a share of the backward."""
    again = evidence.in_pass & ~evidence.spans.is_node
    cost = int(evidence.span_ns[again].sum())
    if not cost:
        return None
    share = percent(cost / evidence.report.wall_ns if evidence.report.wall_ns else 0.0)
    return evidence.finding(
        title="Activation checkpointing runs the forward again",
        seen=f"{evidence.ms(cost)} of the backward, {share}, is forward work run a second time.",
        remedy=(
            "That is its price for memory. If memory has room, checkpoint fewer blocks, or keep "
            "the matmuls' results: torch.utils.checkpoint.create_selective_checkpoint_contexts."
        ),
        link="https://docs.pytorch.org/docs/stable/checkpoint.html",
        places=evidence.places_of_spans(again),
        kernels=evidence.top_kernels(evidence.work_of(again)),
    )
