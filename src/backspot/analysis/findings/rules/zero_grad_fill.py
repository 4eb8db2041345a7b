"""Gradients that are set to zero and then added to, where they could be left out."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import accumulating, fills
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding

__all__ = ["find"]


@rule("zero-grad-fill", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find ``zero_grad`` that fills; where a step has one pass, adding to the zeros counts too."""
    costs, say = evidence.costs, evidence.wording
    work = fills(evidence)
    if not work.any():
        return None
    cost = costs.of_work(work)
    adds = np.zeros(len(work), bool)
    if len(evidence.report.passes) <= evidence.report.steps:
        # Hooks of these nodes launch the exchange of gradients, which is not an addition.
        adds = evidence.work_of(accumulating(evidence))
        adds &= evidence.launched_in("aten::add_", "aten::add") >= 0
    added = costs.of_work(adds)
    by_step = costs.of_work_by_step(work) + costs.of_work_by_step(adds)
    then = f" Backward then adds to the zeros for {say.ms(added)}." if added else ""
    return finding(
        costs.place("(optimizer)", by_step, int(work.sum())),
        title="zero_grad fills gradients with zeros",
        seen=f"{say.per_step(int(work.sum()), 'kernel')} of zero_grad, {say.ms(cost)}.{then}",
        remedy=(
            "Use zero_grad(set_to_none=True), the default since PyTorch 2.0. Backward then stores "
            "its gradients without filling or adding."
        ),
        link="https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
        kernels=costs.top_kernels(work | adds),
    )
