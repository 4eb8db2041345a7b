"""Operators that compute on the CPU while the GPU is idle."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import host_operators
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import first_started, numbered, pieces
from backspot.results.findings import Finding
from backspot.trace.events import Ints, Mask

__all__ = ["find"]


@rule("cpu-operators", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find long operators that never call the driver, in the model's forward or backward."""
    costs, say = evidence.costs, evidence.wording
    index = host_operators(evidence)
    span = evidence.spans.of(evidence.events, index)
    index, span = index[span >= 0], span[span >= 0]
    cost = _while_idle(evidence, index)
    kept = (cost > 0) & _in_every_step(evidence, index, span)
    index, span, cost = index[kept], span[kept], cost[kept]
    if not len(index):
        return None
    operators = costs.top_operators(evidence.names_of(index), cost)
    together = evidence.typical.value(costs.times_by_step(evidence.events.start[index], cost))
    return finding(
        costs.places_at(evidence.ownership.owner[span], evidence.events.start[index], cost),
        title="Operators of a GPU model run on the CPU",
        seen=(
            f"{say.per_step(len(index), 'operator')} on the CPU ({', '.join(operators)}), "
            f"{say.ms(together)} in which the GPU is idle."
        ),
        remedy=(
            "Create tensors on the device (torch.arange(…, device=x.device)), register constants "
            "as buffers so that .to() moves them, and keep NumPy out of forward and backward."
        ),
        link="https://docs.pytorch.org/docs/stable/notes/cuda.html#best-practices",
        operators=operators,
    )


def _in_every_step(evidence: Evidence, index: Ints, span: Ints) -> Mask:
    """Whether each operator takes long in every step, in the same module.

    An operator that takes long only once was interrupted: another process had the CPU.
    """
    owner = evidence.ownership.owner[span]
    _, which = numbered(owner * len(evidence.events.names) + evidence.events.name[index])
    often: Mask = np.bincount(which)[which] >= evidence.report.steps
    return often


def _while_idle(evidence: Evidence, index: Ints) -> Ints:
    """Return how long each of these events runs while no device has work."""
    events = evidence.events
    held = np.zeros(len(index), np.int64)
    order = np.arange(len(index))
    running = first_started(events.start[index], events.end[index], order)
    number, free, length = pieces(evidence.costs.idle, running)
    np.add.at(held, number[free >= 0], length[free >= 0])
    return held
