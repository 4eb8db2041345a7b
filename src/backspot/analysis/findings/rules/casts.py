"""Gradients that are cast from one dtype to another on their way back."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding

__all__ = ["find"]

_LEAST = 0.03
"""Autocast casts between its dtypes as a matter of course; below this that is all it is."""


@rule("casts")
def find(evidence: Evidence) -> Finding | None:
    """Find casts of activations' gradients; those of parameters belong to autocast itself."""
    nodes = evidence.nodes_named(lambda name: name.startswith("ToCopyBackward"))
    accumulate = evidence.accumulates
    fed = evidence.ownership.join.feeder[accumulate]
    of_parameters = np.zeros(len(nodes), bool)
    of_parameters[fed[fed >= 0]] = True
    # A loss in fp32 is as it should be.
    nodes &= ~of_parameters & ~evidence.of_loss
    # Only what a cast launches: copies between devices are another matter.
    work = evidence.work_of(nodes) & ~evidence.work_named(lambda name: name.startswith("Memcpy"))
    nodes &= evidence.spans_of_work(work)
    if int(evidence.span_ns[nodes].sum()) < _LEAST * evidence.step_ns:
        return None
    return evidence.finding(
        title="Gradients are cast between dtypes",
        seen=(
            f"{evidence.per_step(int(nodes.sum()), 'cast')} of activations' gradients, "
            f"{evidence.ms(int(evidence.span_ns[nodes].sum()))}; each has its like in the forward."
        ),
        remedy=(
            "Take out .float() and .to(dtype) around single operations, and keep what autocast "
            "would run in fp32 together; or hold the whole module in bf16."
        ),
        link="https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference",
        places=evidence.places_of_spans(nodes),
        nodes=evidence.top_nodes(nodes),
        kernels=evidence.top_kernels(work),
    )
