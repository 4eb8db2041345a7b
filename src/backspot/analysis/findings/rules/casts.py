"""Gradients that are cast from one dtype to another on their way back."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import accumulating
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import names
from backspot.trace.events import Mask

__all__ = ["find"]

_LEAST = 0.03
"""Autocast always casts a little; below this share of the step the rule finds nothing."""

_REMEDY = (
    "Remove .float() and .to(dtype) around single operations, and put operations that autocast "
    "runs in fp32 next to each other; or keep the whole module in bf16."
)
_REMEDY_ON_CPU = (
    "Remove .float(), .double() and .to(dtype) around single operations, and keep the module in "
    "one dtype."
)


@rule("casts", devices=("cpu", "cuda"))
def find(evidence: Evidence) -> Finding | None:
    """Find casts of the gradients of activations; autocast casts those of parameters."""
    costs, say = evidence.costs, evidence.wording
    nodes = evidence.nodes_named(lambda name: name.startswith("ToCopyBackward"))
    of_parameters = evidence.spans_with(evidence.ownership.join.feeder[accumulating(evidence)])
    # A loss belongs in fp32.
    nodes &= ~of_parameters & ~_of_loss(evidence)
    # The same nodes also copy between devices, which is not a cast.
    work = evidence.work_of(nodes)
    work &= ~evidence.work_named(lambda name: name.startswith(names.MEMCPY))
    if evidence.report.has_gpu:
        nodes &= evidence.spans_of_work(work)
    cost = costs.of_spans(nodes)
    if not costs.holds_in_most_steps(costs.of_spans_by_step(nodes), _LEAST):
        return None
    return finding(
        costs.places_of_spans(nodes),
        title="Gradients are cast between dtypes",
        seen=(
            f"{say.per_step(int(nodes.sum()), 'cast')} of the gradients of activations, "
            f"{say.ms(cost)}. Each of them reverses a cast in the forward."
        ),
        remedy=_REMEDY if evidence.device == "cuda" else _REMEDY_ON_CPU,
        link="https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference",
        nodes=costs.top_nodes(nodes),
        kernels=costs.top_kernels(work),
    )


def _of_loss(evidence: Evidence) -> Mask:
    """Whether each span belongs to no module, or to a loss."""
    ownership = evidence.ownership
    losses = ownership.owners.mask(lambda module: module.class_name.endswith("Loss"), special=True)
    of_loss: Mask = losses[ownership.owner]
    return of_loss
