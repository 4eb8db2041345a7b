"""A step that waits until its next batch is ready."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.costs import LEAST_SHARE
from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import Category, names

__all__ = ["find"]

_WORKERS = (
    "Use DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…), and move decoding "
    "and augmentation into the workers."
)
_WORKERS_AND_GPU = (
    "Use DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…, pin_memory=True), "
    "and move decoding and augmentation into the workers or onto the GPU."
)
_WHOLE = (
    "A worker process costs more than this wait. If the data is in memory, index it by whole "
    "batches: DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), size, "
    "drop_last=False)), for which data[indices] returns a batch."
)
_LOOK = (
    "Find out what the program does before it copies the batch. If it loads data, prepare the "
    "next batch in other processes while the GPU computes."
)
_LEAST = 500_000
_LEAST_FOR_WORKERS = 5_000_000
"""Nanoseconds of a wait. Handing a batch from one process to another takes a few milliseconds of
their processors (measured: 0.1 to 1 ms of loading became 3.5 to 5.5 ms with a worker)."""


@rule("waiting-for-data")
def find(evidence: Evidence) -> Finding | None:
    """Find the data phase of the step.

    Without the marks of a loader, the phase is time of the host in which nothing is recorded. On a
    GPU, a copy follows, which may be that of a batch. Without a GPU, nothing shows what the time is
    spent on. With several workers, the step may wait for one of them in every second step, say, and
    find the batches of the others ready.
    """
    phase = evidence.phase("data")
    if phase is None:
        return None
    fetches = evidence.events.names_where(names.is_fetch_mark)
    marked = len(evidence.events.chosen(fetches, Category.ANNOTATION)) > 0
    if not marked and not evidence.report.has_gpu:
        return None
    say, costs = evidence.wording, evidence.costs
    waits = np.array(phase.wall_ns_by_step)
    waits[waits < LEAST_SHARE * costs.step_ns] = 0
    in_turn = ""
    if marked and 2 * (often := int(np.count_nonzero(waits))) <= len(waits):
        # Several workers deliver in turn: one wait is for the batches of several steps.
        waits[:] = evidence.typical.value(waits)
        in_turn = f" It is a mean: the step waits {say.in_steps(often)}."
    spent = evidence.typical.value(waits)
    if marked and spent < _LEAST:
        return None
    time = f"{say.ms(spent)} of each step, {say.share(spent)},"
    if marked:
        title = "The step waits for its data"
        seen = (
            f"{time} pass before the next batch is ready. The model does not run in this time."
            f"{in_turn}"
        )
        workers = _WORKERS_AND_GPU if evidence.device == "cuda" else _WORKERS
        has_workers = len(evidence.events.named(Category.ANNOTATION, names.NEXT_BATCH_OF_WORKERS))
        remedy = workers if has_workers or spent >= _LEAST_FOR_WORKERS else _WHOLE
    else:
        title = "The GPU is idle before the batch is copied"
        seen = (
            f"{time} pass before the batch is copied. The trace has nothing of what the host does "
            "in this time. It may load data."
        )
        remedy = _LOOK
    return finding(
        costs.place("(data)", waits, evidence.report.steps),
        title=title,
        seen=seen,
        remedy=remedy,
        link="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
    )
