"""Blocks that are never freed, more of them in each step."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.memory_evidence import MemoryEvidence
from backspot.analysis.findings.registry import memory_rule
from backspot.formatting import size
from backspot.results.findings import Finding

__all__ = ["find"]

_LEAST_STEPS = 3
"""With fewer steps, what a step allocates once and for all looks the same."""
_LEAST = 0.001
"""Share of the peak that a step adds."""


@memory_rule("held-over-steps")
def find(evidence: MemoryEvidence) -> Finding | None:
    """Find owners that leave blocks behind in each step but the last, optimizers excepted."""
    count, blocks = evidence.ownership.steps.count, evidence.blocks
    if count < _LEAST_STEPS:
        return None
    stays = evidence.mine & (blocks.went == len(evidence.events.allocations))
    stays &= ~evidence.memory.kinds.optimizer
    step = evidence.step_of(blocks.came)
    stays &= step < count - 1
    left = np.zeros((len(evidence.ownership.owners), count - 1), np.int64)
    np.add.at(left, (blocks.owner[stays], step[stays]), blocks.size[stays])
    grows = left.min(axis=1)
    each = int(grows.sum())
    if each <= _LEAST * evidence.device.peak_bytes:
        return None
    chosen = stays & (grows[blocks.owner] > 0)
    return evidence.finding(
        chosen,
        each,
        title="Tensors are held over steps",
        seen=(
            f"Each step leaves at least {size(each)} behind that no later step frees, so memory "
            "grows for as long as the training runs."
        ),
        remedy=(
            "Look for outputs or losses of these modules that the training keeps, such as in a "
            "list or a running sum: keep numbers in place of them, by loss.item() now and then, "
            "or detach() them and move them to the CPU."
        ),
        times=count - 1,
        link="https://docs.pytorch.org/docs/stable/notes/faq.html",
    )
