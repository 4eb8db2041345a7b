"""An optimizer that updates its parameters one by one, or by one operator after the other."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.launches import Tier
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import enclosing, first_started, merged, pieces
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Ints

__all__ = ["find"]

_MANY = 50  # kernels per step
_SMALL = 30_000  # nanoseconds
_FUSED_ON_CPU = ("Adam", "AdamW", "Adagrad")
"""Optimizers that a CPU runs faster with ``fused=True``; SGD has so few operators that it does not
matter. ``foreach=True`` runs the same operators one after the other there."""
_LEAST_ON_CPU = 0.05
_LINK = "https://docs.pytorch.org/docs/stable/optim.html"


@rule("optimizer-kernels", devices=("cpu", "cuda"))
def find(evidence: Evidence) -> Finding | None:
    """Find optimizer steps that launch many small kernels, or that are not fused on a CPU."""
    return _on_cpu(evidence) if evidence.device == "cpu" else _on_gpu(evidence)


def _on_cpu(evidence: Evidence) -> Finding | None:
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    marks = events.named(Category.ANNOTATION, names.OPTIMIZER_STEP)
    marks = marks[[_class_of(events.names[name]) in _FUSED_ON_CPU for name in events.name[marks]]]
    operators = events.named(Category.OPERATOR, names.ATEN)
    inside = enclosing(events, marks, events.thread[operators], events.start[operators])
    fused = operators[events.name_mask("aten::_fused_")[events.name[operators]]]
    marks = np.setdiff1d(marks, inside[np.isin(operators, fused)])
    begin = evidence.ownership.passes.after(events.start[marks], events.end[marks])
    by_step = costs.times_by_step(begin, events.end[marks] - begin)
    if not costs.holds_in_most_steps(by_step, _LEAST_ON_CPU):
        return None
    cost = costs.place("(optimizer)", by_step, len(marks))
    classes = sorted({_class_of(events.names[name]) for name in events.name[marks]})
    return finding(
        cost,
        title="The optimizer is not fused",
        seen=(
            f"{' and '.join(classes)}: {say.ms(cost.wall_ns)}, {say.share(cost.wall_ns)} of the "
            "step, for operators that read and write all parameters several times."
        ),
        remedy=(
            "Pass fused=True to the optimizer, which reads and writes each parameter once, and "
            "needs dense gradients. foreach=True does not help on a CPU."
        ),
        link=_LINK,
    )


def _class_of(mark: str) -> str:
    """Return the optimizer in ``Optimizer.step#AdamW.step``."""
    return mark.removeprefix(names.OPTIMIZER_STEP).partition(".")[0]


def _on_gpu(evidence: Evidence) -> Finding | None:
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    inside = evidence.launched_in(f"{names.OPTIMIZER_STEP}*", category=Category.ANNOTATION)
    marks = merged(inside[inside >= 0])
    start, end = events.start[marks], events.end[marks]
    # A step that is given a closure runs forward and backward first.
    begin = evidence.ownership.passes.after(start, end)
    begins = np.append(begin, 0)[np.searchsorted(marks, inside)]
    kernels = (inside >= 0) & (evidence.work.tier == Tier.COMPUTE)
    kernels &= evidence.work.launch >= begins
    single = kernels & ~evidence.work_named(names.is_fused_optimizer)
    number = int(single.sum())
    if number < _MANY * evidence.report.steps or 2 * number < int(kernels.sum()):
        return None
    median = float(np.median(costs.device_ns[single]))
    if median > _SMALL:
        return None
    used = np.isin(marks, inside[single])
    by_step = costs.of_work_by_step(single) + _idle_by_step(evidence, begin[used], end[used])
    cost = costs.place("(optimizer)", by_step, number)
    optimizers = sorted({_class_of(events.names[name]) for name in events.name[marks[used]]})
    return finding(
        cost,
        title="The optimizer updates parameters one by one",
        seen=(
            f"{' and '.join(optimizers)}: {say.per_step(number, 'kernel')} of "
            f"{median / 1e3:.1f} µs (median), {say.ms(cost.wall_ns)} in all, "
            f"{say.share(cost.wall_ns)} of the step."
        ),
        remedy=(
            "Pass foreach=True to the optimizer, which updates many parameters in one kernel, or "
            "fused=True, which runs the whole step in a few kernels."
        ),
        link=_LINK,
        kernels=costs.top_kernels(single),
    )


def _idle_by_step(evidence: Evidence, begin: Ints, end: Ints) -> Ints:
    """Return the time inside these intervals in which no device has work, by step."""
    within = first_started(begin, end, np.arange(len(begin)))
    number, free, length = pieces(evidence.costs.idle, within)
    return evidence.costs.times_by_step(begin[number[free >= 0]], length[free >= 0])
