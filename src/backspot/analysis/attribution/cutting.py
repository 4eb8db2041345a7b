"""A part of a trace, with the owners that it has in the whole trace: owners are found once.

What attribution would find in the part alone is the same, but for device work that was launched
before the part begins, of which the whole trace knows more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from backspot.analysis.attribution.communication import Communication
from backspot.analysis.attribution.compiled import Compiled
from backspot.analysis.attribution.join import Join
from backspot.analysis.attribution.launches import DeviceWork, Waits, find_windows
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.passes import Passes, Steps
from backspot.analysis.attribution.spans import Spans, nest
from backspot.analysis.timeline import NOTHING, take
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask

__all__ = ["Cut", "cut"]

Columns = TypeVar("Columns", Communication, DeviceWork, Join, Spans, Waits)


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a trace.

    Attributes:
        events: the events of the part.
        ownership: their owners.
        spans: whether each span of the whole trace is in the part.
        work: whether each piece of device work is.
        place: for each event of the whole trace its index in the part, ``NOTHING`` for none.
    """

    events: Events
    ownership: Ownership
    spans: Mask
    work: Mask
    place: Ints


def cut(events: Events, ownership: Ownership, begin: int, end: int) -> Cut:
    """Return a trace as if it had been recorded between two times of the host.

    Work that was launched before and still runs stays, with its launch.
    """
    kept = _kept(events, ownership, begin, end)
    time = events.allocations.time
    allocations = events.allocations.where((time >= begin) & (time < end))
    spans, passes, work = ownership.spans, ownership.passes, ownership.work
    of_span = (spans.start >= begin) & (spans.start < end)
    of_pass = (passes.start >= begin) & (passes.start < end)
    of_work = kept[work.event]
    event, span, run = (_places(one) for one in (kept, of_span, of_pass))
    parent, nesting = nest(spans.start[of_span], spans.end[of_span], spans.thread[of_span])
    join, done = _where(ownership.join, of_span), _where(work, of_work)
    done = replace(
        done, span=_moved(span, done.span), run=_moved(run, done.run), event=event[done.event]
    )
    begun = Passes(
        of_span=_moved(run, passes.of_span[of_span]),
        start=passes.start[of_pass],
        end=passes.end[of_pass],
        threads=passes.threads,
    )
    waits = _where(ownership.waits, kept[ownership.waits.event] & of_span[ownership.waits.span])
    launched = kept[ownership.compiled.event]
    part = Ownership(
        spans=replace(
            _where(spans, of_span),
            caller=_moved(span, spans.caller[of_span]),
            parent=parent,
            nesting=nesting,
        ),
        join=replace(join, operator=_moved(event, join.operator), feeder=_moved(span, join.feeder)),
        owners=ownership.owners,
        owner=ownership.owner[of_span],
        work_owner=ownership.work_owner[of_work],
        work_shares=ownership.work_shares.where(of_work),
        launch_shares=ownership.launch_shares.where(launched),
        compiled=_compiled(ownership.compiled, launched, of_work, event, span),
        passes=begun,
        windows=find_windows(begun, done),
        steps=_steps(ownership.steps, of_pass),
        work=done,
        communication=_where(ownership.communication, of_work),
        waits=replace(waits, span=span[waits.span], event=event[waits.event]),
        line=ownership.line[of_span],
        lines=ownership.lines,
        exact_lines=ownership.exact_lines,
    )
    return Cut(replace(events.where(kept), allocations=allocations), part, of_span, of_work, event)


def _kept(events: Events, ownership: Ownership, begin: int, end: int) -> Mask:
    """Whether each event is in the part."""
    work = ownership.work
    kept: Mask = (events.start >= begin) & (events.start < end)
    kept[work.event] = (work.end > begin) & (np.where(work.launch >= 0, work.launch, 0) < end)
    running = work.event[(work.end > begin) & (work.launch < begin)]
    calls = events.of(Category.RUNTIME)
    launched = np.isin(events.correlation[calls], events.correlation[running])
    kept[calls[launched & (events.correlation[calls] > 0)]] = True
    return kept


def _compiled(
    compiled: Compiled, launched: Mask, of_work: Mask, event: Ints, span: Ints
) -> Compiled:
    """Return what is known inside the compiled regions of the part.

    Args:
        launched: which launches are in the part.
        of_work: which device work is.
        event: the place of each event in the part.
        span: the place of each span.
    """
    asked = compiled.of_work[of_work]
    shared = np.zeros(len(compiled.shares.first) - 1, bool)
    shared[asked[asked >= 0]] = True
    shared[: len(launched)] = launched
    called = (compiled.caller < 0) | (take(span, compiled.caller) >= 0)
    return Compiled(
        modules=compiled.modules,
        event=event[compiled.event[launched]],
        start=compiled.start[launched],
        end=compiled.end[launched],
        span=_moved(span, compiled.span[launched]),
        shares=compiled.shares.where(shared),
        moved=compiled.moved[launched],
        of_work=_moved(_places(shared), asked),
        called=compiled.called[called],
        caller=_moved(span, compiled.caller[called]),
        unmatched=compiled.unmatched,
    )


def _steps(steps: Steps, of_pass: Mask) -> Steps:
    numbers = steps.of_pass[of_pass]
    first, last = int(numbers.min()), int(numbers.max())
    return Steps(
        unit=steps.unit,
        of_pass=numbers - first,
        count=last - first + 1,
        start=steps.start[first : last + 1],
        end=steps.end[first : last + 1],
    )


def _where(columns: Columns, kept: Mask) -> Columns:
    """Return some rows of a table of arrays; what is no array stays."""
    arrays = {one.name: getattr(columns, one.name) for one in fields(columns)}
    chosen: dict[str, Any] = {
        name: of[kept] for name, of in arrays.items() if isinstance(of, np.ndarray)
    }
    return replace(columns, **chosen)


def _places(kept: Mask) -> Ints:
    """Return where each thing is among those kept, ``NOTHING`` for those that are not."""
    return np.where(kept, np.cumsum(kept) - 1, NOTHING)


def _moved(places: Ints, index: Ints) -> Ints:
    """Return where indices are now; negative ones stay."""
    return np.where(index >= 0, take(places, index), index)
