"""Gradients of parameters that stay in memory through the forward."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.memory_evidence import MemoryEvidence
from backspot.analysis.findings.registry import memory_rule
from backspot.analysis.timeline import take
from backspot.formatting import size
from backspot.results.findings import Finding
from backspot.trace import names

__all__ = ["find"]


@memory_rule("gradients-kept")
def find(evidence: MemoryEvidence) -> Finding | None:
    """Find gradients that AccumulateGrad adds to older ones, where a step has one pass.

    A gradient that replaces ``None`` stays; one that is added is freed by the node that adds it.
    """
    ownership, blocks = evidence.ownership, evidence.blocks
    passes, steps = len(ownership.passes.start), ownership.steps.count
    if passes > steps:  # the gradients of several passes are added up on purpose
        return None
    spans, allocations = ownership.spans, evidence.events.allocations
    adds = np.array([names.is_accumulate_grad(name) for name in (*spans.node_names, "")], bool)
    ends = np.where(blocks.went < len(allocations), blocks.went, -1)
    added = evidence.mine & evidence.memory.kinds.backward
    for thread in np.unique(take(allocations.thread, ends)[added & (ends >= 0)]).tolist():
        here = added & (take(allocations.thread, ends) == thread)
        span = spans.at(thread, take(allocations.time, ends)[here])
        added[here] = take(adds[spans.node], span, False)
    added &= ends >= 0
    if len(np.unique(evidence.memory.kinds.run[added])) < passes:
        return None
    held = int(blocks.size[added].sum()) // passes
    if held < evidence.least:
        return None
    return evidence.finding(
        added,
        held,
        title="Gradients stay in memory through the forward",
        seen=(
            f"{size(held)} of new gradients are added to gradients of the step before, which stay "
            f"allocated while the forward keeps its activations: {evidence.share(held)} of the "
            "peak."
        ),
        remedy=(
            "Call zero_grad(set_to_none=True), the default since PyTorch 2.0, before the forward: "
            "then the old gradients are freed, and backward stores the new ones."
        ),
        times=passes,
        link="https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
    )
