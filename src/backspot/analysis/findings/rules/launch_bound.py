"""A backward in which the GPU waits for the host to launch the next kernel."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.observations import compiled, graph_breaks, launching
from backspot.analysis.findings.registry import finding, rule
from backspot.formatting import percent
from backspot.results.findings import Finding

__all__ = ["find"]

_LAUNCHED = (
    "Launch fewer, larger kernels: torch.compile(model) (mode='reduce-overhead' replays CUDA "
    "graphs), a larger batch, or one wide layer in place of many narrow ones."
)
_REPLAYED = (
    "The step replays CUDA graphs already, and the GPU waits between them. Use fewer, longer "
    "graphs (no graph breaks, one torch.compile around the whole model), or a larger batch."
)
_COMPILED = (
    "The backward is compiled already, and launches its kernels one by one. "
    "mode='reduce-overhead' replays CUDA graphs; fewer graph breaks and a larger batch help, too."
)


@rule("launch-bound", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find the nodes that the host executes while the GPU is idle.

    Time in which the host waits or computes by itself belongs to other rules.
    """
    costs, say = evidence.costs, evidence.wording
    mine = launching(evidence)
    cost = costs.of_host(mine)
    if not cost:
        return None
    kernels = int(evidence.backward.sum())
    length = int(costs.device_ns[evidence.backward].sum())
    replaying = mine & evidence.spans_of_work(evidence.work.replays & evidence.backward)
    replayed = 2 * costs.of_host(replaying) >= cost
    is_compiled = 2 * costs.of_host(mine & compiled(evidence)) >= cost
    remedy = _REPLAYED if replayed else _COMPILED if is_compiled else _LAUNCHED
    if (replayed or is_compiled) and (breaks := graph_breaks(evidence)):
        remedy += f" The graphs break at {', '.join(breaks)}."
    return finding(
        costs.places_of_host(mine),
        title="The GPU waits for the host to launch kernels",
        seen=(
            f"For {percent(cost / evidence.report.wall_ns)} of the backward, {say.ms(cost)}, the "
            "GPU has nothing queued while the host executes nodes. The backward has "
            f"{say.per_step(kernels, 'kernel')} of {length / max(kernels, 1) / 1e3:.1f} µs on "
            f"average. {_without_profiler(evidence)}"
        ),
        remedy=remedy,
        link="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
        nodes=costs.top_nodes(mine),
    )


def _without_profiler(evidence: Evidence) -> str:
    """Return what is known about the step without the profiler, which slows the host."""
    real = evidence.report.unprofiled_step_ns
    if not real:
        return "(The profiler slows the host: without it the share is lower.)"
    busy = percent(evidence.costs.busy_ns / real)
    return f"Without the profiler, the GPU is busy for {busy} of the step."
