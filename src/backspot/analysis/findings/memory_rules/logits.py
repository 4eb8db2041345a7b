"""The scores of a vocabulary, and their gradient, at the peak."""

from __future__ import annotations

from backspot.analysis.findings.memory_evidence import MemoryEvidence
from backspot.analysis.findings.registry import memory_rule
from backspot.formatting import size
from backspot.results.findings import Finding

__all__ = ["find"]

_FORWARD = ("aten::cross_entropy_loss", "aten::log_softmax", "aten::nll_loss_nd")
_BACKWARD = ("LogSoftmaxBackward0", "NllLossBackward0", "NllLoss2DBackward0")
_LEAST = 0.1
"""Share of the peak: with few classes, the loss needs next to nothing."""


@memory_rule("logits")
def find(evidence: MemoryEvidence) -> Finding | None:
    """Find what a cross entropy holds at the peak: log-probabilities and gradients of scores."""
    forward = evidence.at_peak(evidence.allocated_in(*_FORWARD))
    backward = evidence.at_peak(evidence.allocated_by_node(*_BACKWARD))
    held = evidence.held_at_peak(forward | backward)
    if held < _LEAST * evidence.device.peak_bytes:
        return None
    sums = [int(evidence.blocks.size[each].sum()) for each in (forward, backward & ~forward)]
    return evidence.finding(
        forward | backward,
        held,
        title="The scores of the loss and their gradient fill memory",
        seen=(
            f"At the peak, the cross entropy holds {size(sums[0])} of log-probabilities and "
            f"{size(sums[1])} of gradients, {evidence.share(held)} of the peak together."
        ),
        remedy=(
            "Compute the last layer and the loss for a part of the tokens at a time, under "
            "activation checkpointing, or with a fused linear cross entropy that never holds all "
            "scores at once."
        ),
        link="https://docs.pytorch.org/docs/stable/checkpoint.html",
    )
