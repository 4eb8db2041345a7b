"""When each step begins and ends on the clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backspot.analysis.accounting.clock import Clock
from backspot.analysis.attribution.launches import DeviceWork
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import NOTHING, first_started, grouped, take
from backspot.trace import Category, Events
from backspot.trace.events import Ints
from backspot.trace.names import OPTIMIZER_STEP

__all__ = ["StepWindows", "step_windows"]


@dataclass(frozen=True, slots=True)
class StepWindows:
    """The clock time of each step; arrays with one entry a step, without overlap.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
    """

    start: Ints
    end: Ints

    @property
    def lengths(self) -> tuple[int, ...]:
        """How long each step took, in nanoseconds."""
        return tuple((self.end - self.start).tolist())


def step_windows(events: Events, ownership: Ownership, clock: Clock) -> StepWindows | None:
    """Tell when each step began and ended.

    A step ends when all that it launched is done; the next begins at that moment, though the host
    may be far ahead. The first begins with its mark, or with the first thing recorded. Where
    neither a mark nor an optimizer tells of steps, a pass with its forward is one.

    Returns:
        The steps on the clock; ``None`` where the trace tells of backward passes only.
    """
    steps, passes, work = ownership.steps, ownership.passes, ownership.work
    first, last = np.full(steps.count, np.iinfo(np.int64).max), np.zeros(steps.count, np.int64)
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
    # A pass that no mark stands around is its step's all the same.
    begins, ends = np.minimum(begins, first), np.maximum(ends, last)
    launched = np.where(work.launch >= 0, work.launch, work.start)
    launched[_left_over(work, int(passes.start.min()))] = -1
    end = np.maximum.accumulate(_drained(launched, work.end, ends))
    start = _drained(launched, work.end, begins)
    start = np.minimum(start, _at_work(ownership, clock, launched, begins, start))
    start = np.maximum(start, np.append(0, end[:-1]))
    return StepWindows(np.minimum(start, end), end)


def _drained(launched: Ints, ended: Ints, times: Ints) -> Ints:
    """When all work that was launched before each time has ended; no earlier than that time."""
    order = np.argsort(launched, kind="stable")
    done = np.maximum.accumulate(np.append(0, ended[order]))
    before = np.searchsorted(launched[order], times, side="left")
    return np.maximum(times, done[before])


def _at_work(ownership: Ownership, clock: Clock, launched: Ints, begins: Ints, start: Ints) -> Ints:
    """When a pass of each step has the clock, though work of before still runs beside it.

    Args:
        ownership: the passes.
        clock: who holds each moment of these.
        launched: when each piece of device work was.
        begins: when each step does on the host: what was launched earlier is of before.
        start: when all of that is done, which is the answer where no pass is earlier.
    """
    windows, step = ownership.windows, ownership.steps.of_pass
    early = windows.start < start[step]
    found: Ints = start.copy()
    for device, mine in grouped(windows.device, np.flatnonzero(early)):
        runs = first_started(windows.start[mine], windows.end[mine], mine)
        line = clock.of_passes(device).cut(runs.edges)
        at, run = line.edges[:-1], runs.over(line.edges[:-1])
        inside = run >= 0
        at, run, item = at[inside], run[inside], line.values[:-1][inside]
        item = np.maximum(item - len(ownership.spans.start), NOTHING)
        before = (item >= 0) & (take(launched, item) < begins[step[run]])
        np.minimum.at(found, step[run[~before]], at[~before])
    return found


def _left_over(work: DeviceWork, first_pass: int) -> np.ndarray:
    """What was launched before the recording and ran into it, by its place in its queue.

    Where nothing in the queue tells, or a pass may have launched it, it is not known to be that.
    """
    known = work.thread >= 0
    never = np.iinfo(np.int64).max
    begun = np.full(int(work.queue.max(initial=-1)) + 1, never)
    np.minimum.at(begun, work.queue[known], work.start[known])
    begun[begun == never] = 0
    early: np.ndarray = ~known & (work.start < begun[work.queue])
    return early & ((work.launch >= 0) | (work.start < first_pass))


def _between_updates(events: Events, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Steps end with their optimizer's last step before the next pass, and begin with that end."""
    updates = np.sort(events.end[events.named(Category.ANNOTATION, OPTIMIZER_STEP)])
    before = np.searchsorted(updates, np.append(first[1:], np.iinfo(np.int64).max), side="right")
    ends = np.maximum(last, np.append(-1, updates)[before])
    host = events.of(Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME)
    return np.append(int(events.start[host].min()), ends[:-1]), ends


def _forwards(events: Events, ownership: Ownership) -> Ints:
    """When each pass's forward begins: a module's call, else an operator that autograd numbers.

    A pass that follows another without either begins with its first node.
    """
    spans, passes = ownership.spans, ownership.passes
    operators = events.of(Category.OPERATOR)
    made = (events.forward_thread[operators] == 0) & (events.sequence[operators] >= 0)
    called = (spans.module >= 0) & (passes.of_span < 0)
    ended = np.append(-1, np.maximum.accumulate(passes.end)[:-1])
    start: Ints = passes.start.copy()
    for times in (spans.start[called], events.start[operators[made]]):
        after = np.searchsorted(np.sort(times), ended, side="left")
        found = np.append(np.sort(times), np.iinfo(np.int64).max)[after]
        start = np.where(start < passes.start, start, np.minimum(found, passes.start))
    return start
