"""A batch that is too small for the device, which is idle often and mostly empty when it runs."""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.launches import Tier
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import compiled, launching
from backspot.analysis.findings.registry import finding, rule
from backspot.formatting import percent
from backspot.results.findings import Finding

__all__ = ["find"]

_FULL = 1000  # Events.size of a kernel with one thread block for each multiprocessor
_USED = 0.2
"""A device is mostly unused below this share, over time and multiprocessors."""
_OTHERWISE = {
    False: "use CUDA graphs or torch.compile, which save launches.",
    True: "compile with mode='reduce-overhead', which replays CUDA graphs.",
}
"""What saves launches, by whether the backward is compiled already."""


@rule("small-batch", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find a launch-bound step with kernels that leave most multiprocessors without a block."""
    costs = evidence.costs
    size = evidence.events.size[evidence.work.event]
    known = (evidence.work.tier == Tier.COMPUTE) & (size >= 0)
    length = costs.device_ns[known]
    if not length.sum():
        return None
    used = float((np.minimum(size[known], _FULL) * length).sum() / length.sum() / _FULL)
    if used * costs.busy_ns > _USED * evidence.real_step_ns:
        return None
    mine = launching(evidence)
    launch_bound = costs.of_host(mine)
    if not launch_bound:
        return None
    is_compiled = 2 * costs.of_host(mine & compiled(evidence)) >= launch_bound
    # A larger batch does not load faster, so waiting for data is not counted.
    data = evidence.phase("data")
    waited = data.wall_ns - data.busy_ns if data else 0
    recorded = np.maximum(launch_bound, costs.step_ns - costs.busy_ns - waited)
    idle = np.maximum(0, recorded - (evidence.step_ns - evidence.real_step_ns))
    path, class_name = _root(evidence)
    busy = percent(costs.busy_ns / evidence.real_step_ns)
    return finding(
        costs.place(path, idle, evidence.report.steps, class_name),
        title="The batch is too small for the GPU",
        seen=(
            f"The GPU is busy for {busy} of the step, and "
            f"its kernels then have thread blocks for {percent(used)} of the multiprocessors."
        ),
        remedy=(
            "Raise the batch size until memory or the learning rate limits it: a larger batch "
            f"takes hardly more time here. If the batch can't grow, {_OTHERWISE[is_compiled]}"
        ),
        link="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )


def _root(evidence: Evidence) -> tuple[str, str]:
    """Return the path and the class of the outermost module that costs most."""
    rows = [row for row in evidence.report.modules if row.is_module and row.path == row.root]
    if not rows:
        return "(outside model)", ""
    root = max(rows, key=lambda row: row.total_wall_ns)
    return root.path, root.class_name
