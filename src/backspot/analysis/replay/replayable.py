"""A recording compiled into one graph that can be replayed again and again."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from backspot.analysis.accounting.activity import (
    CLIPPING,
    FORWARD,
    LOSS,
    OPTIMIZER,
    ZERO_GRAD,
    Activity,
)
from backspot.analysis.accounting.batches import Batches, find_batches
from backspot.analysis.accounting.steps import StepWindows
from backspot.analysis.accounting.unrecorded import RealStep
from backspot.analysis.attribution.launches import Windows
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.recording import Recording
from backspot.analysis.replay.devices import (
    DeviceGraph,
    find_device_graph,
    recorded_launches,
)
from backspot.analysis.replay.host import (
    Floats,
    HostLine,
    ProfilerCost,
    find_host_line,
    program_threads,
    time_in_parallel,
)
from backspot.analysis.replay.schedule import Schedule, find_schedule
from backspot.analysis.replay.waits import HostWait, find_host_waits, waits_for_batches
from backspot.analysis.timeline import (
    FAR,
    NOTHING,
    Timeline,
    grouped,
    is_in,
    merged,
    quantile,
    take,
)
from backspot.formatting import duration, percent
from backspot.trace import Category, Events
from backspot.trace.events import Ints

_PARALLEL = 0.02  # of the recording: threads that run at the same time
_LOST = 0.1  # of the time of device work: without a launch record
_EARLY = 0.05  # of the launches: later than the start of their work
_CLOCKS = 100_000  # nanoseconds between the clocks of host and device
_FORWARD, _UPDATE = (FORWARD, LOSS), (CLIPPING, OPTIMIZER, ZERO_GRAD)  # phases
_SHORT = 0.1  # quantile: operators that take so long work on hardly any numbers


class Refusal(msgspec.Struct, frozen=True):
    """A recording that cannot be replayed.

    Attributes:
        reason: why not, in one sentence.
    """

    reason: str


class Steps(msgspec.Struct, frozen=True):
    """How each step's window follows from what is replayed; arrays with one entry a step.

    Attributes:
        start: when the window starts, in nanoseconds.
        end: when it ends.
        follows: whether the window starts where the one before ends.
        opens: the work with which the window starts, ``NOTHING`` for none.
        opens_at_end: whether the window starts at the end of that work, and not at its start.
        host_end: when the host's part ends, in nanoseconds.
        of_work: the step of each piece of device work, ``NOTHING`` for none.
    """

    start: Ints
    end: Ints
    follows: np.ndarray
    opens: Ints
    opens_at_end: np.ndarray
    host_end: Ints
    of_work: Ints


class Replayable(msgspec.Struct, frozen=True):
    """A recording, or some steps of one, as a graph of constraints.

    Attributes:
        events: the trace.
        ownership: its owners.
        line: the host's intervals.
        part: what each interval of the line is done for, as an index: the spans, then the launches
            inside compiled code, then the forward outside of all modules, then the update of the
            parameters, ``zero_grad`` included; ``NOTHING`` for none of these.
        by_part: the intervals sorted by their parts.
        begins: for each part the first of these intervals that is not of a lower one; one more
            entry at the end.
        outside: the device work of the forward outside of all modules.
        update: the device work that updates the parameters, clipping and ``zero_grad`` included.
        of_update: what part of the update each owner's parameters are (0 to 1): of the host's time
            in the first row, of the device work in the second. All 0 where it is not known.
        activity: the phases of the steps, where they are known.
        own: for each interval of the line that the host waits in the nanoseconds that it needs
            itself, -1 for all others.
        graph: the constraints on device work.
        batches: the batches that worker processes load.
        workers_decide: whether these decide how long the steps of the whole training take.
        waits: the calls that wait for devices or for batches.
        steps: the steps.
        stations: the moments of the host at which something is launched, a wait ends or a step
            begins or ends; sorted and distinct.
        station: for each interval of the line the station that it leads to.
        schedule: the order in which all this is run through.
    """

    events: Events
    ownership: Ownership
    line: HostLine
    part: Ints
    by_part: Ints
    begins: Ints
    outside: Ints
    update: Ints
    of_update: Floats
    activity: Activity | None
    own: Floats
    graph: DeviceGraph
    batches: Batches
    workers_decide: bool
    waits: list[HostWait]
    steps: Steps
    stations: Ints
    station: Ints
    schedule: Schedule

    def host(self, *costs: ProfilerCost) -> Floats:
        """Return how long each interval of the host (rows) takes at each cost (columns)."""
        return self.line.lengths(costs, self.own)

    @property
    def forward_outside(self) -> int:
        """The part that is the forward outside of all modules; the next one is the update."""
        return len(self.ownership.spans.start) + len(self.ownership.compiled.event)

    def intervals(self, work_for: Ints) -> tuple[Ints, Ints]:
        """Return the intervals of the host that are done for these parts, and how many each has."""
        first, end = self.begins[work_for], self.begins[work_for + 1]
        number = end - first
        offset = np.repeat(first - (np.cumsum(number) - number), number)
        return self.by_part[offset + np.arange(len(offset))], number

    def work(self, *costs: ProfilerCost) -> Floats:
        """Return how long each piece of device work (rows) takes at each cost (columns)."""
        work, shares = self.ownership.work, np.array([cost.peer_wait for cost in costs])
        shorter: Floats = (work.end - work.start)[:, None] - shares * self.graph.wait[:, None]
        return shorter


def prepare(recording: Recording) -> Replayable | Refusal:
    """Compile a recording for replays; return why it cannot be replayed where that is so."""
    events, ownership = recording.events, recording.ownership
    threads = program_threads(events)
    for refuse in _REFUSALS:
        if reason := refuse(events, ownership, threads):
            return Refusal(reason)
    steps = _steps(ownership, recording.windows)
    line = find_host_line(events, ownership, recording.clock.host, threads)
    graph = find_device_graph(events, ownership, steps.of_work)
    batches = _batches(recording)
    if reason := _unknown_waits(batches):
        return Refusal(reason)
    waits = find_host_waits(events, ownership, graph, threads)
    waits += waits_for_batches(batches, int(steps.start[0]))
    waits = _one_by_one(waits)
    own = np.full(len(line.edges) - 1, -1.0)
    if waits:
        ends = np.array([(wait.start, wait.end) for wait in waits], np.int64)
        line, own = _cut(line, own, merged(ends.ravel()))
        times = np.array([(wait.start, wait.end) for wait in waits])
        first, last = np.searchsorted(line.edges, times.T)
        wait_of = np.repeat(np.arange(len(waits)), last - first)
        waiting = (
            first[wait_of]
            + np.arange(len(wait_of))
            - (np.cumsum(last - first) - (last - first))[wait_of]
        )
        share = np.array([wait.own for wait in waits]) / (times[:, 1] - times[:, 0])
        own[waiting] = np.diff(line.edges)[waiting] * share[wait_of]
    # Launches and ends of waits are points of the line; those of other threads lie between.
    more = merged(graph.launch, steps.start, steps.end, steps.host_end)
    compiled = ownership.compiled
    line, own = _cut(line, own, merged(more, compiled.start, compiled.end))
    ends = np.array(
        [event for wait in waits for event in (wait.end, wait.follows) if event >= 0], np.int64
    )
    stations = merged(
        graph.launch, ends, steps.start, steps.end, steps.host_end, line.edges[[0, -1]]
    )
    activity = recording.activity if recording.step_windows else None
    # Of each edge the first station that comes no earlier: both are sorted.
    after = Timeline(stations + 1, np.arange(1, len(stations) + 1))
    work_for = _parts(ownership, line, activity)
    by_part = np.argsort(work_for, kind="stable")
    kinds = len(ownership.spans.start) + len(ownership.compiled.event) + 2
    outside, update = _work_of(ownership, activity)
    return Replayable(
        events=events,
        ownership=ownership,
        line=line,
        part=work_for,
        by_part=by_part,
        begins=np.searchsorted(work_for[by_part], np.arange(kinds + 1)),
        outside=outside,
        update=update,
        of_update=_shares_of_update(events, ownership, line, work_for, activity),
        activity=activity,
        own=own,
        graph=graph,
        batches=batches,
        workers_decide=_workers_decide(batches, recording.real_step),
        waits=waits,
        steps=steps,
        stations=stations,
        station=after.over(line.edges[1:]),
        schedule=find_schedule(graph, ownership.work.queue, waits, stations),
    )


def _batches(recording: Recording) -> Batches:
    """Return the batches of a recording; where it is cut, all of them are evidence."""
    if recording.around is None or recording.cut is None:
        return find_batches(recording.events)
    return find_batches(recording.around.events).moved(recording.cut.place)


def _parts(ownership: Ownership, line: HostLine, activity: Activity | None) -> Ints:
    """Return what each interval of the line is done for, as ``Replayable`` has it."""
    spans, begins = ownership.spans, line.edges[:-1]
    count = len(spans.start) + len(ownership.compiled.event)
    launch = ownership.compiled.at(spans, line.span, begins)
    work_for = np.where(launch >= 0, launch + len(spans.start), line.span)
    if activity is not None:
        free = np.flatnonzero(work_for < 0)
        phase = activity.host.over(begins[free])
        work_for[free[is_in(phase, _FORWARD)]] = count
        work_for[free[is_in(phase, _UPDATE)]] = count + 1
    return work_for


def _work_of(ownership: Ownership, activity: Activity | None) -> tuple[Ints, Ints]:
    """Return the device work of the forward outside of all modules, and that of the update."""
    work = ownership.work
    if activity is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    free = (work.span < 0) & (work.launch >= 0) & (work.device >= 0)
    phase = np.where(free, activity.of_launches(work.thread, work.launch), NOTHING)
    return np.flatnonzero(is_in(phase, _FORWARD)), np.flatnonzero(is_in(phase, _UPDATE))


def _shares_of_update(
    events: Events,
    ownership: Ownership,
    line: HostLine,
    work_for: Ints,
    activity: Activity | None,
) -> Floats:
    """Return what part of the update each owner's parameters are, as ``Replayable`` has it.

    Device work takes as long as there are numbers, and launching it as there are tensors. Where the
    host computes, each operator takes as long as the short ones for a tensor, and the rest of its
    time for the numbers. So does ``zero_grad``: freed memory goes back to the system page by page.
    """
    owners = {ownership.owners.named(owner): owner for owner in range(len(ownership.owners))}
    parameters = np.zeros((2, len(owners)))  # tensors and numbers
    for parameter in events.compiled.parameters:
        if (owner := owners.get((parameter.path, parameter.class_name))) is not None:
            parameters[:, owner] += parameter.tensors, parameter.numbers
    of_tensors, of_numbers = parameters / np.maximum(parameters.sum(axis=1, keepdims=True), 1)
    if len(ownership.work.start):
        return np.stack([of_tensors, of_numbers])
    is_update = work_for == len(ownership.spans.start) + len(ownership.compiled.event) + 1
    is_zeroing = np.zeros(len(is_update), bool)
    if activity is not None:
        is_zeroing = is_update & (activity.host.over(line.edges[:-1]) == ZERO_GRAD)
    lengths = np.diff(line.edges)
    update_ns, zeroing_ns = float(lengths[is_update].sum()), float(lengths[is_zeroing].sum())
    index = events.prefixed(Category.OPERATOR, "aten::") if update_ns else np.empty(0, np.int64)
    interval = np.minimum(np.searchsorted(line.edges, events.start[index]), len(is_update) - 1)
    computing = events.duration[index[(is_update & ~is_zeroing)[interval]]]
    if not len(computing):
        return np.stack([of_numbers, of_numbers])
    more = float((computing - quantile(computing, _SHORT)).clip(0).sum()) + zeroing_ns
    more = min(1.0, more / update_ns)
    return np.stack([of_numbers * more + of_tensors * (1 - more)] * 2)


def _one_by_one(waits: list[HostWait]) -> list[HostWait]:
    """Leave out waits that begin within another."""
    separate: list[HostWait] = []
    for wait in sorted(waits, key=lambda wait: (wait.start, -wait.end)):
        if not separate or wait.start >= separate[-1].end:
            separate.append(wait)
    return separate


def _cut(line: HostLine, own: Floats, times: Ints) -> tuple[HostLine, Floats]:
    """Cut the intervals of a line at more times; what was recorded is shared by length."""
    interval = np.searchsorted(line.edges, times)
    new = np.append(line.edges, FAR)[interval] != times
    if not new.any():
        return line, own
    edges = np.insert(line.edges, interval[new], times[new])
    old = np.cumsum(np.insert(np.ones(len(line.edges), np.int64), interval[new], 0))[:-1] - 1
    inside = (old >= 0) & (old < len(line.span))
    old = np.where(inside, old, NOTHING)
    length = np.diff(edges)
    lengths = np.append(np.diff(line.edges), 1)[old]
    share = np.where(inside, length / lengths, 0.0)
    recorded = np.append(line.recorded, np.zeros((len(line.recorded), 1)), axis=1)[:, old] * share
    span = take(line.span, old)
    owned = np.append(own, -1.0)[old]
    return HostLine(edges, span, recorded), np.where(owned >= 0, owned * share, -1.0)


# Steps -------------------------------------------------------------------------------------------


def _steps(ownership: Ownership, windows: StepWindows | Windows) -> Steps:
    work, marks = ownership.work, ownership.steps
    start, end = windows.start.astype(np.int64), windows.end.astype(np.int64)
    count = len(start)
    follows = np.append(False, start[1:] == end[:-1])[:count]
    by_end, by_start = np.argsort(work.end, kind="stable"), np.argsort(work.start, kind="stable")
    ending = _equal(work.end[by_end], by_end, start)
    starting = _equal(work.start[by_start], by_start, start)
    of_work = np.searchsorted(end, work.end, side="left")
    within = of_work < count
    within[within] = work.end[within] > start[of_work[within]]
    of_work = np.where(within, of_work, NOTHING)
    # A window that ends with work ends after the host; the last launch shows until when the host
    # works for the step.
    drained = _equal(work.end[by_end], by_end, end) >= 0
    host_end = end.copy()
    for step in np.flatnonzero(drained).tolist():
        launch = work.launch[(of_work == step) & (work.thread >= 0)]
        host_end[step] = launch.max() if len(launch) else end[step]
        if len(marks.end) == count:
            host_end[step] = max(host_end[step], min(int(marks.end[step]), int(end[step])))
    return Steps(
        start=start,
        end=end,
        follows=follows,
        opens=np.where(ending >= 0, ending, starting),
        opens_at_end=ending >= 0,
        host_end=host_end,
        of_work=of_work,
    )


def _equal(times: Ints, index: Ints, wanted: Ints) -> Ints:
    """Return an index with exactly the wanted time, ``NOTHING`` for none; ``times`` are sorted."""
    if not len(times):
        return np.full(len(wanted), NOTHING, np.int64)
    position = np.minimum(np.searchsorted(times, wanted), len(times) - 1)
    return np.where(times[position] == wanted, index[position], NOTHING)


# Refusals ----------------------------------------------------------------------------------------


def _cut_short(events: Events, _: Ownership, threads: list[int]) -> str:
    if events.truncated:
        return "The trace is cut short, and the work of the devices comes last."
    return "" if threads else "The trace has no operators of the host."


def _exchanges(_: Events, ownership: Ownership, __: list[int]) -> str:
    if (ownership.work.device < 0).any():
        return "Threads of gloo or MPI exchange data, and a trace does not say who waits for them."
    return ""


def _in_parallel(events: Events, _: Ownership, threads: list[int]) -> str:
    length = int(events.end.max() - events.start.min())
    share = time_in_parallel(events, threads) / max(1, length)
    if share > _PARALLEL:
        return (
            f"Several threads run operators at once for {percent(share)} of the recording, and a "
            "trace does not say which waits for which."
        )
    return ""


def _without_launch(_: Events, ownership: Ownership, __: list[int]) -> str:
    work, is_recorded = ownership.work, recorded_launches(ownership)
    lost = ~is_recorded
    for _queue, members in grouped(work.queue):
        # Work before all launches of its queue was launched before the recording began.
        lost[members[: int(np.argmax(is_recorded[members]))]] = False
    duration = work.end - work.start
    share = int(duration[lost].sum()) / max(1, int(duration.sum()))
    return f"{percent(share)} of the device time has no launch record." if share > _LOST else ""


def _workers_decide(batches: Batches, real_step: RealStep | None) -> bool:
    """Return whether the workers have never as many batches ready as they may, in a training.

    From one late batch to the next, fewer come in time then than the queue holds. Where more do,
    the workers had to wait for the program in between, and what it computes there takes its time.
    """
    behind = real_step.behind if real_step is not None else 0.0
    return behind * int(batches.queue.max(initial=0)) >= 1


def _unknown_waits(batches: Batches) -> str:
    unknown = batches.waited < 0
    if not unknown.any():
        return ""
    takes = duration(float((batches.end - batches.start)[unknown].mean()))
    return (
        f"To fetch a batch from the workers takes {takes}, and the trace does not say whether it "
        "was ready. If not, a faster model waits for longer. (backspot.profile and backspot run "
        "note it.)"
    )


def _two_clocks(_: Events, ownership: Ownership, __: list[int]) -> str:
    work, is_recorded = ownership.work, recorded_launches(ownership)
    early = int((work.start[is_recorded] < work.launch[is_recorded] - _CLOCKS).sum())
    if early > _EARLY * max(1, int(is_recorded.sum())):
        return "The clocks of host and device disagree: work starts before its launch."
    return ""


_REFUSALS: tuple[Callable[[Events, Ownership, list[int]], str], ...] = (
    _cut_short,
    _exchanges,
    _in_parallel,
    _without_launch,
    _two_clocks,
)
