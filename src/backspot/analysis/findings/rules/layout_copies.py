"""Copies in backward that only bring a tensor into another memory layout."""

from __future__ import annotations

import re

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.analysis.findings.rules import duplicate_indices
from backspot.results.findings import Finding

__all__ = ["find"]

_LEAST = 0.055
"""The gradients of queries, keys and values are brought together by a copy in every attention:
below this copies are no one's fault."""
_LEAST_OF_CONVOLUTIONS = 0.03
_CONVERTS = re.compile(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|convertTensor_kernel")


@rule("layout-copies")
def find(evidence: Evidence) -> Finding | None:
    """Find ``contiguous`` and ``clone`` in nodes, and convolutions that convert their layout."""
    copying = evidence.launched_in("aten::contiguous", "aten::clone")
    accumulate = evidence.accumulates
    converts = evidence.work_named(lambda name: _CONVERTS.search(name) is not None)
    # What indexing does to its indices is indexing's own matter.
    others = accumulate | duplicate_indices.sorting_nodes(evidence)
    work = ((copying >= 0) | converts) & evidence.backward & ~evidence.work_of(others)
    converts |= evidence.work_of(evidence.nodes_named(lambda name: "Convolution" in name))
    converted = int(evidence.work_ns[work & converts].sum())
    if converted < _LEAST_OF_CONVOLUTIONS * evidence.step_ns:
        if int(evidence.work_ns[work].sum()) < _LEAST * evidence.step_ns:
            return None
    elif int(evidence.work_ns[work].sum()) < _LEAST * evidence.step_ns:
        work &= converts
    cost = evidence.work_ns[work]
    if 2 * converted > int(cost.sum()):
        remedy = (
            "Train convolutions in one layout: model.to(memory_format=torch.channels_last), and "
            "the batch likewise; look for a layer that falls back to NCHW."
        )
    else:
        remedy = (
            "Choose the layout in which the next operation reads: fewer permute and transpose "
            "between operations, reshape at the end; an einsum or a fused attention keeps strides."
        )
    return evidence.finding(
        title="Gradients are copied into another memory layout",
        seen=(
            f"{evidence.per_step(int(work.sum()), 'copy', 'copies')}: "
            f"{evidence.ms(int(cost.sum()))} of the backward in which nothing is computed."
        ),
        remedy=remedy,
        link="https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        places=evidence.places_of_work(work),
        nodes=evidence.top_nodes(evidence.spans_of_work(work)),
        operators=evidence.top_operators(copying[work], np.maximum(cost, 1)),
        kernels=evidence.top_kernels(work),
    )
