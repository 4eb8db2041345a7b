"""Parameters of FSDP2 that are gathered when they are needed already."""

from __future__ import annotations

import numpy as np

from backspot.formatting import counted, duration, labelled, visible
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import rule
from backspot.results.job import JobFinding

__all__ = ["find"]


@rule("late-gather")
def find(evidence: Evidence) -> list[JobFinding]:
    """Find gathers that nothing hides, although they could have begun earlier.

    A gather could have begun as soon as the one before it was done. The first one of a step needs
    the parameters that the optimizer has just changed.
    """
    gathers = evidence.transfers("parameters")
    late = np.minimum(gathers.cost, gathers.idle_before)
    cost = gathers.typical_ns(late)
    if cost < evidence.worth_ns:
        return []
    by_module: dict[str, int] = {}
    for call, time in zip(gathers.calls, late.tolist(), strict=True):
        by_module[call.module] = by_module.get(call.module, 0) + time
    worst = max(sorted(by_module), key=lambda module: by_module[module])
    concerned = sum(time > 0 for time in by_module.values())
    classes = {module.path: module.class_name for module in evidence.table.modules}
    name = visible(labelled(worst or "the root", classes.get(worst, "")))
    return [
        JobFinding(
            rule="",
            kind="transfer",
            rank=None,
            path=worst,
            title=f"Parameters are gathered too late, most of all those of {name}",
            seen=(
                f"For {duration(cost)} of a step, parameters of {counted(concerned, 'module')} are "
                "gathered and nothing else runs, waits for other ranks left out; "
                f"{duration(by_module[worst] // evidence.steps)} of that for {name}. The gathers "
                "could have begun earlier."
            ),
            remedy=(
                "Prefetch them: set_modules_to_forward_prefetch and "
                "set_modules_to_backward_prefetch of the FSDP2 module that runs before."
            ),
            cost_ns=cost,
        )
    ]
