"""A backward in which the GPU waits for the host to launch the next kernel."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.analysis.findings.rules import cpu_operators
from backspot.formatting import percent
from backspot.results.findings import Finding

__all__ = ["find"]

_LEAST = 0.15
"""The share of the backward in which the GPU stands still, from which on it is called so."""

_LAUNCHED = (
    "Fewer, larger kernels: torch.compile(model) (mode='reduce-overhead' replays CUDA graphs), a "
    "larger batch, or one wide layer in place of many narrow ones."
)
_REPLAYED = (
    "CUDA graphs are replayed already, and the GPU waits for the host's way to them: fewer, longer "
    "graphs (no graph breaks, one torch.compile around all), or a larger batch."
)


@rule("launch-bound")
def find(evidence: Evidence) -> Finding | None:
    """Find the nodes that the host executes while the GPU has nothing to do.

    Time in which the host waits, or computes by itself, has other reasons and other rules.
    """
    waiting = np.zeros(len(evidence.spans.start), bool)
    waiting[evidence.ownership.waits.span] = True
    waiting |= cpu_operators.spans_with(evidence)
    mine = evidence.in_pass & ~waiting
    cost = int(evidence.host_ns[mine].sum())
    wall = evidence.report.wall_ns
    if not evidence.report.has_gpu or not wall or not cost or cost < _LEAST * wall:
        return None
    kernels = int(evidence.backward.sum())
    length = int((evidence.work.end - evidence.work.start)[evidence.backward].sum())
    replaying = mine & evidence.spans_of_work(evidence.work.replays & evidence.backward)
    replayed = 2 * int(evidence.host_ns[replaying].sum()) >= cost
    owner, spent = evidence.ownership.owner[mine], evidence.host_ns[mine]
    return evidence.finding(
        title="The GPU waits for the host to launch kernels",
        seen=(
            f"In {percent(cost / wall)} of the backward, {evidence.ms(cost)}, "
            "the GPU has nothing queued while the host goes through nodes: "
            f"{evidence.per_step(kernels, 'kernel')} of {length / max(kernels, 1) / 1e3:.1f} µs on "
            "average. (A profiler slows the host: without it this is less.)"
        ),
        remedy=_REPLAYED if replayed else _LAUNCHED,
        link="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
        places=evidence.places(owner[spent > 0], spent[spent > 0]),
        nodes=evidence.top_nodes(mine),
    )
