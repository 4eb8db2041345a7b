"""Gradients that are copied or added when they reach their parameters."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.launches import Tier, in_optimizer
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import accumulating, fills, zeroing
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Mask

__all__ = ["find"]

_LEAST = 0.01  # of the step
_LEAST_OF_SEVERAL = 0.03
"""Several passes per step must add their gradients; below this share of the step that is as usual.
"""
_NODE = (names.AUTOGRAD_NAMESPACE + names.ACCUMULATE_GRAD, names.ACCUMULATE_GRAD)
_WORK = ("aten::add_", "aten::add", "aten::clone", "aten::copy_")
"""The operators that add a gradient to an earlier one, or copy one that cannot be taken over."""


@rule("gradient-accumulation")
def find(evidence: Evidence) -> Finding | None:
    """Find AccumulateGrad nodes that do more than take over the gradient that they are given."""
    costs, say = evidence.costs, evidence.wording
    nodes = accumulating(evidence)
    passes = _passes(evidence, nodes)
    parallel = bool(evidence.events.name_mask(names.DDP_FORWARD).any())
    # Data parallelism copies and communicates in hooks of these nodes. Optimizers may step there.
    work = evidence.work_of(nodes) & (evidence.work.tier != Tier.COMMUNICATION) & evidence.recorded
    work &= ~evidence.work.optimizer
    if not parallel:
        work &= evidence.launched_in(*_NODE) >= 0
    if evidence.report.has_gpu:
        nodes &= evidence.spans_of_work(work)
        placed, by_step = costs.places_of_work(work), costs.of_work_by_step(work)
    else:
        nodes &= _working(evidence)
        placed, by_step = costs.places_of_spans(nodes), costs.of_spans_by_step(nodes)
    filled = fills(evidence).any() if evidence.report.has_gpu else len(zeroing(evidence)) > 0
    if not placed.places or (passes <= 1 and filled):
        return None  # zero_grad left zeros to add to: the finding zero-grad-fill says so
    if not costs.holds_in_most_steps(by_step, _LEAST_OF_SEVERAL if passes > 1 else _LEAST):
        return None
    if passes > 1:
        why = f"with {passes} passes before each update, each pass adds to the gradients so far"
        remedy = (
            "Use fewer, larger micro-batches: each pass reads and writes every gradient once more. "
            "Gradients in bf16 halve the cost."
        )
    elif parallel:
        why = "DistributedDataParallel copies each gradient into its buckets"
        remedy = (
            "DistributedDataParallel(..., gradient_as_bucket_view=True) keeps gradients in the "
            "buckets from the start."
        )
    else:
        why = (
            "a gradient is copied or added when its memory is shared, or when its strides differ "
            "from those of its parameter"
        )
        remedy = (
            "Call zero_grad(set_to_none=True) before each backward. Give parameters that are used "
            "in several places, or through expand or transpose, contiguous storage of their own."
        )
    operator = evidence.launched_in(*_WORK)[work]
    return finding(
        placed,
        title="Gradients are copied or added at their parameters",
        seen=(
            f"{say.per_step(int(nodes.sum()), 'AccumulateGrad node')} with work to do, "
            f"{say.ms(placed.wall_ns)}: {why}."
        ),
        remedy=remedy,
        link="https://docs.pytorch.org/docs/stable/notes/autograd.html",
        nodes=costs.top_nodes(nodes),
        operators=costs.top_operators(
            evidence.names_of(operator), np.maximum(costs.recorded_work_ns[work], 1)
        ),
        kernels=costs.top_kernels(work),
    )


def _working(evidence: Evidence) -> Mask:
    """Whether each span runs an operator that adds or copies.

    Hooks on the node do not count, nor do optimizers that step in the node.
    """
    events = evidence.events
    index = events.chosen(events.names_where(lambda name: name in _WORK), Category.OPERATOR)
    itself = evidence.around(events.thread[index], events.start[index], *_NODE)
    start, thread = events.start[index], events.thread[index]
    updates = in_optimizer(events, evidence.ownership.passes, start, thread)
    return evidence.spans_around(index[(itself >= 0) & ~updates])


def _passes(evidence: Evidence, accumulate: Mask) -> int:
    """Return the largest number of passes that give a module gradients before one update."""
    events, passes = evidence.events, evidence.ownership.passes
    updates = np.sort(events.start[events.named(Category.ANNOTATION, names.OPTIMIZER_STEP)])
    run = passes.of_span[accumulate]
    turn = np.searchsorted(updates, passes.start[run], side="right")
    if not len(updates):
        turn = evidence.ownership.steps.of_pass[run]
    owner = evidence.ownership.owner[accumulate]
    # Sorted, a pass begins where the owner, the update or the pass differs from the one before.
    order = np.lexsort((run, turn, owner))
    owner, turn, run = owner[order], turn[order], run[order]
    begins = np.append(True, (owner[1:] != owner[:-1]) | (turn[1:] != turn[:-1]))[: len(owner)]
    differs = begins | np.append(True, run[1:] != run[:-1])[: len(owner)]
    return int(np.bincount(np.cumsum(begins)[differs]).max(initial=0))
