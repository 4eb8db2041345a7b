"""An optimizer that updates its parameters one by one."""

from __future__ import annotations

import re

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.analysis.timeline import first_started, merged, pieces
from backspot.results.findings import Finding, Place
from backspot.trace import Category
from backspot.trace.events import Ints

__all__ = ["find"]

_STEP = "Optimizer.step#"
_TOGETHER = re.compile(r"multi_tensor_apply|[Ff]used|triton_|_foreach")
_MANY = 50  # kernels a step
_SMALL = 30_000  # nanoseconds


@rule("optimizer-kernels")
def find(evidence: Evidence) -> Finding | None:
    """Find optimizer steps that launch many small kernels."""
    inside = evidence.launched_in(_STEP + "*", category=Category.ANNOTATION)
    marks = merged(inside[inside >= 0])
    start, end = evidence.events.start[marks], evidence.events.end[marks]
    begin = evidence.ownership.passes.after(start, end)
    begins = np.append(begin, 0)[np.searchsorted(marks, inside)]
    kernels = (inside >= 0) & (evidence.work.tier == 0) & (evidence.work.launch >= begins)
    single = kernels & ~evidence.work_named(lambda name: _TOGETHER.search(name) is not None)
    number = int(single.sum())
    if number < _MANY * evidence.report.steps or 2 * number < int(kernels.sum()):
        return None
    length = (evidence.work.end - evidence.work.start)[single]
    if float(np.median(length)) > _SMALL:
        return None
    used = np.isin(marks, inside[single])
    cost = int(evidence.work_ns[single].sum()) + _host_time(evidence, begin[used], end[used])
    events, marks = evidence.events, marks[used]
    names = sorted({events.names[n].removeprefix(_STEP).split(".")[0] for n in events.name[marks]})
    return evidence.finding(
        title="The optimizer updates parameters one by one",
        seen=(
            f"{' and '.join(names)}: {evidence.per_step(number, 'kernel')} of "
            f"{float(np.median(length)) / 1e3:.1f} µs (median), {evidence.ms(cost)} in all, "
            f"{evidence.share(cost)} of the step."
        ),
        remedy=(
            "foreach=True updates many parameters in one kernel, fused=True does the whole step "
            "in a few; both are arguments of PyTorch's optimizers."
        ),
        link="https://docs.pytorch.org/docs/stable/optim.html",
        places=(Place("(optimizer)", "", number, cost),),
        kernels=evidence.top_kernels(single),
    )


def _host_time(evidence: Evidence, begin: Ints, end: Ints) -> int:
    """The time between these in which no device has work, running or queued."""
    within = first_started(begin, end, np.arange(len(begin)))
    _, free, length = pieces(evidence.idle, within)
    return int(length[free >= 0].sum())
