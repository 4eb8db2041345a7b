"""Forward work that activation checkpointing runs again inside backward."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.formatting import percent
from backspot.results.findings import Finding

__all__ = ["find"]


@rule("recompute")
def find(evidence: Evidence) -> Finding | None:
    """Find module calls and operators that a backward pass runs again."""
    costs = evidence.costs
    again = evidence.in_pass & ~evidence.spans.is_node
    cost = costs.of_spans(again)
    if not cost:
        return None
    share = percent(cost / evidence.report.wall_ns if evidence.report.wall_ns else 0.0)
    return finding(
        costs.places_of_spans(again),
        title="Activation checkpointing runs the forward again",
        seen=(
            f"{evidence.wording.ms(cost)} of the backward, {share}, is forward work that runs a "
            "second time."
        ),
        remedy=(
            "This is the price of the memory that checkpointing saves. If memory is left, "
            "checkpoint fewer blocks, or keep the results of matmuls with "
            "torch.utils.checkpoint.create_selective_checkpoint_contexts."
        ),
        link="https://docs.pytorch.org/docs/stable/checkpoint.html",
        kernels=costs.top_kernels(evidence.work_of(again)),
    )
