"""An optimizer that updates its parameters one by one."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.launches import Tier
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import first_started, merged, pieces
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Ints

__all__ = ["find"]

_MANY = 50  # kernels per step
_SMALL = 30_000  # nanoseconds


@rule("optimizer-kernels", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find optimizer steps that launch many small kernels."""
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
    titles = {events.names[name] for name in events.name[marks[used]]}
    optimizers = sorted(
        {title.removeprefix(names.OPTIMIZER_STEP).split(".")[0] for title in titles}
    )
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
        link="https://docs.pytorch.org/docs/stable/optim.html",
        kernels=costs.top_kernels(single),
    )


def _idle_by_step(evidence: Evidence, begin: Ints, end: Ints) -> Ints:
    """Return the time inside these intervals in which no device has work, by step."""
    within = first_started(begin, end, np.arange(len(begin)))
    number, free, length = pieces(evidence.costs.idle, within)
    return evidence.costs.times_by_step(begin[number[free >= 0]], length[free >= 0])
