"""Calls of a trained model that no backward follows: evaluation in each step, for example."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import NOTHING, grouped, take
from backspot.formatting import counted
from backspot.results.findings import Finding
from backspot.trace.events import Ints, Mask

__all__ = ["find"]

_LEAST = 0.1
"""Below this share of the step, a look at the model's output is as usual."""


@rule("forward-only")
def find(evidence: Evidence) -> Finding | None:
    """Find outermost calls without a node in the backward, of modules that have others with some.

    A teacher or a frozen encoder is another module, and a model that is only evaluated has no
    calls with a backward.
    """
    spans, costs, say = evidence.spans, evidence.costs, evidence.wording
    outermost = np.flatnonzero((spans.module >= 0) & (spans.parent < 0) & ~evidence.in_pass)
    followed = _followed(evidence, outermost)
    trained = np.isin(spans.module[outermost], spans.module[outermost[followed]])
    alone = outermost[trained & ~followed]
    inside = np.zeros(len(spans.start), bool)
    inside[alone] = True
    inside = inside[_roots(spans.parent)] & ~evidence.in_pass
    by_step = costs.of_spans_by_step(inside)
    if not costs.holds_in_most_steps(by_step, _LEAST):
        return None
    calls = counted(int(trained.sum()), "call")
    return finding(
        costs.places_of_spans(inside),
        title="The model runs without a backward",
        seen=(
            f"No backward follows {len(alone):,} of {calls} of the model in "
            f"{counted(evidence.report.steps, 'step')}: {say.ms(costs.of_spans(inside))} of each "
            "step."
        ),
        remedy=(
            "If these calls evaluate the model, evaluate every few steps or epochs, not in each. "
            "Where the training needs their outputs, run them under torch.no_grad()."
        ),
        link="https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation",
    )


def _followed(evidence: Evidence, calls: Ints) -> Mask:
    """Whether an operator in each of these calls made a node that the backward executes."""
    spans, events, join = evidence.spans, evidence.events, evidence.ownership.join
    made = np.unique(join.operator[(join.operator >= 0) & evidence.in_pass])
    of_thread = dict(grouped(events.thread, made))
    found = np.zeros(len(calls), bool)
    for thread, mine in grouped(spans.thread[calls]):
        times = np.sort(events.start[of_thread.get(thread, made[:0])])
        first = np.searchsorted(times, spans.start[calls[mine]])
        found[mine] = first < np.searchsorted(times, spans.end[calls[mine]])
    return found


def _roots(parent: Ints) -> Ints:
    """Return the outermost ancestor of each span."""
    root = np.arange(len(parent))
    while (above := take(parent, root, NOTHING)).max(initial=NOTHING) >= 0:
        root = np.where(above >= 0, above, root)
    return root
