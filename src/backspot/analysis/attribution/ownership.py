"""Who owns what: each autograd node, and each piece of device work, gets its module.

A node belongs to the innermost module call around the forward operator that made it. Device work
belongs to what the host was in when it launched it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backspot.analysis.attribution.join import Join, find_lines_of_nodes, join_nodes
from backspot.analysis.attribution.launches import (
    DeviceWork,
    Waits,
    Windows,
    find_device_work,
    find_waits,
    find_windows,
    pass_at,
)
from backspot.analysis.attribution.passes import Passes, Steps, find_steps
from backspot.analysis.attribution.recompute import NO_CALLER, find_recomputation
from backspot.analysis.attribution.spans import Spans, find_spans
from backspot.analysis.attribution.wrapping import find_wrapped
from backspot.analysis.timeline import NOTHING
from backspot.trace import Events
from backspot.trace.events import Ints
from backspot.trace.source_lines import SourceLine

__all__ = [
    "AMBIGUOUS",
    "ENGINE",
    "NO_LAUNCH",
    "OUTSIDE",
    "SPECIAL",
    "UNRECORDED",
    "Ownership",
    "attribute",
]

SPECIAL = (
    "(outside model)",
    "(forward not recorded)",
    "(ambiguous thread)",
    "(autograd engine)",
    "(no launch record)",
)
"""What owns the time that no module owns, as rows name it; modules come after these."""
OUTSIDE, UNRECORDED, AMBIGUOUS, ENGINE, NO_LAUNCH = range(len(SPECIAL))


@dataclass(frozen=True, slots=True)
class Ownership:
    """A trace with an owner for everything in its backward.

    Attributes:
        spans: module calls and nodes.
        join: what is known of each node's making.
        owner: for each span: an index into ``SPECIAL``, or that of its module plus
            ``len(SPECIAL)``.
        passes: the backward passes.
        windows: their clock time.
        steps: their steps.
        work: what the devices did.
        waits: where the host waited for them.
        line: for each span the index in ``lines`` of what made the node, ``NOTHING`` where that is
            not known.
        lines: the lines of source that the trace names.
        exact_lines: whether these made the nodes themselves, or called the modules that did.
    """

    spans: Spans
    join: Join
    owner: Ints
    passes: Passes
    windows: Windows
    steps: Steps
    work: DeviceWork
    waits: Waits
    line: Ints
    lines: Sequence[SourceLine] = ()
    exact_lines: bool = True


def attribute(events: Events) -> Ownership:
    """Give everything that a trace's backward did its owner."""
    spans = find_recomputation(events, find_spans(events))
    join, passes = join_nodes(events, spans)
    work = find_device_work(events, spans, passes)
    windows = find_windows(passes, work)
    lost = work.launch == NOTHING
    work.run[lost] = pass_at(windows, work.start[lost])
    return Ownership(
        spans=spans,
        join=join,
        owner=_owners(events, spans, join),
        passes=passes,
        windows=windows,
        steps=find_steps(events, passes),
        work=work,
        waits=find_waits(events, spans),
        line=find_lines_of_nodes(events, spans, join),
        lines=events.lines.lines,
        exact_lines=events.lines.exact,
    )


def _owners(events: Events, spans: Spans, join: Join) -> Ints:
    count = len(spans.start)
    owner = np.full(count, UNRECORDED, np.int64)
    owner[join.captured] = ENGINE
    owner[join.ambiguous] = AMBIGUOUS
    called = spans.module >= 0
    owner[called] = spans.module[called] + len(SPECIAL)
    # What a node's owner hangs on: the span around its forward operator, or the node that fed it.
    hangs_on = join.feeder.copy()
    joined = np.flatnonzero(join.operator >= 0)
    operator = join.operator[joined]
    around = spans.of(events, operator)
    wrapped = find_wrapped(events, spans, operator)
    around = np.where(wrapped >= 0, wrapped, around)
    owner[joined[around < 0]] = OUTSIDE
    # Made by no recorded operator, but the live half saw whose it is.
    told = (spans.marked >= 0) & (join.operator < 0)
    owner[told] = spans.marked[told] + len(SPECIAL)
    hangs_on[joined] = around
    again = ~called & ~spans.is_node
    hangs_on[again] = np.where(spans.caller >= 0, spans.caller, spans.parent)[again]
    unowned = again & (spans.caller == NO_CALLER)
    owner[unowned], hangs_on[unowned] = OUTSIDE, NOTHING
    # A node can hang on a node (double backward, AccumulateGrad), which started before it did.
    up = np.where((hangs_on >= 0) & ~called, hangs_on, np.arange(count))
    for _ in range(count.bit_length()):  # each round doubles what it covers
        further = up[up]
        if (further == up).all():
            break
        up = further
    owned: Ints = owner[up]
    return owned
