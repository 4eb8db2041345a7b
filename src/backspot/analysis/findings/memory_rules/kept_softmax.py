"""Attention probabilities that are kept for the backward."""

from __future__ import annotations

from backspot.analysis.findings.memory_evidence import MemoryEvidence
from backspot.analysis.findings.registry import memory_rule
from backspot.formatting import size
from backspot.results.findings import Finding

__all__ = ["find"]

_LOSSES = ("aten::cross_entropy_loss", "aten::log_softmax")
_UNFUSED = "aten::_scaled_dot_product_attention_math"
_FUSED_KEEPS = (
    "whose fused forms keep one number for each row in place of all probabilities. Under autocast, "
    "softmax also computes and keeps them in fp32."
)


@memory_rule("kept-softmax")
def find(evidence: MemoryEvidence) -> Finding | None:
    """Find outputs of softmax that are live at the peak, and kept for backward."""
    kept = evidence.kept & evidence.allocated_in("aten::softmax", "aten::_softmax")
    kept = evidence.at_peak(kept & ~evidence.allocated_in(*_LOSSES))
    held = evidence.held_at_peak(kept)
    if held < evidence.least:
        return None
    unfused = evidence.held_at_peak(kept & evidence.allocated_in(_UNFUSED))
    return evidence.finding(
        kept,
        held,
        title="Softmax keeps all of its probabilities for the backward",
        seen=(
            f"{size(held)}, {evidence.share(held)} of the peak, are outputs of softmax. In "
            "attention they grow with the square of the sequence."
        ),
        remedy=(
            "The model calls scaled_dot_product_attention, but PyTorch took the form that is not "
            "fused. torch.nn.attention.sdpa_kernel warns why a fused one cannot run: often a mask "
            "that needs a gradient, the type, or dropout on a CPU."
            if 2 * unfused > held
            else f"Use torch.nn.functional.scaled_dot_product_attention, {_FUSED_KEEPS}"
        ),
        link="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
    )
