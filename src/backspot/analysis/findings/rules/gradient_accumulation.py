"""Gradients that are copied or added when they reach their parameters."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.passes import OPTIMIZER_STEP
from backspot.analysis.findings.evidence import Evidence, Mask
from backspot.analysis.findings.registry import rule
from backspot.analysis.findings.rules import zero_grad_fill
from backspot.results.findings import Finding
from backspot.trace import Category

__all__ = ["find"]

_LEAST_SHARED = 0.03
"""Several passes a step must add up their gradients; below this that is as it should be."""

_NODE = ("torch::autograd::AccumulateGrad", "AccumulateGrad")
_WORK = ("aten::add_", "aten::add", "aten::clone", "aten::copy_")
"""What adds a gradient to the one that is there, or copies one that cannot be taken over."""


@rule("gradient-accumulation")
def find(evidence: Evidence) -> Finding | None:
    """Find AccumulateGrad nodes that do more than hand over what they are given."""
    nodes = evidence.accumulates
    passes = _passes(evidence, nodes)
    parallel = bool(evidence.events.name_mask("DistributedDataParallel.forward").any())
    # Data-parallel wrappers copy and launch their communication in hooks of these nodes.
    work = evidence.work_of(nodes) & (evidence.work.tier != 2) & evidence.recorded
    if not parallel:
        work &= evidence.launched_in(*_NODE) >= 0
    if evidence.report.has_gpu:
        nodes &= evidence.spans_of_work(work)
        places = evidence.places_of_work(work)
    else:
        nodes &= _working(evidence)
        places = evidence.places_of_spans(nodes)
    cost = sum(place.wall_ns for place in places)
    if not places or (passes <= 1 and zero_grad_fill.fills(evidence).any()):
        return None  # the sums are there because zero_grad left zeros to add to
    if passes > 1:
        if cost < _LEAST_SHARED * evidence.step_ns:
            return None
        why = f"{passes} passes before each update add to what the ones before left"
        remedy = (
            "Each pass reads and writes every gradient once more: fewer, larger micro-batches cost "
            "less; gradients in bf16 halve it."
        )
    elif parallel:
        why = "data parallelism copies each gradient into its buckets"
        remedy = (
            "DistributedDataParallel(..., gradient_as_bucket_view=True) lets gradients lie in the "
            "buckets from the start."
        )
    else:
        why = "a gradient whose memory others share, or whose strides differ, is copied or added"
        remedy = (
            "zero_grad(set_to_none=True) before each backward; give parameters that are used in "
            "several places or through expand and transpose their own contiguous storage."
        )
    return evidence.finding(
        title="Gradients are copied or added at their parameters",
        seen=(
            f"{evidence.per_step(int(nodes.sum()), 'AccumulateGrad node')} with work to do, "
            f"{evidence.ms(cost)}: {why}."
        ),
        remedy=remedy,
        link="https://docs.pytorch.org/docs/stable/notes/autograd.html",
        places=places,
        nodes=evidence.top_nodes(nodes),
        operators=evidence.top_operators(
            evidence.launched_in(*_WORK)[work],
            np.maximum(evidence.work_ns[work], 1),
        ),
        kernels=evidence.top_kernels(work),
    )


def _working(evidence: Evidence) -> Mask:
    """Whether each span runs an operator that adds or copies; most only take the gradient over.

    What a hook on the node runs is none of its work.
    """
    events = evidence.events
    names = np.array([name in _WORK for name in events.names], bool)
    index = events.chosen(names, Category.OPERATOR)
    itself = evidence.around(events.thread[index], events.start[index], *_NODE)
    return evidence.spans_around(index[itself >= 0])


def _passes(evidence: Evidence, accumulate: Mask) -> int:
    """In how many passes a module gets gradients before its optimizer uses them, at most."""
    events, passes = evidence.events, evidence.ownership.passes
    updates = np.sort(events.start[events.named(Category.ANNOTATION, OPTIMIZER_STEP)])
    run = passes.of_span[accumulate]
    turn = np.searchsorted(updates, passes.start[run], side="right")
    if not len(updates):
        turn = evidence.ownership.steps.of_pass[run]
    owner = evidence.ownership.owner[accumulate]
    # Passes follow each other: one begins wherever a module's turn or run is not the one before.
    order = np.lexsort((run, turn, owner))
    owner, turn, run = owner[order], turn[order], run[order]
    begins = np.append(True, (owner[1:] != owner[:-1]) | (turn[1:] != turn[:-1]))[: len(owner)]
    differs = begins | np.append(True, run[1:] != run[:-1])[: len(owner)]
    return int(np.bincount(np.cumsum(begins)[differs]).max(initial=0))
