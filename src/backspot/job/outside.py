"""What the host of a rank does outside of modules, the loader and collectives, and where.

The places are those of the training loop: within the model's calls, the backward passes and the
optimizer's steps, and between two of these. Most of it is Python: no operator runs.
"""

from __future__ import annotations

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.sites import HostSites
from backspot.analysis.attribution.updates import optimizer_steps
from backspot.analysis.timeline import distinct, first_started, merged, take
from backspot.job.summary import OutsideTimes
from backspot.trace import Category, Events
from backspot.trace.events import Ints

_WORK = ("forward", "backward", "optimizer step")
_INSIDE = len(_WORK)


class Outside:
    """Where the host is outside of modules, and what it runs there.

    ``edges`` has when either changes, sorted and distinct.
    """

    def __init__(self, events: Events, ownership: Ownership, sites: HostSites) -> None:
        self._lines, self._texts = sites.texts
        self._events, self._spans = events, ownership.spans
        spans, passes = ownership.spans, ownership.passes
        calls = np.flatnonzero((spans.module >= 0) & (passes.of_span < 0) & (spans.parent < 0))
        updates = optimizer_steps(events)
        start = np.concatenate([spans.start[calls], passes.start, events.start[updates]])
        end = np.concatenate([spans.end[calls], passes.end, events.end[updates]])
        kind = np.repeat(np.arange(len(_WORK)), [len(calls), len(passes.start), len(updates)])
        self._within = first_started(start, end, kind)
        threads = distinct(np.concatenate([spans.thread[calls], events.thread[updates]]))
        # Without either, the passes are all that is known.
        operators = events.of(Category.OPERATOR)
        if len(threads):
            operators = operators[np.isin(events.thread[operators], threads)]
        operators = operators[spans.of(events, operators) < 0]
        self._runs = first_started(events.start[operators], events.end[operators], operators)
        self.edges: Ints = merged(self._within.edges, self._runs.edges, self._lines.edges)

    def times(
        self, times: Ints, length: Ints, step: Ints, span: Ints, part: Ints, steps: int
    ) -> tuple[OutsideTimes, ...]:
        """Return the time by place and by what the host does; the pieces lie between two edges.

        ``span`` is the node that the host executes, an index into the spans; ``NOTHING`` for none.
        ``part`` is 0 for time of the clock, 1 for what a collective hides, 2 beside kernels.
        """
        if not len(times) or not (self._within.values >= 0).any():
            return ()
        columns = np.stack([self._places(times), self._doing(times, span), self._lines.at(times)])
        keys, group = np.unique(columns, axis=1, return_inverse=True)
        by_step = np.zeros((keys.shape[1], 3, steps), np.int64)
        np.add.at(by_step, (group.ravel(), part, step), length)
        return tuple(
            OutsideTimes(
                _named(place),
                self._text(doing),
                tuple(times[0]),
                tuple(times[1]),
                self._texts[line] if line >= 0 else "",
                tuple(times[2]),
            )
            for (place, doing, line), times in zip(keys.T.tolist(), by_step.tolist(), strict=True)
        )

    def _places(self, times: Ints) -> Ints:
        """Return the work before and after each moment, or around it, as one number.

        The first step is like the others: what comes last in the recording comes before it.
        """
        work = np.flatnonzero(self._within.values >= 0)
        edges, kinds = self._within.edges[work], self._within.values[work]
        after = np.searchsorted(edges, times, side="right")
        inside = self._within.at(times)
        before = np.where(inside >= 0, inside, kinds[after - 1])
        following = np.where(inside >= 0, _INSIDE, kinds[after % len(kinds)])
        places: Ints = before * (_INSIDE + 1) + following
        return places

    def _doing(self, times: Ints, span: Ints) -> Ints:
        """Return what runs: a name of the trace, behind these that of a node, or ``NOTHING``."""
        operator = take(self._events.name, self._runs.at(times))
        node = take(self._spans.node, span)
        return np.where(node >= 0, len(self._events.names) + node, operator)

    def _text(self, doing: int) -> str:
        trace_names = self._events.names
        if doing < 0:
            return ""
        return (
            trace_names[doing]
            if doing < len(trace_names)
            else self._spans.node_names[doing - len(trace_names)]
        )


def _named(place: int) -> str:
    before, following = divmod(place, _INSIDE + 1)
    if following == _INSIDE:
        return f"(in {_WORK[before]})"
    if before == following:
        return f"(between two {_WORK[before]}s)"
    return f"(between {_WORK[before]} and {_WORK[following]})"
