"""Copies in backward that only change the memory layout of a tensor."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import accumulating, sorting
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import names

__all__ = ["find"]

_LEAST = 0.055
"""Every attention copies the gradients of queries, keys and values into one tensor; below this
share of the step copies are as usual."""
_LEAST_OF_CONVOLUTIONS = 0.03


@rule("layout-copies", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find ``contiguous`` and ``clone`` in nodes, and convolutions that convert their layout.

    In compiled code these are generated kernels that do nothing else.
    """
    costs, say = evidence.costs, evidence.wording
    copying = evidence.launched_in("aten::contiguous", "aten::clone")
    generated = evidence.work_named(names.is_generated_copy)
    converts = evidence.work_named(names.is_layout_conversion)
    # Copies of indices belong to the indexing, those of gradients to their parameters.
    others = accumulating(evidence) | sorting(evidence)
    work = ((copying >= 0) | generated | converts) & evidence.backward & ~evidence.work_of(others)
    converts |= evidence.work_of(evidence.nodes_named(lambda name: "Convolution" in name))
    converted = costs.of_work(work & converts)
    if not costs.holds_in_most_steps(costs.of_work_by_step(work), _LEAST):
        least = _LEAST_OF_CONVOLUTIONS
        if not costs.holds_in_most_steps(costs.of_work_by_step(work & converts), least):
            return None
        work &= converts
    cost = costs.of_work(work)
    if 2 * converted > cost:
        remedy = (
            "Train convolutions in one layout: model.to(memory_format=torch.channels_last), and "
            "the batch likewise. Look for a layer that falls back to NCHW."
        )
    else:
        remedy = (
            "Use the layout that the next operation reads: fewer permute and transpose between "
            "operations, and reshape at the end. Fused attention and einsum keep the strides."
        )
    return finding(
        costs.places_of_work(work),
        title="Gradients are copied into another memory layout",
        seen=(
            f"{say.per_step(int(work.sum()), 'copy', 'copies')}: {say.ms(cost)} of the backward in "
            "which nothing is computed."
        ),
        remedy=remedy,
        link="https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        nodes=costs.top_nodes(evidence.spans_of_work(work)),
        operators=costs.top_operators(
            evidence.names_of(copying[work]), np.maximum(costs.recorded_work_ns[work], 1)
        ),
        kernels=costs.top_kernels(work),
    )
