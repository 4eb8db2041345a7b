"""Memory that the allocator has from the device and that no tensor uses at the peak."""

from __future__ import annotations

from backspot.analysis.findings.memory_evidence import MemoryEvidence
from backspot.analysis.findings.registry import memory_rule
from backspot.formatting import percent, size
from backspot.results.findings import Finding

__all__ = ["find"]

_LEAST = 0.25
"""Share of the reserved memory: some of it is always free, as blocks are rounded."""
_LEAST_BYTES = 256 << 20
"""With less, no larger batch would fit."""


@memory_rule("fragmentation")
def find(evidence: MemoryEvidence) -> Finding | None:
    """Find a device whose allocator has far more memory at the peak than it has given out."""
    device = evidence.device
    reserved = device.reserved_at_peak_bytes
    free = reserved - device.peak_bytes
    if free < max(_LEAST * reserved, _LEAST_BYTES):
        return None
    return evidence.finding(
        evidence.mine & False,
        free,
        title="The allocator holds memory that no tensor uses",
        seen=(
            f"At the peak, {size(reserved)} are reserved and {size(device.peak_bytes)} allocated: "
            f"{percent(free / reserved)} is split into fragments, or left from work before the "
            "recording."
        ),
        remedy=(
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and call "
            "torch.cuda.empty_cache() once after work that needs more memory than the training, "
            "such as a validation."
        ),
        link="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
    )
