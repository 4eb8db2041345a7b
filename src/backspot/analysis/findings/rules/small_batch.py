"""A batch too small for the device: it is idle much of the time, and mostly empty when it works."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.analysis.findings.rules import launch_bound
from backspot.formatting import percent
from backspot.results.findings import Finding, Place

__all__ = ["find"]

_FULL = 1000  # Events.size: one block for each multiprocessor
_USED = 0.2
"""With less than this share of it at work (time and multiprocessors), a device is mostly idle."""


@rule("small-batch")
def find(evidence: Evidence) -> Finding | None:
    """Find a launch-bound step whose kernels leave most multiprocessors without a block."""
    bound = launch_bound.find(evidence)
    if bound is None:
        return None
    work = evidence.work
    size = evidence.events.size[work.event]
    known = (work.tier == 0) & (size >= 0)
    length = (work.end - work.start)[known]
    if not length.sum():
        return None
    used = float((np.minimum(size[known], _FULL) * length).sum() / length.sum() / _FULL)
    if used * evidence.busy_ns > _USED * evidence.step_ns:
        return None
    # A larger batch takes no less time to come.
    data = evidence.phase("data")
    waited = data.wall_ns - data.busy_ns if data else 0
    idle = max(bound.wall_ns, evidence.step_ns - evidence.busy_ns - waited)
    path, class_name = _root(evidence)
    return evidence.finding(
        title="The batch is too small for the GPU",
        seen=(
            f"The GPU runs something in {percent(evidence.busy_ns / evidence.step_ns)} of the "
            f"step, and its kernels then have blocks for {percent(used)} of its multiprocessors."
        ),
        remedy=(
            "A larger batch costs hardly more time here: raise it until memory or the learning "
            "rate sets the limit. Where it can't grow, CUDA graphs or torch.compile cut the "
            "launches."
        ),
        link="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        places=(Place(path, class_name, evidence.report.steps, idle),),
    )


def _root(evidence: Evidence) -> tuple[str, str]:
    """The outermost module that costs most."""
    rows = [row for row in evidence.report.modules if row.is_module and row.path == row.root]
    if not rows:
        return "(outside model)", ""
    root = max(rows, key=lambda row: row.total_wall_ns)
    return root.path, root.class_name
