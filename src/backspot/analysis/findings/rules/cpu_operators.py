"""Operators that compute on the CPU while the GPU has nothing to do."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence, Mask, once
from backspot.analysis.findings.registry import rule
from backspot.analysis.timeline import first_started, grouped, merged, numbered, pieces
from backspot.results.findings import Finding
from backspot.trace import Category
from backspot.trace.events import Ints
from backspot.trace.labels import parse_label

__all__ = ["find", "spans_with"]

_LONG = 200_000  # nanoseconds: no operator takes this long only to launch a kernel
_NOT_COMPUTE = ("autograd::", "DataLoader", "enumerate(", "Optimizer", "ProfilerStep")


@rule("cpu-operators")
def find(evidence: Evidence) -> Finding | None:
    """Find long operators without any call to the driver, in the model's forward or backward."""
    if not evidence.report.has_gpu:
        return None
    index = _computing(evidence)
    span = evidence.spans.of(evidence.events, index)
    index, span = index[span >= 0], span[span >= 0]
    cost = _while_idle(evidence, index)
    kept = (cost > 0) & _comes_again(evidence, index, span)
    index, span, cost = index[kept], span[kept], cost[kept]
    if not len(index):
        return None
    names = evidence.top_operators(index, cost)
    return evidence.finding(
        title="Operators of a GPU model run on the CPU",
        seen=(
            f"{evidence.per_step(len(index), 'operator')} ({', '.join(names)}) on the host: "
            f"{evidence.ms(int(cost.sum()))} in which the GPU has nothing to do."
        ),
        remedy=(
            "Create the tensors on the device (torch.arange(…, device=x.device)), register "
            "constants as buffers so that .to() moves them, and keep NumPy out of forward and "
            "backward."
        ),
        link="https://docs.pytorch.org/docs/stable/notes/cuda.html#best-practices",
        places=evidence.places(evidence.ownership.owner[span], cost),
        operators=names,
    )


def _comes_again(evidence: Evidence, index: Ints, span: Ints) -> Mask:
    """Whether each of these operators is as long in every step, in the same module.

    One that is long once was interrupted: another program had the processor.
    """
    owner = evidence.ownership.owner[span]
    _, which = numbered(owner * len(evidence.events.names) + evidence.events.name[index])
    often: Mask = np.bincount(which)[which] >= evidence.report.steps
    return often


def spans_with(evidence: Evidence) -> Mask:
    """Whether each span contains such an operator."""
    return evidence.spans_around(_computing(evidence))


@once
def _computing(evidence: Evidence) -> Ints:
    """The outermost operators that take long and never call the driver; indices of events."""
    events = evidence.events
    index = np.flatnonzero((events.duration >= _LONG) & (events.category == Category.OPERATOR))
    labels = np.array([parse_label(name) is not None for name in events.names], bool)
    skipped = labels | events.name_mask(*_NOT_COMPUTE)
    index = index[~skipped[events.name[index]]]
    calls = events.of(Category.RUNTIME)
    if not len(calls):  # not recorded: any operator may have launched something
        return calls
    kept = []
    called = dict(grouped(events.thread[calls]))
    for thread, those in grouped(events.thread[index]):
        mine = index[those]
        times = np.sort(events.start[calls[called.get(thread, those[:0])]])
        quiet = np.searchsorted(times, events.start[mine]) == np.searchsorted(
            times, events.end[mine]
        )
        mine = mine[quiet]
        line = first_started(events.start[mine], events.end[mine], mine)
        kept.append(merged(line.values[line.values >= 0]))
    return np.concatenate([np.empty(0, np.int64), *kept])


def _while_idle(evidence: Evidence, index: Ints) -> Ints:
    """How long each of these events ran while the host held the clock."""
    events = evidence.events
    held = np.zeros(len(index), np.int64)
    order = np.arange(len(index))
    running = first_started(events.start[index], events.end[index], order)
    number, free, length = pieces(evidence.idle, running)
    np.add.at(held, number[free >= 0], length[free >= 0])
    return held
