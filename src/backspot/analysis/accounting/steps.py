"""When each step begins and ends on the clock.

A step ends when all that it launched is done. The next step begins at that moment, although the
host may be far ahead::

    host     |-- step 1 --|-- step 2 --|
    device       |----- work of 1 -----|---- work of 2 ----|
    windows  |--------- step 1 --------|------ step 2 -----|
"""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.accounting.clock import Clock
from backspot.analysis.attribution.launches import DeviceWork
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.updates import optimizer_steps
from backspot.analysis.timeline import FAR, NOTHING, first_started, grouped, take
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask


class StepWindows(msgspec.Struct, frozen=True):
    """The clock time of each step; arrays with one entry a step, without overlap.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
    """

    start: Ints
    end: Ints


def step_windows(events: Events, ownership: Ownership, clock: Clock) -> StepWindows | None:
    """Find when each step begins and ends.

    Returns:
        The steps on the clock; ``None`` where the trace has backward passes only.
    """
    host = host_steps(events, ownership)
    if host is None:
        return None
    begins, ends = host
    work = ownership.work
    launched = np.where(work.launch >= 0, work.launch, work.start)
    launched[_left_over(work, int(ownership.passes.start.min()))] = -1
    end = np.maximum.accumulate(_drained(launched, work.end, ends))
    start = _drained(launched, work.end, begins)
    start = np.minimum(start, _first_of_pass(ownership, clock, launched, begins, start))
    start = np.maximum(start, np.append(0, end[:-1]))  # steps do not overlap
    return StepWindows(np.minimum(start, end), end)


# Steps on the host -------------------------------------------------------------------------------


def host_steps(events: Events, ownership: Ownership) -> tuple[Ints, Ints] | None:
    """Find when the host begins and ends each step.

    The profiler's marks decide, or the optimizer's steps. Without either, a pass and its forward
    are one step; ``None`` if no forward is recorded.
    """
    steps, passes = ownership.steps, ownership.passes
    first, last = np.full(steps.count, FAR), np.zeros(steps.count, np.int64)
    np.minimum.at(first, steps.of_pass, passes.start)
    np.maximum.at(last, steps.of_pass, passes.end)
    if len(steps.start):
        begins, ends = steps.start, steps.end
    elif steps.unit == "optimizer step":
        begins, ends = _between_updates(events, first, last)
    else:
        begins, ends = _forwards(events, ownership), last
        if (begins >= first).all():
            return None
    # A pass outside of all marks belongs to a step, too.
    return np.minimum(begins, first), np.maximum(ends, last)


def _between_updates(events: Events, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """End each step with the last optimizer step before the next pass, and begin the next there.

    Args:
        first: when the first pass of each step starts.
        last: when the last pass of each step ends.
    """
    updates = np.sort(events.end[optimizer_steps(events)])
    before = np.searchsorted(updates, np.append(first[1:], FAR), side="right") - 1
    ends = np.maximum(last, take(updates, before))
    # A launch before all operators is that of earlier work, which still runs.
    host = events.of(Category.OPERATOR, Category.ANNOTATION)
    return np.append(int(events.start[host].min()), ends[:-1]), ends


def _forwards(events: Events, ownership: Ownership) -> Ints:
    """Return when each pass's forward begins: a module's call, or an operator with a number.

    A pass that follows another without either begins with its first node.
    """
    spans, passes = ownership.spans, ownership.passes
    operators = events.of(Category.OPERATOR)
    is_maker = (events.forward_thread[operators] == 0) & (events.sequence[operators] >= 0)
    called = (spans.module >= 0) & (passes.of_span < 0)
    ended = np.append(-1, np.maximum.accumulate(passes.end)[:-1])
    start: Ints = passes.start.copy()
    for times in (spans.start[called], events.start[operators[is_maker]]):
        times = np.sort(times)
        following = np.append(times, FAR)[np.searchsorted(times, ended, side="left")]
        start = np.where(start < passes.start, start, np.minimum(following, passes.start))
    return start


# Their work on the devices -----------------------------------------------------------------------


def _left_over(work: DeviceWork, first_pass: int) -> Mask:
    """Whether device work was launched before the recording began.

    Such work has no launch record, and comes before all work in its queue that has one. If its
    queue has no such work, only work that starts before the first pass is known to be left over.
    """
    is_launched = work.thread >= 0
    begun = np.full(int(work.queue.max(initial=-1)) + 1, FAR)
    np.minimum.at(begun, work.queue[is_launched], work.start[is_launched])
    begun[begun == FAR] = 0
    early: Mask = ~is_launched & (work.start < begun[work.queue])
    return early & ((work.launch >= 0) | (work.start < first_pass))


def _drained(launched: Ints, ended: Ints, times: Ints) -> Ints:
    """Return when all work launched before each time has ended; not earlier than that time."""
    order = np.argsort(launched, kind="stable")
    drained = np.maximum.accumulate(np.append(0, ended[order]))
    before = np.searchsorted(launched[order], times, side="left")
    return np.maximum(times, drained[before])


def _first_of_pass(
    ownership: Ownership, clock: Clock, launched: Ints, begins: Ints, start: Ints
) -> Ints:
    """Return when a pass of each step first has the clock, while earlier work still runs.

    Args:
        clock: who holds each moment of the passes.
        launched: when each piece of device work was launched.
        begins: when the host begins each step; work launched before is earlier work.
        start: when all earlier work is done; the answer where no pass has the clock before.
    """
    windows, step = ownership.windows, ownership.steps.of_pass
    early = np.flatnonzero(windows.start < start[step])
    first: Ints = start.copy()
    for device, members in grouped(windows.device, early):
        runs = first_started(windows.start[members], windows.end[members], members)
        line = clock.of_passes(device).cut(runs.edges)
        edges, run = line.edges[:-1], runs.over(line.edges[:-1])
        inside = run >= 0
        edges, run, item = edges[inside], run[inside], line.values[:-1][inside]
        item = np.maximum(item - len(ownership.spans.start), NOTHING)
        earlier = (item >= 0) & (take(launched, item) < begins[step[run]])
        np.minimum.at(first, step[run[~earlier]], edges[~earlier])
    return first
