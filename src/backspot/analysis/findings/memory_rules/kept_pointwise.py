"""Outputs of activation functions and dropout that are kept for the backward."""

from __future__ import annotations

from backspot.analysis.findings.memory_evidence import MemoryEvidence
from backspot.analysis.findings.registry import memory_rule
from backspot.formatting import size
from backspot.results.findings import Finding

__all__ = ["find"]

_OPERATORS = {
    "GELU": ("aten::gelu",),
    "SiLU": ("aten::silu",),
    "dropout": ("aten::dropout", "aten::native_dropout", "aten::feature_dropout"),
}
_LEAST = 0.1
"""Share of the peak: each model keeps some of these."""


@memory_rule("kept-pointwise")
def find(evidence: MemoryEvidence) -> Finding | None:
    """Find outputs of GELU, SiLU and dropout that are live at the peak, and kept for backward."""
    held = {
        name: evidence.kept & evidence.allocated_in(*operators)
        for name, operators in _OPERATORS.items()
    }
    kept = evidence.at_peak(held["GELU"] | held["SiLU"] | held["dropout"])
    total = evidence.held_at_peak(kept)
    if total < _LEAST * evidence.device.peak_bytes:
        return None
    parts = {name: evidence.held_at_peak(mask) for name, mask in held.items()}
    named = ", ".join(f"{size(part)} by {name}" for name, part in parts.items() if part)
    return evidence.finding(
        kept,
        total,
        title="Cheap functions keep large outputs for the backward",
        seen=f"{named}: {evidence.share(total)} of the peak.",
        remedy=(
            "These outputs are quick to compute again. torch.compile does so where it pays; "
            "otherwise checkpoint the function with the layer behind it, or use a fused form "
            "that keeps only its input."
        ),
        link="https://docs.pytorch.org/docs/stable/checkpoint.html",
    )
