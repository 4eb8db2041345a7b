"""Gradients that are set to zero, and added to, where they could be left out."""

from __future__ import annotations

import re

import numpy as np

from backspot.analysis.findings.evidence import Evidence, Mask
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding, Place
from backspot.trace import Category

__all__ = ["fills", "find"]

_ZEROES = re.compile(r"FillFunctor|Memset|zero|Zero|multi_tensor_apply")


@rule("zero-grad-fill")
def find(evidence: Evidence) -> Finding | None:
    """Find ``zero_grad`` that fills; where a step has one pass, its sums belong to it too."""
    work = fills(evidence)
    if not work.any():
        return None
    cost = int(evidence.work_ns[work].sum())
    adds = np.zeros(len(work), bool)
    if len(evidence.report.passes) <= evidence.report.steps:
        nodes = evidence.accumulates
        # What hooks of these nodes launch, to exchange gradients, is no addition.
        adds = evidence.work_of(nodes) & (evidence.launched_in("aten::add_", "aten::add") >= 0)
    added = int(evidence.work_ns[adds].sum())
    then = f" Backward then adds to the zeros for {evidence.ms(added)}." if added else ""
    return evidence.finding(
        title="zero_grad fills gradients with zeros",
        seen=(
            f"{evidence.per_step(int(work.sum()), 'kernel')} of zero_grad, "
            f"{evidence.ms(cost)}.{then}"
        ),
        remedy=(
            "zero_grad(set_to_none=True), the default since PyTorch 2.0: backward then hands over "
            "its gradients without filling or adding."
        ),
        link="https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
        places=(Place("(optimizer)", "", int(work.sum()), cost + added),),
        kernels=evidence.top_kernels(work | adds),
    )


def fills(evidence: Evidence) -> Mask:
    """Whether each piece of device work sets gradients to zero."""
    within = evidence.launched_in("Optimizer.zero_grad#*", category=Category.ANNOTATION) >= 0
    # model.zero_grad() bears no mark of its own.
    within |= evidence.launched_in("aten::_foreach_zero_") >= 0
    # New tensors are zeroed too, by the same operator within another.
    outer = evidence.launched_in("aten::*")
    zeroes = np.append(evidence.events.name_mask("aten::zero_")[evidence.events.name], False)
    alone = zeroes[outer] & (evidence.work.span < 0)
    within |= alone & ~evidence.work.optimizer.astype(bool)
    return within & evidence.work_named(lambda name: _ZEROES.search(name) is not None)
