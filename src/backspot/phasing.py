"""Where the clock time of whole steps goes: data, forward, backward, optimizer and the rest.

The same rule as for modules: what runs on a device, or waits there to run, decides; else what the
host does. So a phase is not where the host stood, but what the step was waiting for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from backspot.attribution import Ownership
from backspot.clock import device_busy, whole_clock
from backspot.diagnosis import Phase, PhaseName
from backspot.timeline import NOTHING, Timeline, first_started, layered, merged
from backspot.trace import Category, Events
from backspot.trace.events import Ints

__all__ = ["StepWindows", "find_phases", "step_windows"]

_NAMES: tuple[PhaseName, ...] = get_args(PhaseName)
_DATA, _COPY, _FORWARD, _LOSS, _BACKWARD, _OPTIMIZER, _OTHER, _IDLE = range(len(_NAMES))

_TO_DEVICE = "Memcpy HtoD"
_LOADERS = ("enumerate(DataLoader)", "[pl][profile]")
_LOADS = ("DataLoader", "dataloader_next")
_MODEL, _PASS, _STEP = range(3)


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


def step_windows(events: Events, ownership: Ownership) -> StepWindows:
    """Tell when each step began and ended.

    A step ends when all that it launched is done; the next begins at that moment, though the host
    may be far ahead. The first begins with its mark, or with the first thing recorded.
    """
    steps, passes, work = ownership.steps, ownership.passes, ownership.work
    if len(steps.start):
        begins, ends = steps.start, steps.end
    else:
        begins, ends = _unmarked(events, ownership)
    launched = np.where(_left_over(events, ownership), -1, work.launch)
    launched = np.where(work.launch >= 0, launched, work.start)
    order = np.argsort(launched, kind="stable")
    done = np.maximum.accumulate(np.append(0, work.end[order]))

    def drained(times: Ints) -> Ints:
        finished: Ints = done[np.searchsorted(launched[order], times, side="left")]
        return np.maximum(times, finished)

    end = np.maximum.accumulate(np.maximum(drained(ends), int(passes.start.min())))
    start = np.maximum(drained(begins), np.append(0, end[:-1]))
    return StepWindows(np.minimum(start, end), end)


def _left_over(events: Events, ownership: Ownership) -> np.ndarray:
    """What was launched before the recording and ran into it, by its place in its queue."""
    work = ownership.work
    calls = events.correlation[events.of(Category.RUNTIME)]
    known = np.isin(events.correlation[work.event], calls[calls > 0])
    first = np.full(int(work.queue.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, work.queue[known], work.start[known])
    early: np.ndarray = ~known & (work.start < first[work.queue])
    return early


def _unmarked(events: Events, ownership: Ownership) -> tuple[Ints, Ints]:
    """Steps end with their optimizer's step, else with their last pass."""
    steps, passes = ownership.steps, ownership.passes
    ends = np.zeros(steps.count, np.int64)
    np.maximum.at(ends, steps.of_pass, passes.end)
    updates = np.sort(events.end[events.named(Category.ANNOTATION, "Optimizer.step#")])
    after = np.append(updates, -1)[np.searchsorted(updates, ends, side="left")]
    following = np.append(ends[1:], np.iinfo(np.int64).max)
    ends = np.where((after >= 0) & (after < following), after, ends)
    host = events.of(Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME)
    first = int(events.start[host].min(initial=int(passes.start.min())))
    return np.append(first, ends[:-1]), ends


def find_phases(events: Events, ownership: Ownership, windows: StepWindows) -> tuple[Phase, ...]:
    """Deal the steps' clock time out to the phases; they sum to the windows exactly.

    Args:
        events: the trace.
        ownership: its owners.
        windows: when its steps began and ended.

    Returns:
        The phases that take any time, in the order of a step.
    """
    spans, work, passes = ownership.spans, ownership.work, ownership.passes
    count = len(spans.start)
    clock = whole_clock(ownership)
    devices = np.unique(work.device).tolist()
    busy = layered(Timeline(*_EMPTY), *(device_busy(ownership, device) for device in devices))
    every = np.arange(len(windows.start))
    steps = first_started(windows.start, windows.end, every)
    in_pass = first_started(
        ownership.windows.start, ownership.windows.end, np.arange(len(passes.start))
    )
    host = _host_phases(events, ownership)
    lines = (steps, clock, busy, in_pass, host)
    edges = merged(*(line.edges for line in lines))
    if len(edges) < 2:
        return ()
    at, length = edges[:-1], np.diff(edges)
    inside = steps.at(at) >= 0
    at, length = at[inside], length[inside]
    holder, within = clock.at(at), in_pass.at(at) >= 0
    is_work = holder >= count
    of_span = np.where(
        passes.of_span >= 0, _BACKWARD, np.where(_is_loss(ownership), _LOSS, _FORWARD)
    )
    of_host = np.where(holder >= 0, np.append(of_span, 0)[np.minimum(holder, count)], host.at(at))
    of_host = np.where(within, _BACKWARD, np.where(of_host < 0, _IDLE, of_host))
    of_work = np.append(_work_phases(events, ownership, host, of_span), 0)
    of_work = of_work[np.where(is_work, holder - count, NOTHING)]
    lost = np.append(work.launch < 0, False)[np.where(is_work, holder - count, NOTHING)]
    of_work = np.where(lost, np.where(within, _BACKWARD, _OTHER), of_work)
    phase = np.where(is_work, of_work, of_host)
    wall, running = np.zeros(len(_NAMES), np.int64), np.zeros(len(_NAMES), np.int64)
    np.add.at(wall, phase, length)
    np.add.at(running, phase, np.where(busy.at(at) >= 0, length, 0))
    return tuple(
        Phase(name, int(wall[number]), int(running[number]))
        for number, name in enumerate(_NAMES)
        if wall[number]
    )


_EMPTY = (np.empty(0, np.int64), np.empty(0, np.int64))


def _is_loss(ownership: Ownership) -> np.ndarray:
    """Whether each span is a call of a loss that stands outside the model."""
    modules = ownership.spans.modules
    loss = [m.class_name.endswith("Loss") and m.path == m.root for m in modules]
    is_loss: np.ndarray = np.array([*loss, False], bool)[ownership.spans.module]
    return is_loss


def _work_phases(events: Events, ownership: Ownership, host: Timeline, of_span: np.ndarray) -> Ints:
    """The phase that each piece of device work belongs to."""
    work = ownership.work
    phase = host.at(work.launch)
    # Work is no waiting: what is launched while data is fetched is other work.
    phase = np.where((phase < 0) | (phase == _IDLE) | (phase == _DATA), _OTHER, phase)
    phase = np.where(work.span >= 0, np.append(of_span, 0)[work.span], phase)
    copies = events.name_mask(_TO_DEVICE)[work.name]
    phase = np.where(copies & (phase != _BACKWARD), _COPY, phase)
    phase = np.where(work.optimizer.astype(bool), _OPTIMIZER, phase)
    of_engine = (work.span < 0) & (work.run >= 0)
    return np.where(of_engine, _BACKWARD, phase).astype(np.int64)


def _host_phases(events: Events, ownership: Ownership) -> Timeline:
    """What the host is at, outside of module calls and nodes, as a timeline of phases."""
    annotations = events.of(Category.ANNOTATION)
    name = events.name[annotations]
    fetches = events.name_mask(*_LOADERS) & np.array(
        [any(word in text for word in _LOADS) for text in events.names], bool
    )
    optimizes = events.name_mask("Optimizer.", "Optimizer#")
    fetching, optimizing = annotations[fetches[name]], annotations[optimizes[name]]
    thread, regions, kinds, model = _regions(events, ownership)
    line = Timeline(regions, kinds[:, 0]) if len(regions) else Timeline(*_EMPTY)
    host = events.of(Category.OPERATOR, Category.RUNTIME)
    host = host[events.thread[host] == thread]
    host = host[ownership.spans.at(thread, events.start[host]) < 0]
    active = _constant(events, host, 0)
    edges = np.unique(np.concatenate([line.edges, active.edges]))
    working = Timeline(edges, np.where(active.at(edges) >= 0, line.at(edges), NOTHING))
    waiting = _before_copies(events, ownership, regions, kinds) if not len(fetching) else []
    return layered(
        _constant(events, optimizing, _OPTIMIZER),
        _constant(events, fetching, _DATA),
        first_started(*model, np.full(len(model[0]), _FORWARD)),
        working,
        *waiting,
    )


def _constant(events: Events, index: Ints, value: int) -> Timeline:
    """Where any of these events runs, ``value``."""
    return first_started(events.start[index], events.end[index], np.full(len(index), value))


def _regions(events: Events, ownership: Ownership) -> tuple[int, Ints, Ints, tuple[Ints, Ints]]:
    """Between the model's calls, the passes and the optimizer's steps: what lies between which.

    Returns:
        The thread that the program runs on; where each region begins; and for each region the phase
        of operators in it, and whether a call of the model comes next; and when a model without
        labels runs.
    """
    spans, passes = ownership.spans, ownership.passes
    calls = np.flatnonzero((spans.module >= 0) & (spans.parent < 0) & (passes.of_span < 0))
    calls = calls[~_is_loss(ownership)[calls]]
    if len(calls):
        threads, votes = np.unique(spans.thread[calls], return_counts=True)
        thread = int(threads[np.argmax(votes)])
        calls = calls[spans.thread[calls] == thread]
        model, unlabelled = (spans.start[calls], spans.end[calls]), _EMPTY
    else:
        thread, unlabelled = _unlabelled(events, ownership)
        model = unlabelled
    steps = events.named(Category.ANNOTATION, "Optimizer.step")
    begin = np.concatenate([model[0], passes.start, events.start[steps]])
    end = np.concatenate([model[1], passes.end, events.end[steps]])
    kind = np.repeat([_MODEL, _PASS, _STEP], [len(model[0]), len(passes.start), len(steps)])
    order = np.argsort(begin, kind="stable")
    end, kind = np.maximum.accumulate(end[order]), kind[order]
    before, after = np.append(_STEP, kind), np.append(kind, NOTHING)
    phase = np.full(len(before), _OTHER, np.int64)
    phase[(before == _MODEL) & (after == _PASS)] = _LOSS if len(calls) else _FORWARD
    phase[(before == _MODEL) & (after == _MODEL)] = _FORWARD
    phase[(before == _PASS) & (after == _STEP)] = _OPTIMIZER  # clipping, unscaling
    first = min(int(events.start.min(initial=0)), int(end.min(initial=0))) - 1
    edges, kept = np.unique(np.append(first, end), return_index=True)
    # Of regions that begin at one moment the last one holds.
    last = np.append(kept[1:], len(before)) - 1
    table = np.stack([phase, (after == _MODEL).astype(np.int64)], axis=1)
    return thread, edges, table[last], unlabelled


def _unlabelled(events: Events, ownership: Ownership) -> tuple[int, tuple[Ints, Ints]]:
    """Without labels the forward is what builds nodes before each pass."""
    passes = ownership.passes
    made = events.of(Category.OPERATOR)
    made = made[(events.sequence[made] >= 0) & (events.forward_thread[made] <= 0)]
    made = made[ownership.spans.around(events.thread[made], events.start[made]) < 0]
    if not len(made):
        return NOTHING, _EMPTY
    threads, votes = np.unique(events.thread[made], return_counts=True)
    thread = int(threads[np.argmax(votes)])
    made = made[events.thread[made] == thread]
    made = made[np.argsort(events.start[made], kind="stable")]
    run = np.searchsorted(passes.start, events.start[made], side="left")
    kept = run < len(passes.start)
    runs, first = np.unique(run[kept], return_index=True)
    finish = np.zeros(len(runs), np.int64)
    np.maximum.at(finish, np.searchsorted(runs, run[kept]), events.end[made[kept]])
    begin = events.start[made[kept]][first]
    return thread, (begin, np.minimum(finish, passes.start[runs]))


def _before_copies(
    events: Events, ownership: Ownership, regions: Ints, kinds: Ints
) -> list[Timeline]:
    """Before a call of the model, idle until its batch is copied: waiting for data.

    For programs that fetch their batches by no DataLoader, or by one that bears no mark.
    """
    work = ownership.work
    copies = events.name_mask(_TO_DEVICE)[work.name] & (work.launch >= 0) & (work.span < 0)
    launch = np.sort(work.launch[copies])
    if not len(launch) or not len(regions):
        return []
    finish = np.append(regions[1:], np.iinfo(np.int64).max)
    at = np.searchsorted(launch, regions, side="left")
    arrival = np.append(launch, np.iinfo(np.int64).max)[at]
    waits = (kinds[:, 1] > 0) & (arrival < finish)
    begin, end = regions[waits], arrival[waits]
    return [first_started(begin, end, np.full(len(begin), _DATA))]
