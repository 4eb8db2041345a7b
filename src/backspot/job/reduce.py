"""Reduce one rank's located trace to a summary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backspot.analysis.accounting.activity import DATA, NAMES, Activity
from backspot.analysis.accounting.clock import Clock, WallKind
from backspot.analysis.accounting.payers import Payers
from backspot.analysis.accounting.pieces import summed_by_step
from backspot.analysis.accounting.steps import host_steps
from backspot.analysis.attribution.launches import DeviceWork, Tier
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.recording import Recording
from backspot.analysis.timeline import FAR, NOTHING, Timeline, first_started, merged, take
from backspot.job.collectives import Collectives, find_collectives, groups_of
from backspot.job.identity import Identity, identify
from backspot.job.outside import Outside
from backspot.job.summary import ModuleTimes, OutsideTimes, PhaseTimes, Summary
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

__all__ = ["reduce_trace", "summarize"]

_GPU, _HOST, _HIDDEN = 0, 1, 2
_WAITS = -2
"""What the host executes where it waits."""
_PARTS = 6
"""Of the forward, then of the backward: on the GPU, on the host, hidden by collectives."""


def summarize(path: Path) -> Summary:
    """Return what the job needs to know of the rank that a trace file is of.

    Raises:
        BackspotError: As ``Recording.read``.
    """
    return reduce_trace(Recording.read(path), identify(path))


def reduce_trace(recording: Recording, identity: Identity) -> Summary:
    """Return what the job needs to know of one rank.

    Args:
        identity: which rank it is of.
    """
    events, ownership, clock = recording.events, recording.ownership, recording.clock
    begin, end = recording.windows.start, recording.windows.end
    activity = recording.activity
    phases = recording.phases.wall if recording.phases else ()
    transfers, operators = _transfers(events, ownership), _operators(events, clock)
    collectives = find_collectives(events, ownership)
    work = _work_of_host(ownership, clock, collectives.waits)
    launches = _launches(events)
    outside, data = Outside(events, ownership), _data(activity)
    hidden = work.edges[_runs_collective(ownership, clock.whole.over(work.edges))]
    edges = [collectives.waits.edges, transfers.edges, operators.edges, launches.edges, hidden]
    edges += [outside.edges, data.edges]
    line = _cut(collectives, clock, begin, end, merged(*edges))
    waiting = _waiting(collectives.work, line)
    host = host_steps(events, ownership) or (ownership.windows.start, ownership.windows.end)
    alone = (line.holder < 0) | line.exposed
    stalled = alone & (transfers.over(line.at) >= 0) & (operators.over(line.at) < 0)
    return Summary(
        source=events.source,
        rank=identity.rank,
        world_size=identity.world_size,
        host=identity.host,
        origin_ns=events.origin_ns,
        step_unit=ownership.steps.unit,
        step_numbers=_step_numbers(events, ownership),
        begin=tuple(begin.tolist()),
        end=tuple(end.tolist()),
        phases=tuple(
            PhaseTimes(name, tuple(times.tolist()))
            for name, times in zip(NAMES, phases, strict=False)
            if times.any()
        ),
        exposed=line.by_step(line.exposed | stalled),
        stalled=line.by_step(stalled),
        modules=_modules(ownership, line, work),
        groups=groups_of(
            collectives,
            identity,
            host,
            _exposed(collectives.work, line, waiting),
            _launching(collectives.work, line, launches, waiting),
        ),
        outside=_outside(ownership, outside, line, work, data),
        warnings=events.warnings,
    )


def _step_numbers(events: Events, ownership: Ownership) -> tuple[int, ...]:
    """Return the profiler's numbers of the steps; without marks, the steps are counted."""
    marks = events.named(Category.ANNOTATION, names.PROFILER_STEP)
    said = {
        start: events.names[name].removeprefix(names.PROFILER_STEP)
        for start, name in zip(
            events.start[marks].tolist(), events.name[marks].tolist(), strict=True
        )
    }
    found = [said.get(start, "") for start in ownership.steps.start.tolist()]
    once = len(set(found)) == ownership.steps.count  # a second profiler counts from 0 again
    if once and all(text.isdecimal() for text in found):
        return tuple(map(int, found))
    return tuple(range(ownership.steps.count))


@dataclass(frozen=True, slots=True)
class _Line:
    """The clock of the steps in pieces; arrays with one entry each.

    Attributes:
        at: when the piece begins.
        length: nanoseconds.
        step: the step.
        holder: who holds the clock, as in ``Clock``; ``NOTHING`` for none.
        kind: a ``WallKind``.
        exchange: the communication that runs while nothing else does, or that the host waits for,
            as an index into ``Collectives.work``; ``NOTHING`` for none.
        steps: number of steps.
        payers: who pays for each moment.
    """

    at: Ints
    length: Ints
    step: Ints
    holder: Ints
    kind: Ints
    exchange: Ints
    steps: int
    payers: Payers

    @property
    def exposed(self) -> Mask:
        """Whether communication runs and nothing else does."""
        found: Mask = self.exchange >= 0
        return found

    def by_step(self, chosen: Mask) -> tuple[int, ...]:
        """Return the time of some pieces in each step."""
        found = np.zeros(self.steps, np.int64)
        np.add.at(found, self.step[chosen], self.length[chosen])
        return tuple(found.tolist())


def _cut(collectives: Collectives, clock: Clock, begin: Ints, end: Ints, more: Ints) -> _Line:
    """Cut the clock into pieces that each belong to one step and have one holder.

    Args:
        begin: when each step begins.
        end: when each step ends.
        more: other times at which to cut.
    """
    ownership = collectives.ownership
    steps = first_started(begin, end, np.arange(len(begin)))
    host = Shares.one_each(ownership.owner, ownership.line)
    payers = Payers(ownership, host, ownership.work_shares, Special.ENGINE)
    line = clock.whole.cut(merged(steps.edges, payers.edges, more))
    kinds = clock.kinds(line, next(iter(clock.devices), NOTHING)).values[:-1]
    at, holder, length = line.edges[:-1], line.values[:-1], np.diff(line.edges)
    step = steps.over(at)
    inside = step >= 0
    runs = kinds == WallKind.COMMUNICATION
    held = np.where(runs, holder - len(ownership.spans.start), NOTHING)
    waited = collectives.waits.over(at)
    exchange = np.where(waited >= 0, waited, take(collectives.place, held))
    return _Line(
        at[inside],
        length[inside],
        step[inside],
        holder[inside],
        kinds[inside],
        exchange[inside],
        len(begin),
        payers,
    )


def _work_of_host(ownership: Ownership, clock: Clock, waits: Timeline) -> Timeline:
    """Return what the host executes, ``_WAITS`` where it waits for the device or other ranks."""
    calls = ownership.waits
    blocked = first_started(calls.start, calls.end, np.zeros(len(calls.start), np.int64))
    edges = merged(clock.host.edges, blocked.edges, waits.edges)
    held = clock.host.over(edges)
    # Holders behind the spans are exchanges with other ranks.
    works = held < len(ownership.spans.start)
    works &= (blocked.over(edges) < 0) & (waits.over(edges) < 0)
    return Timeline(edges, np.where(works, held, _WAITS))


def _data(activity: Activity) -> Timeline:
    """Return when the host waits for its batch."""
    host = activity.host
    waits = np.where(host.values == DATA, DATA, NOTHING)
    changes = np.flatnonzero(np.diff(waits, prepend=NOTHING))
    return Timeline(host.edges[changes], waits[changes])


def _outside(
    ownership: Ownership, outside: Outside, line: _Line, work: Timeline, data: Timeline
) -> tuple[OutsideTimes, ...]:
    """Return what the host does outside of modules, in the steps.

    Args:
        outside: where the host is.
    """
    held = np.where(line.exposed, work.over(line.at), line.holder)
    of_module = ownership.owners.is_module
    spans = np.flatnonzero(~take(of_module, ownership.owner, False))
    mine = ((held == NOTHING) | np.isin(held, spans)) & (data.over(line.at) < 0)
    mine &= line.exposed | ~np.isin(line.kind, (WallKind.GPU, WallKind.COMMUNICATION))
    return outside.times(
        line.at[mine],
        line.length[mine],
        line.step[mine],
        held[mine],
        line.exposed[mine],
        line.steps,
    )


def _runs_collective(ownership: Ownership, holder: Ints) -> Mask:
    """Return whether each holder is a collective."""
    work = holder - len(ownership.spans.start)
    found: Mask = take(ownership.work.tier, np.maximum(work, NOTHING)) == Tier.COMMUNICATION
    return found


def _modules(ownership: Ownership, line: _Line, work: Timeline) -> tuple[ModuleTimes, ...]:
    """Return the time of each owner in each step, by the rows' rule.

    A rank that waits for another one hides the work of its host behind the collective.
    """
    owners, payers = ownership.owners, line.payers
    held = np.where(line.exposed, work.over(line.at), line.holder)
    kind = np.where(line.kind == WallKind.GPU, _GPU, np.where(line.exposed, _HIDDEN, _HOST))
    mine = held >= 0
    at, step, length = line.at[mine], line.step[mine], line.length[mine]
    held, kind = held[mine], kind[mine]
    run = np.concatenate([ownership.passes.of_span, ownership.work.run])[held]
    part = kind + 3 * (run >= 0)
    place, share, length = payers.shares.split(payers.of_holders(held, at), length)
    owner, step, part = payers.shares.owner[share], step[place], part[place]
    owned = owner >= 0
    by_step = summed_by_step(
        owner[owned] * _PARTS + part[owned],
        step[owned],
        length[owned],
        len(owners) * _PARTS,
        line.steps,
    )
    of_owner = by_step.reshape(len(owners), _PARTS, line.steps)
    is_module = owners.is_module
    found = []
    for index in np.flatnonzero(of_owner.any(axis=(1, 2))).tolist():
        parts = (tuple(part) for part in of_owner[index].tolist())
        found.append(ModuleTimes(*owners.named(index), bool(is_module[index]), *parts))
    return tuple(found)


def _waiting(work: DeviceWork, line: _Line) -> Ints:
    """Return for each piece of the clock how long a collective runs alone while other work waits.

    Work waits from the time of its launch on.
    """
    item = line.exchange[line.exposed]
    begin, length = line.at[line.exposed], line.length[line.exposed]
    others = np.flatnonzero((work.tier != Tier.COMMUNICATION) & (work.device >= 0))
    following = np.searchsorted(work.start[others], begin, side="left")  # in order of the starts
    queued = np.append(work.queued[others], FAR)[following]
    queued = np.where(work.device[item] >= 0, queued, begin)  # the host waits itself
    found = np.zeros(len(line.at), np.int64)
    found[line.exposed] = np.clip(begin + length - queued, 0, length)
    return found


def _exposed(work: DeviceWork, line: _Line, waiting: Ints) -> Ints:
    """Return for each piece of device work how long other work waits while it runs alone."""
    found = np.zeros(len(work.start), np.int64)
    np.add.at(found, line.exchange[line.exposed], waiting[line.exposed])
    return found


def _launches(events: Events) -> Timeline:
    """Return which call of a collective the host executes, the outermost one, on any thread."""
    called = events.name_mask(*names.LAUNCHES_OF_COLLECTIVES, names.COLLECTIVE_CALL)
    calls = events.chosen(called, Category.OPERATOR, Category.ANNOTATION)
    return first_started(events.start[calls], events.end[calls], calls)


def _launching(work: DeviceWork, line: _Line, launches: Timeline, waiting: Ints) -> Ints:
    """Return for each piece of device work how long its launch as a collective holds the clock.

    A call can launch several collectives. Its time is that of the first one.
    """
    call = launches.over(line.at)
    alone = (call >= 0) & (line.exposed | (line.kind != WallKind.GPU))
    held = np.bincount(call[alone], (line.length - waiting)[alone]).astype(np.int64)
    found = np.zeros(len(work.start), np.int64)
    mine = np.flatnonzero((work.tier == Tier.COMMUNICATION) & (work.launch >= 0))
    mine = mine[np.argsort(work.launch[mine], kind="stable")]
    of_call, first = np.unique(launches.over(work.launch[mine]), return_index=True)
    known = (of_call >= 0) & (of_call < len(held))
    found[mine[first[known]]] = held[of_call[known]]
    return found


def _transfers(events: Events, ownership: Ownership) -> Timeline:
    """Return when a transfer between two ranks is under way, on a device or on the host."""
    work, communication = ownership.work, ownership.communication
    kinds = np.array([_is_transfer(name) for name in communication.names], bool)
    device = take(kinds, communication.collective, False)
    on_host = events.names_where(
        lambda name: name.startswith(names.HOST_COLLECTIVES) and _is_transfer(name)
    )
    host = events.chosen(on_host, Category.OPERATOR, Category.ANNOTATION)
    start = np.concatenate([work.start[device], events.start[host]])
    end = np.concatenate([work.end[device], events.end[host]])
    return first_started(start, end, np.arange(len(start)))


def _is_transfer(name: str) -> bool:
    return names.collective_in(name) == names.POINT_TO_POINT


def _operators(events: Events, clock: Clock) -> Timeline:
    """Return when the host executes an operator, other than collectives; never with a device."""
    collective = events.name_mask(*names.LAUNCHES_OF_COLLECTIVES, *names.HOST_COLLECTIVES)
    chosen = events.chosen(~collective, Category.OPERATOR)
    chosen = chosen[:0] if clock.devices else chosen
    return first_started(events.start[chosen], events.end[chosen], chosen)
