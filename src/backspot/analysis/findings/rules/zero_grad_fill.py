"""Gradients that are set to zero and then added to, where they could be left out."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import accumulating, fills, zeroing
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding

__all__ = ["find"]


_TITLE = "zero_grad fills gradients with zeros"
_REMEDY = (
    "Use zero_grad(set_to_none=True), the default since PyTorch 2.0. Backward then stores its "
    "gradients without filling or adding."
)
_LINK = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html"


@rule("zero-grad-fill", devices=("cpu", "cuda"))
def find(evidence: Evidence) -> Finding | None:
    """Find ``zero_grad`` that fills; where a step has one pass, adding to the zeros counts too."""
    return _on_cpu(evidence) if evidence.device == "cpu" else _on_gpu(evidence)


def _on_cpu(evidence: Evidence) -> Finding | None:
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    of_step = evidence.typical.value
    calls = zeroing(evidence)
    if not len(calls):
        return None
    filled = costs.times_by_step(events.start[calls], events.duration[calls])
    added = np.zeros_like(filled)
    if _one_pass(evidence):
        added = costs.of_spans_by_step(accumulating(evidence))
    return finding(
        costs.place("(optimizer)", filled + added * (filled > 0), len(calls)),
        title=_TITLE,
        seen=(
            f"{say.per_step(len(calls), 'call')} of zero_grad, {say.ms(of_step(filled))}."
            f"{_then(evidence, of_step(added))}"
        ),
        remedy=_REMEDY,
        link=_LINK,
    )


def _on_gpu(evidence: Evidence) -> Finding | None:
    costs, say = evidence.costs, evidence.wording
    work = fills(evidence)
    if not work.any():
        return None
    cost = costs.of_work(work)
    adds = np.zeros(len(work), bool)
    if _one_pass(evidence):
        # Hooks of these nodes launch the exchange of gradients, which is not an addition.
        adds = evidence.work_of(accumulating(evidence))
        adds &= evidence.launched_in("aten::add_", "aten::add") >= 0
    by_step = costs.of_work_by_step(work) + costs.of_work_by_step(adds)
    return finding(
        costs.place("(optimizer)", by_step, int(work.sum())),
        title=_TITLE,
        seen=(
            f"{say.per_step(int(work.sum()), 'kernel')} of zero_grad, {say.ms(cost)}."
            f"{_then(evidence, costs.of_work(adds))}"
        ),
        remedy=_REMEDY,
        link=_LINK,
        kernels=costs.top_kernels(work | adds),
    )


def _one_pass(evidence: Evidence) -> bool:
    """Whether no gradients of several passes are added up."""
    return len(evidence.report.passes) <= evidence.report.steps


def _then(evidence: Evidence, added: int) -> str:
    """Return a sentence about the additions to the zeros."""
    if not added:
        return ""
    return f" Backward then adds to the zeros for {evidence.wording.ms(added)}."
