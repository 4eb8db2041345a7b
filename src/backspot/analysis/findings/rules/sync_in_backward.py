"""The host waits for the GPU inside backward, and the GPU then waits for the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.analysis.timeline import FAR
from backspot.results.findings import Finding
from backspot.trace import Category, names
from backspot.trace.events import Ints

__all__ = ["find"]

_AHEAD = 50_000  # nanoseconds from launch to start with which the host is ahead of the GPU again
_CALLERS = (
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::unique*",
    "aten::_unique*",
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
)


@rule("sync-in-backward", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find waits inside nodes, and the time in which the GPU is idle because of them.

    After a wait the host has no kernels queued. Until it is ahead again, the GPU idles between
    kernels. Without the wait, the GPU would be spared at most the wait's own length of that.
    """
    costs, say, events = evidence.costs, evidence.wording, evidence.events
    waits = evidence.ownership.waits
    # Copies to the device are found by the rule pageable-copy.
    to_device = events.correlation[events.named(Category.MEMCPY, names.CUDA_TO_DEVICE)]
    copies = np.isin(events.correlation[waits.event], to_device)
    kept = evidence.in_pass[waits.span] & ~copies
    if not kept.any():
        return None
    begin, end, span = waits.start[kept], waits.end[kept], waits.span[kept]
    index = waits.event[kept]
    caller = evidence.around(events.thread[index], begin, *_CALLERS)
    waited = end - begin
    cost = np.minimum(_idle_until_ahead(evidence, begin, end), waited + _idle(evidence, begin, end))
    first = _first_of(caller)
    places = costs.places_at(evidence.ownership.owner[span], begin, cost, first)
    places = replace(places, removable=costs.removable(None, None, waits=index))
    number = int(first.sum())
    idle, long = (evidence.typical.value(costs.times_by_step(begin, ns)) for ns in (cost, waited))
    calls = costs.top_operators(events.name[index], waited)
    return finding(
        places,
        title="The host waits for the GPU inside backward",
        seen=(
            f"{say.per_step(number, 'wait')} in {', '.join(calls)}. The host waits for "
            f"{say.ms(long)}, and the GPU is then idle for "
            f"{say.ms(idle)}."
        ),
        remedy=(
            "Keep the value on the GPU: no .item(), .cpu(), nonzero() or boolean mask in the "
            "backward of a custom Function or in a hook. torch.where replaces a mask without a "
            "wait."
        ),
        link=(
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
            "#avoid-unnecessary-cpu-gpu-synchronization"
        ),
        nodes=costs.top_nodes(evidence.spans_with(span)),
        operators=costs.top_operators(evidence.names_of(caller), waited) + calls,
    )


def _first_of(caller: Ints) -> Ints:
    """Return 1 for the first wait of each calling operator and for waits without one, else 0."""
    _, first = np.unique(caller, return_index=True)
    counts = (caller < 0).astype(np.int64)
    counts[first] = 1
    return counts


def _idle(evidence: Evidence, begin: Ints, end: Ints) -> Ints:
    """Return how long in each interval no device has work, running or queued."""
    clock, count = evidence.clock.whole, len(evidence.spans.start)
    if not len(clock.edges):
        return np.zeros(len(begin), np.int64)
    free = (clock.values < count).astype(np.int64)
    until = np.append(0, np.cumsum(free[:-1] * np.diff(clock.edges)))

    def before(times: Ints) -> Ints:
        at = np.maximum(np.searchsorted(clock.edges, times, side="right") - 1, 0)
        inside = np.clip(times - clock.edges[at], 0, None)
        result: Ints = until[at] + free[at] * inside * (at < len(free) - 1)
        return result

    return before(end) - before(begin)


def _idle_until_ahead(evidence: Evidence, begin: Ints, end: Ints) -> Ints:
    """Return the idle time from each wait until the next one, or until the host is ahead again."""
    work, passes = evidence.work, evidence.ownership.passes
    launched = np.flatnonzero(evidence.backward)
    launched = launched[np.argsort(work.launch[launched], kind="stable")]
    ahead = launched[work.start[launched] - work.launch[launched] > _AHEAD]
    after = np.searchsorted(work.launch[ahead], end, side="left")
    stop = np.append(work.start[ahead], FAR)[after]
    stop = np.minimum(stop, np.append(begin[1:], FAR))
    run = np.maximum(np.searchsorted(passes.start, begin, side="right") - 1, 0)
    stop = np.minimum(stop, evidence.ownership.windows.end[run])
    return _idle(evidence, begin, np.maximum(stop, end))
