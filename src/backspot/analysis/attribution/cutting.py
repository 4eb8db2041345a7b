"""A part of a trace, with the owners that it has in the whole trace: owners are found once.

What attribution would find in the part alone is the same, but for device work that was launched
before the part begins, of which the whole trace knows more.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from backspot.analysis.attribution.communication import Communication
from backspot.analysis.attribution.compiled import Compiled
from backspot.analysis.attribution.join import Join
from backspot.analysis.attribution.launches import DeviceWork, Waits, find_windows
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.passes import Passes, Steps
from backspot.analysis.attribution.spans import Spans, nest
from backspot.analysis.timeline import NOTHING, is_in, take
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask

Table = TypeVar("Table", Communication, DeviceWork, Join, Spans, Waits)


class Cut(msgspec.Struct, frozen=True):
    """A part of a trace.

    Attributes:
        events: the events of the part.
        ownership: their owners.
        spans: whether each span of the whole trace is in the part.
        work: whether each piece of device work is.
        place: for each event of the whole trace its index in the part, ``NOTHING`` for none.
        first: the step of the whole trace that is the first one of the part.
    """

    events: Events
    ownership: Ownership
    spans: Mask
    work: Mask
    place: Ints
    first: int


def cut(events: Events, ownership: Ownership, begin: int, end: int) -> Cut:
    """Return a trace as if it had been recorded between two times of the host.

    Work that was launched before and still runs stays, with its launch.
    """
    spans, passes, steps = ownership.spans, ownership.passes, ownership.steps
    kept_events = _kept(events, ownership, begin, end)
    of_span = (spans.start >= begin) & (spans.start < end)
    of_pass = (passes.start >= begin) & (passes.start < end)
    of_work = kept_events[ownership.work.event]
    of_wait = kept_events[ownership.waits.event] & of_span[ownership.waits.span]
    of_launch = kept_events[ownership.compiled.event]
    event, span, run = (_places(mask) for mask in (kept_events, of_span, of_pass))
    _, nesting = nest(spans.start[of_span], spans.end[of_span], spans.thread[of_span])
    work = _where(ownership.work, of_work, span=span, run=run, event=event)
    passes_left = Passes(
        of_span=_moved(run, passes.of_span[of_span]),
        start=passes.start[of_pass],
        end=passes.end[of_pass],
        threads=tuple(thread for thread in passes.threads if thread in nesting),
    )
    number = steps.of_pass[of_pass]
    first, last = int(number.min()), int(number.max())
    marks = slice(first, last + 1)
    ownership_left = Ownership(
        spans=replace(_where(spans, of_span, caller=span, parent=span), nesting=nesting),
        join=_where(ownership.join, of_span, operator=event, feeder=span),
        owners=ownership.owners,
        owner=ownership.owner[of_span],
        work_owner=ownership.work_owner[of_work],
        work_shares=ownership.work_shares.where(of_work),
        launch_shares=ownership.launch_shares.where(of_launch),
        compiled=_compiled(ownership.compiled, of_launch, of_work, event, span),
        passes=passes_left,
        windows=find_windows(passes_left, work),
        steps=Steps(
            steps.unit, number - first, last + 1 - first, steps.start[marks], steps.end[marks]
        ),
        work=work,
        communication=_where(ownership.communication, of_work),
        waits=_where(ownership.waits, of_wait, span=span, event=event),
        line=ownership.line[of_span],
        lines=ownership.lines,
        exact_lines=ownership.exact_lines,
    )
    time = events.allocations.time
    allocations = events.allocations.where((time >= begin) & (time < end))
    left = replace(events.where(kept_events), allocations=allocations)
    return Cut(left, ownership_left, of_span, of_work, event, first)


def _kept(events: Events, ownership: Ownership, begin: int, end: int) -> Mask:
    """Whether each event is in the part."""
    work = ownership.work
    kept_events: Mask = (events.start >= begin) & (events.start < end)
    kept_events[work.event] = (work.end > begin) & (
        np.where(work.launch >= 0, work.launch, 0) < end
    )
    running = work.event[(work.end > begin) & (work.launch < begin)]
    calls = events.of(Category.RUNTIME)
    launched = is_in(events.correlation[calls], events.correlation[running])
    kept_events[calls[launched & (events.correlation[calls] > 0)]] = True
    return kept_events


def _compiled(
    compiled: Compiled, of_launch: Mask, of_work: Mask, event: Ints, span: Ints
) -> Compiled:
    """Return what is known inside the compiled regions of the part.

    Args:
        of_launch: which launches are in the part.
        of_work: which device work is.
        event: where each event of the whole trace is in the part.
        span: where each span is.
    """
    launches = compiled.of_work[of_work]
    shared = np.zeros(len(compiled.shares.first) - 1, bool)
    shared[launches[launches >= 0]] = True
    shared[: len(of_launch)] = of_launch
    called = (compiled.caller < 0) | (take(span, compiled.caller) >= 0)
    return Compiled(
        modules=compiled.modules,
        event=event[compiled.event[of_launch]],
        start=compiled.start[of_launch],
        end=compiled.end[of_launch],
        span=_moved(span, compiled.span[of_launch]),
        shares=compiled.shares.where(shared),
        moved=compiled.moved[of_launch],
        of_work=_moved(_places(shared), launches),
        called=compiled.called[called],
        caller=_moved(span, compiled.caller[called]),
        unmatched=compiled.unmatched,
    )


def _where(table: Table, chosen: Mask, **places: Ints) -> Table:
    """Return some rows of a table of arrays; what is no array stays.

    Args:
        places: for a column of indices where each of what it points to is in the part.
    """
    columns: dict[str, Any] = {}
    for name in table.__struct_fields__:
        column = getattr(table, name)
        if isinstance(column, np.ndarray):
            column = column[chosen]
            columns[name] = _moved(places[name], column) if name in places else column
    return replace(table, **columns)


def _places(chosen: Mask) -> Ints:
    """Return where each thing is among those kept, ``NOTHING`` for those that are not."""
    return np.where(chosen, np.cumsum(chosen) - 1, NOTHING)


def _moved(places: Ints, index: Ints) -> Ints:
    """Return where indices point to now; negative ones stay."""
    return np.where(index >= 0, take(places, index), index)
