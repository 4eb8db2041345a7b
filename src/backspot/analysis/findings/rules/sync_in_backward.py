"""The host waits for the GPU inside backward, and the GPU then waits for the host."""

from __future__ import annotations

import numpy as np

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding
from backspot.trace import Category
from backspot.trace.events import Ints

__all__ = ["find"]

_AHEAD = 50_000  # nanoseconds between launch and start: the host works ahead of the GPU again
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


@rule("sync-in-backward")
def find(evidence: Evidence) -> Finding | None:
    """Find waits in nodes, and the time in which the GPU had nothing to do because of them.

    A wait takes the host's lead away. Until the host is ahead again the GPU idles between kernels;
    without the wait it would have been spared at most as much of that as the wait lasted.
    """
    waits, events = evidence.ownership.waits, evidence.events
    kept = evidence.in_pass[waits.span] & ~_copies_to_device(
        evidence, events.correlation[waits.event]
    )
    if not kept.any():
        return None
    begin, end, span = waits.start[kept], waits.end[kept], waits.span[kept]
    index = waits.event[kept]
    caller = evidence.around(events.thread[index], begin, *_CALLERS)
    cost = np.minimum(
        _idle_until_ahead(evidence, begin, end), (end - begin) + _idle(evidence, begin, end)
    )
    places = evidence.places(evidence.ownership.owner[span], cost, _first_of(caller))
    number = sum(place.count for place in places)
    names = evidence.top_operators(index, end - begin)
    idle = int(cost.sum())
    return evidence.finding(
        title="The host waits for the GPU inside backward",
        seen=(
            f"{evidence.per_step(number, 'wait')} in {', '.join(names)}; the host stands still for "
            f"{evidence.ms(int((end - begin).sum()))}, and after it the GPU has nothing to do for "
            f"{evidence.ms(idle)}."
        ),
        remedy=(
            "Keep the value on the GPU: no .item(), .cpu(), nonzero() or boolean mask in a "
            "backward function or hook; torch.where does what a mask does, without a wait."
        ),
        link=(
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
            "#avoid-unnecessary-cpu-gpu-synchronization"
        ),
        places=places,
        nodes=evidence.top_nodes(_mask(span, len(evidence.spans.start))),
        operators=evidence.top_operators(caller, end - begin) + names,
    )


def _copies_to_device(evidence: Evidence, correlation: Ints) -> np.ndarray:
    """Whether each call copies to the device: another rule's matter."""
    events = evidence.events
    copies = events.named(Category.MEMCPY, "Memcpy HtoD")
    return np.isin(correlation, events.correlation[copies])


def _first_of(caller: Ints) -> Ints:
    """1 for the first wait of each calling operator, and for each that has none."""
    _, first = np.unique(caller, return_index=True)
    counts = (caller < 0).astype(np.int64)
    counts[first] = 1
    return counts


def _mask(index: Ints, length: int) -> np.ndarray:
    mask = np.zeros(length, bool)
    mask[index] = True
    return mask


def _idle(evidence: Evidence, begin: Ints, end: Ints) -> Ints:
    """How long in each interval the devices had neither work nor any queued."""
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
    """Idle time from each wait until the next one, or until the host is ahead of the GPU again."""
    work, passes = evidence.work, evidence.ownership.passes
    launched = np.flatnonzero(evidence.backward)
    launched = launched[np.argsort(work.launch[launched], kind="stable")]
    ahead = launched[work.start[launched] - work.launch[launched] > _AHEAD]
    after = np.searchsorted(work.launch[ahead], end, side="left")
    stop = np.append(work.start[ahead], np.iinfo(np.int64).max)[after]
    stop = np.minimum(stop, np.append(begin[1:], np.iinfo(np.int64).max))
    run = np.maximum(np.searchsorted(passes.start, begin, side="right") - 1, 0)
    stop = np.minimum(stop, evidence.ownership.windows.end[run])
    return _idle(evidence, begin, np.maximum(stop, end))
