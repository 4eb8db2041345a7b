"""Rules about what is in memory at the peak."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.memory_evidence import MemoryEvidence
from backspot.analysis.findings.registry import memory_rule
from backspot.analysis.timeline import merged, take
from backspot.formatting import percent, size
from backspot.results.findings import Finding
from backspot.trace import names

_FRAGMENTATION_LEAST = 0.25
"""Share of the reserved memory: some of it is always free, as blocks are rounded."""
_FRAGMENTATION_LEAST_BYTES = 256 << 20
"""With less, no larger batch would fit."""


@memory_rule("fragmentation")
def fragmentation(evidence: MemoryEvidence) -> Finding | None:
    """Find a device whose allocator has far more memory at the peak than it has given out."""
    device = evidence.device
    reserved = device.reserved_at_peak_bytes
    free = reserved - device.peak_bytes
    if free < max(_FRAGMENTATION_LEAST * reserved, _FRAGMENTATION_LEAST_BYTES):
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


@memory_rule("gradients-kept")
def gradients_kept(evidence: MemoryEvidence) -> Finding | None:
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
    for thread in merged(take(allocations.thread, ends)[added & (ends >= 0)]).tolist():
        here = added & (take(allocations.thread, ends) == thread)
        span = spans.at(thread, take(allocations.time, ends)[here])
        added[here] = take(adds[spans.node], span, False)
    added &= ends >= 0
    if len(merged(evidence.memory.kinds.run[added])) < passes:
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


_HELD_OVER_LEAST_STEPS = 3
"""With fewer steps, what a step allocates once and for all looks the same."""
_HELD_OVER_LEAST = 0.001
"""Share of the peak that a step adds."""


@memory_rule("held-over-steps")
def held_over_steps(evidence: MemoryEvidence) -> Finding | None:
    """Find owners that leave blocks behind in each step but the last, optimizers excepted."""
    count, blocks = evidence.ownership.steps.count, evidence.blocks
    if count < _HELD_OVER_LEAST_STEPS:
        return None
    stays = evidence.mine & (blocks.went == len(evidence.events.allocations))
    stays &= ~evidence.memory.kinds.optimizer
    step = evidence.step_of(blocks.came)
    stays &= step < count - 1
    left = np.zeros((len(evidence.ownership.owners), count - 1), np.int64)
    np.add.at(left, (blocks.owner[stays], step[stays]), blocks.size[stays])
    grows = left.min(axis=1)
    each = int(grows.sum())
    if each <= _HELD_OVER_LEAST * evidence.device.peak_bytes:
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


_POINTWISE_OPERATORS = {
    "GELU": ("aten::gelu",),
    "SiLU": ("aten::silu",),
    "dropout": ("aten::dropout", "aten::native_dropout", "aten::feature_dropout"),
}
_POINTWISE_LEAST = 0.1
"""Share of the peak: each model keeps some of these."""


@memory_rule("kept-pointwise")
def kept_pointwise(evidence: MemoryEvidence) -> Finding | None:
    """Find outputs of GELU, SiLU and dropout that are live at the peak, and kept for backward."""
    held = {
        name: evidence.kept & evidence.allocated_in(*operators)
        for name, operators in _POINTWISE_OPERATORS.items()
    }
    kept = evidence.at_peak(held["GELU"] | held["SiLU"] | held["dropout"])
    total = evidence.held_at_peak(kept)
    if total < _POINTWISE_LEAST * evidence.device.peak_bytes:
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


_LOSSES = ("aten::cross_entropy_loss", "aten::log_softmax")
_UNFUSED = "aten::_scaled_dot_product_attention_math"
_FUSED_KEEPS = (
    "whose fused forms keep one number for each row in place of all probabilities. Under autocast, "
    "softmax also computes and keeps them in fp32."
)


@memory_rule("kept-softmax")
def kept_softmax(evidence: MemoryEvidence) -> Finding | None:
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


_FORWARD = ("aten::cross_entropy_loss", "aten::log_softmax", "aten::nll_loss_nd")
_BACKWARD = ("LogSoftmaxBackward0", "NllLossBackward0", "NllLoss2DBackward0")
_LOGITS_LEAST = 0.1
"""Share of the peak: with few classes, the loss needs next to nothing."""


@memory_rule("logits")
def logits(evidence: MemoryEvidence) -> Finding | None:
    """Find what a cross entropy holds at the peak: log-probabilities and gradients of scores."""
    forward = evidence.at_peak(evidence.allocated_in(*_FORWARD))
    backward = evidence.at_peak(evidence.allocated_by_node(*_BACKWARD))
    held = evidence.held_at_peak(forward | backward)
    if held < _LOGITS_LEAST * evidence.device.peak_bytes:
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
