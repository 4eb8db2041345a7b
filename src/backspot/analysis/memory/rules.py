"""Rules about what is in memory at the peak."""

from __future__ import annotations

import numpy as np

from backspot.analysis.memory.evidence import MemoryEvidence
from backspot.analysis.memory.registry import memory_rule
from backspot.analysis.timeline import merged, take
from backspot.formatting import percent, size
from backspot.results.findings import Finding
from backspot.trace import names

_FRAGMENTATION_LEAST = 0.25
"""Share of the reserved memory: some of it is always free, as blocks are rounded."""
_FRAGMENTATION_LEAST_BYTES = 256 << 20
"""With less, no larger batch would fit."""


@memory_rule(
    "fragmentation",
    tier="stable",
    title="The allocator holds memory that no tensor uses",
    remedy=(
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and call "
        "torch.cuda.empty_cache() once after work that needs more memory than the training, "
        "such as a validation."
    ),
    link="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
)
def fragmentation(evidence: MemoryEvidence) -> Finding | None:
    """The allocator holds memory that no tensor uses.

    **Cause.** The allocator keeps freed memory, and asks the device for more where other sizes do
    not fit into it.

    **Found by** at least 25% of the reserved memory at the peak, and at least 256 MiB, that is not
    allocated. It can be left from work before the recording.

    **Fix.** `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, and `torch.cuda.empty_cache()` once
    after work that needs more memory than the training.
    """
    device = evidence.device
    reserved = device.reserved_at_peak_bytes
    free = reserved - device.peak_bytes
    if free < max(_FRAGMENTATION_LEAST * reserved, _FRAGMENTATION_LEAST_BYTES):
        return None
    return evidence.finding(
        evidence.mine & False,
        free,
        seen=(
            f"At the peak, {size(reserved)} are reserved and {size(device.peak_bytes)} allocated: "
            f"{percent(free / reserved)} is split into fragments, or left from work before the "
            "recording."
        ),
    )


@memory_rule(
    "gradients-kept",
    tier="stable",
    title="Gradients stay in memory through the forward",
    remedy=(
        "Call zero_grad(set_to_none=True), the default since PyTorch 2.0, before the forward: "
        "then the old gradients are freed, and backward stores the new ones."
    ),
    link="https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
)
def gradients_kept(evidence: MemoryEvidence) -> Finding | None:
    """Gradients stay in memory through the forward.

    **Cause.** With `zero_grad(set_to_none=False)` the gradients of the step before stay through the
    forward, and while the backward allocates new ones.

    **Found by** blocks from 5% of the peak that a node allocates and an `AccumulateGrad` node
    frees, where a step has one pass: with several, adding is the purpose.

    **Fix.** `zero_grad(set_to_none=True)` before the forward, or no argument: it is the default.
    """
    # A gradient that replaces ``None`` stays; one that is added is freed by the node that adds it.
    ownership, blocks = evidence.ownership, evidence.blocks
    passes, steps = len(ownership.passes.start), ownership.steps.count
    if passes > steps:  # the gradients of several passes are added up on purpose
        return None
    spans, allocations = ownership.spans, evidence.events.allocations
    adds = np.array([names.is_accumulate_grad(name) for name in (*spans.node_names, "")], bool)
    ends = np.where(blocks.went < len(allocations), blocks.went, -1)
    added = evidence.mine & evidence.memory.kinds.backward
    for thread in merged(take(allocations.thread, ends)[added & (ends >= 0)]).tolist():
        on_thread = added & (take(allocations.thread, ends) == thread)
        span = spans.at(thread, take(allocations.time, ends)[on_thread])
        added[on_thread] = take(adds[spans.node], span, False)
    added &= ends >= 0
    if len(merged(evidence.memory.kinds.run[added])) < passes:
        return None
    bytes_held = int(blocks.size[added].sum()) // passes
    if bytes_held < evidence.least:
        return None
    return evidence.finding(
        added,
        bytes_held,
        seen=(
            f"{size(bytes_held)} of new gradients are added to gradients of the step before, which "
            f"stay allocated while the forward keeps its activations: "
            f"{evidence.share(bytes_held)} of the peak."
        ),
        times=passes,
    )


_HELD_OVER_LEAST_STEPS = 3
"""With fewer steps, what a step allocates once and for all looks the same."""
_HELD_OVER_LEAST = 0.001
"""Share of the peak that a step adds."""


@memory_rule(
    "held-over-steps",
    tier="stable",
    title="Tensors are held over steps",
    remedy=(
        "Look for outputs or losses of these modules that the training keeps, such as in a "
        "list or a running sum: keep numbers in place of them, by loss.item() now and then, "
        "or detach() them and move them to the CPU."
    ),
    link="https://docs.pytorch.org/docs/stable/notes/faq.html",
)
def held_over_steps(evidence: MemoryEvidence) -> Finding | None:
    """Each step leaves tensors behind that nothing frees.

    **Cause.** A training keeps outputs or losses, in a list or a running sum. They and all that
    they refer to are never freed, until memory runs out.

    **Found by** blocks that a module allocates in each step but the last and that are never freed:
    at least 3 steps, from 0.1% of the peak in a step. `held_bytes` is what each step adds at least.

    **Fix.** Keep `loss.item()`, now and then, because it waits for the GPU; or `detach()` what must
    be kept, and move it to the CPU.
    """
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
    grown_bytes = int(grows.sum())
    if grown_bytes <= _HELD_OVER_LEAST * evidence.device.peak_bytes:
        return None
    chosen = stays & (grows[blocks.owner] > 0)
    return evidence.finding(
        chosen,
        grown_bytes,
        seen=(
            f"Each step leaves at least {size(grown_bytes)} behind that no later step frees, so "
            "memory grows for as long as the training runs."
        ),
        times=count - 1,
    )


_POINTWISE_OPERATORS = {
    "GELU": ("aten::gelu",),
    "SiLU": ("aten::silu",),
    "dropout": ("aten::dropout", "aten::native_dropout", "aten::feature_dropout"),
}
_POINTWISE_LEAST = 0.1
"""Share of the peak: each model keeps some of these."""


@memory_rule(
    "kept-pointwise",
    tier="stable",
    title="Cheap functions keep large outputs for the backward",
    remedy=(
        "These outputs are quick to compute again. torch.compile does so where it pays; "
        "otherwise checkpoint the function with the layer behind it, or use a fused form "
        "that keeps only its input."
    ),
    link="https://docs.pytorch.org/docs/stable/checkpoint.html",
)
def kept_pointwise(evidence: MemoryEvidence) -> Finding | None:
    """GELU, SiLU and dropout keep large outputs for the backward.

    **Cause.** The layer behind GELU, SiLU or dropout saves their large output, although it could be
    computed again from the input, which is saved anyway.

    **Found by** blocks from 10% of the peak that are kept from forward to backward and were
    allocated in GELU, SiLU or dropout.

    **Fix.** `torch.compile` computes such outputs again where that pays. Otherwise checkpoint the
    function with the layer behind it, or use a fused form that keeps only its input.
    """
    by_name = {
        name: evidence.kept & evidence.allocated_in(*operators)
        for name, operators in _POINTWISE_OPERATORS.items()
    }
    at_peak = evidence.at_peak(by_name["GELU"] | by_name["SiLU"] | by_name["dropout"])
    total = evidence.held_at_peak(at_peak)
    if total < _POINTWISE_LEAST * evidence.device.peak_bytes:
        return None
    bytes_by_name = {name: evidence.held_at_peak(mask) for name, mask in by_name.items()}
    named = ", ".join(
        f"{size(held_bytes)} by {name}" for name, held_bytes in bytes_by_name.items() if held_bytes
    )
    return evidence.finding(
        at_peak,
        total,
        seen=f"{named}: {evidence.share(total)} of the peak.",
    )


_LOSSES = ("aten::cross_entropy_loss", "aten::log_softmax")
_UNFUSED = "aten::_scaled_dot_product_attention_math"
_FUSED_KEEPS = (
    "whose fused forms keep one number for each row in place of all probabilities. Under autocast, "
    "softmax also computes and keeps them in fp32."
)


@memory_rule(
    "kept-softmax",
    tier="stable",
    title="Softmax keeps all of its probabilities for the backward",
    link="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
)
def kept_softmax(evidence: MemoryEvidence) -> Finding | None:
    """Softmax keeps all of its probabilities for the backward.

    **Cause.** Attention written with `softmax` keeps the probabilities of all pairs of tokens,
    which grow with the square of the sequence, under autocast in fp32.

    **Found by** blocks from 5% of the peak that are kept from forward to backward and were
    allocated in a softmax outside of a loss.

    **Fix.** `torch.nn.functional.scaled_dot_product_attention`: its fused forms keep one number for
    each row. If the model calls it already, see [attention-math](#attention-math).
    """
    probabilities = evidence.kept & evidence.allocated_in("aten::softmax", "aten::_softmax")
    probabilities = evidence.at_peak(probabilities & ~evidence.allocated_in(*_LOSSES))
    bytes_held = evidence.held_at_peak(probabilities)
    if bytes_held < evidence.least:
        return None
    unfused = evidence.held_at_peak(probabilities & evidence.allocated_in(_UNFUSED))
    return evidence.finding(
        probabilities,
        bytes_held,
        seen=(
            f"{size(bytes_held)}, {evidence.share(bytes_held)} of the peak, are outputs of softmax."
            " In attention they grow with the square of the sequence."
        ),
        remedy=(
            "The model calls scaled_dot_product_attention, but PyTorch took the form that is not "
            "fused. torch.nn.attention.sdpa_kernel warns why a fused one cannot run: often a mask "
            "that needs a gradient, the type, or dropout on a CPU."
            if 2 * unfused > bytes_held
            else f"Use torch.nn.functional.scaled_dot_product_attention, {_FUSED_KEEPS}"
        ),
    )


_FORWARD = ("aten::cross_entropy_loss", "aten::log_softmax", "aten::nll_loss_nd")
_BACKWARD = ("LogSoftmaxBackward0", "NllLossBackward0", "NllLoss2DBackward0")
_LOGITS_LEAST = 0.1
"""Share of the peak: with few classes, the loss needs next to nothing."""


@memory_rule(
    "logits",
    tier="stable",
    title="The scores of the loss and their gradient fill memory",
    remedy=(
        "Compute the last layer and the loss for a part of the tokens at a time, under "
        "activation checkpointing, or with a fused linear cross entropy that never holds all "
        "scores at once."
    ),
    link="https://docs.pytorch.org/docs/stable/checkpoint.html",
)
def logits(evidence: MemoryEvidence) -> Finding | None:
    """The scores of the loss and their gradient fill memory.

    **Cause.** A cross entropy over a large vocabulary keeps fp32 log-probabilities for each token
    and word, and a gradient of the same size. With checkpointed layers, this often decides the
    peak.

    **Found by** blocks from 10% of the peak that were allocated in a cross entropy or its parts, or
    in their nodes.

    **Fix.** Compute the last layer and the loss for a part of the tokens at a time and checkpoint
    each part, or use a fused linear cross entropy.
    """
    forward = evidence.at_peak(evidence.allocated_in(*_FORWARD))
    backward = evidence.at_peak(evidence.allocated_by_node(*_BACKWARD))
    bytes_held = evidence.held_at_peak(forward | backward)
    if bytes_held < _LOGITS_LEAST * evidence.device.peak_bytes:
        return None
    sums = [int(evidence.blocks.size[mask].sum()) for mask in (forward, backward & ~forward)]
    return evidence.finding(
        forward | backward,
        bytes_held,
        seen=(
            f"At the peak, the cross entropy holds {size(sums[0])} of log-probabilities and "
            f"{size(sums[1])} of gradients, {evidence.share(bytes_held)} of the peak together."
        ),
    )
