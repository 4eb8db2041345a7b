"""Reduce one rank's located trace to a summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backspot.analysis.accounting.activity import DATA, NAMES, Activity
from backspot.analysis.accounting.amounts import summed, summed_by_step
from backspot.analysis.accounting.clock import Clock, WallKind
from backspot.analysis.accounting.ledger import Ledger, Spent
from backspot.analysis.accounting.steps import host_steps
from backspot.analysis.attribution.launches import DeviceWork, Precedence
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.recording import Recording
from backspot.analysis.timeline import (
    FAR,
    NOTHING,
    Timeline,
    first_started,
    layered,
    merged,
    pieces,
    take,
)
from backspot.job.collectives import Collectives, find_collectives, groups_of
from backspot.job.identity import Identity, identify
from backspot.job.outside import Outside
from backspot.job.summary import (
    COLLECTING,
    KERNELS,
    LONGEST_NAME,
    WAITING,
    KernelTimes,
    ModuleTimes,
    OutsideTimes,
    PhaseTimes,
    Summary,
)
from backspot.trace import Category, Events, names
from backspot.trace.columns import Index
from backspot.trace.events import Ints, Mask

_GPU, _HOST, _HIDDEN, _BESIDE = range(4)
_WAITS = -2
"""What the host executes where it waits."""
_KINDS = ("gpu", "host", "hidden", "beside")
_PARTS = [f"{way}_{kind}" for way in ("forward", "backward") for kind in _KINDS]
"""The times of a module, as ``ModuleTimes`` names them."""


def summarize(path: Path) -> Summary:
    """Return what the job needs to know of a trace file; raises what ``Recording.read`` does."""
    return reduce_trace(Recording.read(path), identify(path))


def reduce_trace(recording: Recording, identity: Identity) -> Summary:
    """Return what the job needs to know of one rank."""
    events, ownership, clock = recording.events, recording.ownership, recording.clock
    ledger, activity = recording.ledger, recording.activity
    phases = recording.phases.wall if recording.phases else ()
    transfers, operators = _transfers(events, ownership), _operators(events, clock)
    collectives = find_collectives(events, ownership)
    work = _work_of_host(ownership, clock, collectives.waits)
    launches = _launches(events)
    outside, data = Outside(events, ownership, recording.sites), _data(activity)
    # What the host executes counts besides the clock where a device works.
    beside = work.edges[clock.whole.over(work.edges) >= len(ownership.spans.start)]
    edges = [collectives.waits.edges, transfers.edges, operators.edges, launches.edges, beside]
    marks = events.prefixed(Category.ANNOTATION, names.COLLECTION)
    collecting = first_started(events.start[marks], events.end[marks], marks)
    edges += [outside.edges, data.edges, collecting.edges]
    line = _line(ledger, collectives, merged(*edges))
    waiting = _waiting(collectives.work, line)
    host = host_steps(events, ownership) or (ownership.windows.start, ownership.windows.end)
    spent = line.spent
    alone = line.exposed | (spent.holder == ledger.holders.nothing)
    stalled = alone & (transfers.over(spent.start) >= 0) & (operators.over(spent.start) < 0)
    exposed, stalls = (
        summed(spent.step[chosen], spent.length[chosen], len(ledger.windows.start))
        for chosen in (line.exposed | stalled, stalled)
    )
    modules = _modules(ledger, line, work)
    kernel_names, kernels = _kernels(events, ledger, modules)
    return Summary(
        source=events.source,
        rank=identity.rank,
        world_size=identity.world_size,
        host=identity.host,
        origin_ns=events.origin_ns,
        step_unit=ownership.steps.unit,
        step_numbers=_step_numbers(events, ownership),
        begin=tuple(ledger.windows.start.tolist()),
        end=tuple(ledger.windows.end.tolist()),
        phases=tuple(
            PhaseTimes(name, tuple(times.tolist()))
            for name, times in zip(NAMES, phases, strict=False)
            if times.any()
        ),
        exposed=tuple(exposed.tolist()),
        stalled=tuple(stalls.tolist()),
        modules=modules.times,
        groups=groups_of(
            collectives,
            identity,
            host,
            # For each piece of device work, how long other work waits while it runs alone.
            summed(line.exchange[line.exposed], waiting[line.exposed], len(collectives.work.start)),
            _launching(collectives.work, line, launches, waiting),
        ),
        outside=(
            *_outside(ledger, outside, line, work, layered(data, collecting)),
            *_in_modules_too(recording, collecting),
        ),
        warnings=events.warnings,
        kernel_names=kernel_names,
        kernels=kernels,
    )


def _step_numbers(events: Events, ownership: Ownership) -> tuple[int, ...]:
    """Return the profiler's numbers of the steps; without marks, the steps are counted."""
    marks = events.prefixed(Category.ANNOTATION, names.PROFILER_STEP)
    numbers = {
        start: events.names[name].removeprefix(names.PROFILER_STEP)
        for start, name in zip(
            events.start[marks].tolist(), events.name[marks].tolist(), strict=True
        )
    }
    step_numbers = [numbers.get(start, "") for start in ownership.steps.start.tolist()]
    once = len(set(step_numbers)) == ownership.steps.count  # a second profiler counts from 0 again
    if once and all(text.isdecimal() for text in step_numbers):
        return tuple(map(int, step_numbers))
    return tuple(range(ownership.steps.count))


class _Line(NamedTuple):
    """The clock time of the steps, and which of it communication takes; arrays of equal length.

    Attributes:
        spent: the time, cut where anything changes that a summary tells apart.
        exchange: the communication that runs while nothing else does, or that the host waits for,
            as an index into ``Collectives.work``; ``NOTHING`` for none.
    """

    spent: Spent
    exchange: Ints

    @property
    def exposed(self) -> Mask:
        """Whether communication runs and nothing else does."""
        is_exposed: Mask = self.exchange >= 0
        return is_exposed

    @property
    def beside_kernels(self) -> Mask:
        """Whether what the host executes holds up nothing, as kernels or copies run."""
        is_beside: Mask = (self.spent.kind == WallKind.GPU) & ~self.exposed
        return is_beside


def _line(ledger: Ledger, collectives: Collectives, times: Ints) -> _Line:
    """Return the clock time of the steps, cut at these times, too."""
    spent = ledger.whole.where(ledger.whole.step >= 0).cut(times)
    working = ledger.holders.work[spent.holder]
    runs = np.where(spent.kind == WallKind.COMMUNICATION, working, NOTHING)
    waited = collectives.waits.over(spent.start)
    return _Line(spent, np.where(waited >= 0, waited, take(collectives.place, runs)))


def _work_of_host(ownership: Ownership, clock: Clock, waits: Timeline) -> Timeline:
    """Return what the host executes, ``_WAITS`` where it waits for the device or other ranks."""
    calls = ownership.waits
    blocked = first_started(calls.start, calls.end, np.zeros(len(calls.start), np.int64))
    edges = merged(clock.host.edges, blocked.edges, waits.edges)
    span = clock.host.over(edges)
    # Holders behind the spans are exchanges with other ranks.
    works = span < len(ownership.spans.start)
    works &= (blocked.over(edges) < 0) & (waits.over(edges) < 0)
    return Timeline(edges, np.where(works, span, _WAITS))


def _data(activity: Activity) -> Timeline:
    """Return when the host waits for its batch."""
    host = activity.host
    waits = np.where(host.values == DATA, DATA, NOTHING)
    changes = np.flatnonzero(np.diff(waits, prepend=NOTHING))
    return Timeline(host.edges[changes], waits[changes])


def _outside(
    ledger: Ledger, outside: Outside, line: _Line, work: Timeline, left_out: Timeline
) -> tuple[OutsideTimes, ...]:
    """Return what the host does outside of modules, in the steps.

    Args:
        outside: where the host is.
        left_out: when the host waits for its batch, or the garbage collector runs.
    """
    ownership, holders, (spent, _) = ledger.ownership, ledger.holders, line
    on_host = np.where(holders.work < 0, holders.span, _WAITS)
    beside = line.beside_kernels
    span = np.where(line.exposed | beside, work.over(spent.start), on_host[spent.holder])
    inside = ownership.owners.is_module[ownership.owner]
    is_outside = (span != _WAITS) & ~take(inside, span, False) & (left_out.over(spent.start) < 0)
    is_outside &= line.exposed | beside | ~spent.runs
    chosen, steps = spent.where(is_outside), len(ledger.windows.start)
    part = np.where(line.exposed, 1, np.where(beside, 2, 0))[is_outside]
    return outside.times(chosen.start, chosen.length, chosen.step, span[is_outside], part, steps)


def _in_modules_too(recording: Recording, collecting: Timeline) -> Iterator[OutsideTimes]:
    """Yield what waits for a device, by line, and the pauses of the collector cost in each step."""
    events, waits, steps = recording.events, recording.waits, recording.ledger.steps
    none = (0,) * len(recording.windows.start)
    operators = np.where(waits.caller >= 0, waits.caller, waits.event)
    places = zip(events.name[operators].tolist(), recording.lines_of_waits, strict=True)
    places_of = Index()
    place_index = np.array([places_of[place] for place in places], np.int64)
    idle = summed_by_step(place_index, waits.step, waits.idle, len(places_of), len(none))
    for (name, line), by_step in zip(places_of, idle.tolist(), strict=True):
        if any(by_step):
            yield OutsideTimes(WAITING, events.names[name], tuple(by_step), none, line)
    step, mark, length = pieces(collecting, steps)
    paused = summed(step[mark >= 0], length[mark >= 0], len(none))
    if paused.any():
        yield OutsideTimes(COLLECTING, "", tuple(paused.tolist()), none)


class _Modules(NamedTuple):
    """The times of the owners, and what they are made of: arrays with one entry a piece.

    Attributes:
        times: the owners that have any time.
        place: index into ``times``, by owner; ``NOTHING`` for owners without time.
        owner: the owner of each piece of the clock.
        column: in which of the parts it counts.
        step: the step that it is in.
        work: the device work that it is, ``NOTHING`` for the host's.
        length: nanoseconds.
    """

    times: tuple[ModuleTimes, ...]
    place: Ints
    owner: Ints
    column: Ints
    step: Ints
    work: Ints
    length: Ints


def _modules(ledger: Ledger, line: _Line, work: Timeline) -> _Modules:
    """Return the time of each owner in each step, by the rows' rule.

    A rank that waits for another one hides the work of its host behind the collective. What the
    host executes beside kernels counts once more, so that the work of hosts can be compared.
    """
    owners, holders, (spent, _) = ledger.ownership.owners, ledger.holders, line
    executes = holders.at(work.over(spent.start), spent.start)
    holder = np.where(line.exposed, executes, spent.holder)
    kind = np.where(spent.kind == WallKind.GPU, _GPU, np.where(line.exposed, _HIDDEN, _HOST))
    beside = np.flatnonzero(line.beside_kernels)
    holder, kind, step, length = (
        np.concatenate(columns)
        for columns in (
            (holder, executes[beside]),
            (kind, np.full(len(beside), _BESIDE)),
            (spent.step, spent.step[beside]),
            (spent.length, spent.length[beside]),
        )
    )
    column = kind + len(_KINDS) * (holders.run[holder] >= 0)
    held_intervals, steps = np.flatnonzero(holder != holders.nothing), len(ledger.windows.start)
    place, share, length = holders.shares.split(holder[held_intervals], length[held_intervals])
    held_intervals, owner = held_intervals[place], holders.shares.owner[share]
    column, working = column[held_intervals], holders.work[holder[held_intervals]]
    key, step = owner * len(_PARTS) + column, step[held_intervals]
    by_step = summed_by_step(key, step, length, len(owners) * len(_PARTS), steps)
    of_owner = by_step.reshape(len(owners), len(_PARTS), steps)
    is_module = owners.is_module
    place_of = np.full(len(owners), NOTHING)
    modules: list[ModuleTimes] = []
    for index in np.flatnonzero(of_owner.any(axis=(1, 2))).tolist():
        path, class_name = owners.named(index)
        times = dict(zip(_PARTS, map(tuple, of_owner[index].tolist()), strict=True))
        place_of[index] = len(modules)
        modules.append(ModuleTimes(path, class_name, bool(is_module[index]), **times))
    return _Modules(tuple(modules), place_of, owner, column, step, working, length)


def _kernels(
    events: Events, ledger: Ledger, modules: _Modules
) -> tuple[tuple[str, ...], tuple[KernelTimes, ...]]:
    """Return the longest kernels of each module and direction, and the names of all of these."""
    ownership, steps = ledger.ownership, len(ledger.windows.start)
    chosen = (modules.column % len(_KINDS) == _GPU) & (modules.work >= 0)
    chosen &= ownership.owners.is_module[modules.owner] & (modules.length > 0)
    place, backward = modules.place[modules.owner[chosen]], modules.column[chosen] // len(_KINDS)
    # Long names that begin alike count as one: in a summary they are.
    names_of, number_of = Index(), np.zeros(len(events.names), np.int64)
    used = ownership.work.name[modules.work[chosen]]
    for name in np.unique(used).tolist():
        number_of[name] = names_of[events.names[name][:LONGEST_NAME]]
    sizes = (len(modules.times), 2, max(len(names_of), 1))
    keys, piece = np.unique(
        np.ravel_multi_index((place, backward, number_of[used]), sizes), return_inverse=True
    )
    times = summed_by_step(
        piece.ravel(), modules.step[chosen], modules.length[chosen], len(keys), steps
    )
    module, direction, kernel = np.unravel_index(keys, sizes)
    order = np.lexsort((kernel, -times.sum(axis=1), direction, module))
    listed: dict[tuple[int, int], list[int]] = {}
    for index in order.tolist():
        listed.setdefault((int(module[index]), int(direction[index])), []).append(index)
    all_names, kept = list(names_of), Index()
    kernels = tuple(
        KernelTimes(
            module,
            bool(backward),
            tuple(kept[number] for number in kernel[indices[:KERNELS]].tolist()),
            tuple(map(tuple, times[indices[:KERNELS]].tolist())),
            tuple(times[indices[KERNELS:]].max(axis=0, initial=0).tolist()),
        )
        for (module, backward), indices in listed.items()
    )
    return tuple(all_names[number] for number in kept), kernels


def _waiting(work: DeviceWork, line: _Line) -> Ints:
    """Return for each piece of the clock how long a collective runs alone while other work waits.

    Work waits from the time of its launch on.
    """
    item = line.exchange[line.exposed]
    begin, length = line.spent.start[line.exposed], line.spent.length[line.exposed]
    others = np.flatnonzero((work.precedence != Precedence.COMMUNICATION) & (work.device >= 0))
    following = np.searchsorted(work.start[others], begin, side="left")  # in order of the starts
    queued = np.append(work.queued[others], FAR)[following]
    queued = np.where(work.device[item] >= 0, queued, begin)  # the host waits itself
    waiting = np.zeros(len(line.exchange), np.int64)
    waiting[line.exposed] = np.clip(begin + length - queued, 0, length)
    return waiting


def _launches(events: Events) -> Timeline:
    """Return which call of a collective the host executes, the outermost one, on any thread."""
    called = events.prefix_mask(*names.LAUNCHES_OF_COLLECTIVES, names.COLLECTIVE_CALL)
    calls = events.chosen(called, Category.OPERATOR, Category.ANNOTATION)
    return first_started(events.start[calls], events.end[calls], calls)


def _launching(work: DeviceWork, line: _Line, launches: Timeline, waiting: Ints) -> Ints:
    """Return for each piece of device work how long its launch as a collective holds the clock.

    A call can launch several collectives. Its time is that of the first one.
    """
    call = launches.over(line.spent.start)
    alone = (call >= 0) & (line.exposed | (line.spent.kind != WallKind.GPU))
    holds = np.bincount(call[alone], (line.spent.length - waiting)[alone]).astype(np.int64)
    launching = np.zeros(len(work.start), np.int64)
    exchanges = np.flatnonzero((work.precedence == Precedence.COMMUNICATION) & (work.launch >= 0))
    exchanges = exchanges[np.argsort(work.launch[exchanges], kind="stable")]
    of_call, first = np.unique(launches.over(work.launch[exchanges]), return_index=True)
    is_call = (of_call >= 0) & (of_call < len(holds))
    launching[exchanges[first[is_call]]] = holds[of_call[is_call]]
    return launching


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
    collective = events.prefix_mask(*names.LAUNCHES_OF_COLLECTIVES, *names.HOST_COLLECTIVES)
    chosen = events.chosen(~collective, Category.OPERATOR)
    chosen = chosen[:0] if clock.devices else chosen
    return first_started(events.start[chosen], events.end[chosen], chosen)
