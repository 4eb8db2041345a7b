"""Reduce one rank's located trace to a summary."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from backspot.analysis.accounting.clock import Clock, WallKind
from backspot.analysis.accounting.payers import Payers
from backspot.analysis.accounting.phases import find_phases
from backspot.analysis.accounting.pieces import summed_by_step
from backspot.analysis.accounting.steps import host_steps, step_windows
from backspot.analysis.attribution.launches import Tier
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.timeline import NOTHING, Timeline, distinct, first_started, merged
from backspot.job.identity import Identity, identify
from backspot.job.summary import Group, ModuleTimes, PhaseTimes, Summary
from backspot.pipeline import read_whole
from backspot.trace import Category, Events
from backspot.trace.events import Ints
from backspot.trace.names import PROFILER_STEP

__all__ = ["reduce_trace", "summarize"]

_GPU, _HOST, _HIDDEN = 0, 1, 2
_PARTS = 6
"""Of the forward, then of the backward: on the GPU, on the host, hidden by collectives."""


def summarize(path: Path) -> Summary:
    """Return what the job needs to know of the rank that a trace file is of.

    Raises:
        BackspotError: As ``read_whole``.
    """
    return reduce_trace(*read_whole(path), identify(path))


def reduce_trace(events: Events, ownership: Ownership, identity: Identity) -> Summary:
    """Return what the job needs to know of one rank.

    Args:
        events: the rank's trace.
        ownership: its owners.
        identity: which rank it is of.
    """
    clock = Clock(ownership)
    windows = step_windows(events, ownership, clock)
    begin, end = (
        (windows.start, windows.end)
        if windows
        else (ownership.windows.start, ownership.windows.end)
    )
    phases = find_phases(events, ownership, clock, windows) if windows else ()
    exposed, modules = _modules(ownership, clock, begin, end)
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
            PhaseTimes(phase.name, phase.wall_ns_by_step)
            for phase in phases
            if phase.name != "unsteady"
        ),
        exposed=exposed,
        modules=modules,
        groups=_groups(events, ownership, identity),
        warnings=events.warnings,
    )


def _step_numbers(events: Events, ownership: Ownership) -> tuple[int, ...]:
    """Return the profiler's numbers of the steps; without marks, the steps are counted."""
    marks = events.named(Category.ANNOTATION, PROFILER_STEP)
    said = {
        start: events.names[name].removeprefix(PROFILER_STEP)
        for start, name in zip(
            events.start[marks].tolist(), events.name[marks].tolist(), strict=True
        )
    }
    found = [said.get(start, "") for start in ownership.steps.start.tolist()]
    if len(found) == ownership.steps.count and all(text.isdecimal() for text in found):
        return tuple(map(int, found))
    return tuple(range(ownership.steps.count))


def _modules(
    ownership: Ownership, clock: Clock, begin: Ints, end: Ints
) -> tuple[tuple[int, ...], tuple[ModuleTimes, ...]]:
    """Return the clock time of collectives and of each owner in each step, by the rows' rule."""
    work, owners = ownership.work, ownership.owners
    steps = first_started(begin, end, np.arange(len(begin)))
    whole = clock.whole
    if not len(whole.edges) or not len(steps.edges):
        return (0,) * len(begin), ()
    host = Shares.one_each(ownership.owner, ownership.line)
    payers = Payers(ownership, host, ownership.work_shares, Special.ENGINE)
    line = whole.cut(merged(steps.edges, payers.edges))
    kinds = clock.kinds(line, next(iter(clock.devices), NOTHING)).values[:-1]
    at, held, length = line.edges[:-1], line.values[:-1], np.diff(line.edges)
    step = steps.over(at)
    inside = (step >= 0) & (held >= 0)
    running = inside & (kinds == WallKind.COMMUNICATION)
    exposed = np.zeros(len(begin), np.int64)
    np.add.at(exposed, step[running], length[running])
    mine = inside & ~running
    kind = np.where(kinds == WallKind.GPU, _GPU, _HOST)
    found = _Pieces(at[mine], step[mine], held[mine], length[mine], kind[mine])
    if running.any():
        waiting = Timeline(line.edges, np.append(np.where(running, step, NOTHING), NOTHING))
        found = found.joined(_hidden(ownership, clock, waiting))
    run = np.concatenate([ownership.passes.of_span, work.run])[found.held]
    payer = payers.of_holders(found.held, found.at)
    place, share, length = payers.shares.split(payer, found.length)
    owner = payers.shares.owner[share]
    step, part = found.step[place], (found.kind + 3 * (run >= 0))[place]
    owned = owner >= 0
    by_step = summed_by_step(
        owner[owned] * _PARTS + part[owned],
        step[owned],
        length[owned],
        len(owners) * _PARTS,
        len(begin),
    )
    of_owner = by_step.reshape(len(owners), _PARTS, len(begin))
    is_module = owners.is_module
    modules = []
    for index in np.flatnonzero(of_owner.any(axis=(1, 2))).tolist():
        module = owners.module(index)
        parts = (tuple(part) for part in of_owner[index].tolist())
        class_name = module.class_name if module else ""
        modules.append(ModuleTimes(owners.path(index), class_name, bool(is_module[index]), *parts))
    return tuple(exposed.tolist()), tuple(modules)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of the clock: arrays with one entry a piece.

    Attributes:
        at: when the piece begins, in nanoseconds.
        step: the step that it lies in.
        held: its holder.
        length: nanoseconds.
        kind: ``_GPU``, ``_HOST`` or ``_HIDDEN``.
    """

    at: Ints
    step: Ints
    held: Ints
    length: Ints
    kind: Ints

    def joined(self, other: _Pieces) -> _Pieces:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return _Pieces(*(np.concatenate(pair) for pair in pairs))


def _hidden(ownership: Ownership, clock: Clock, waiting: Timeline) -> _Pieces:
    """Return what the host executes while its device runs a collective and nothing else.

    A rank that waits for another one hides its own work in this way. Calls in which the host waits
    for the device are no work.

    Args:
        ownership: the trace with its owners.
        clock: its clock.
        waiting: the step of each moment at which a collective holds the clock.
    """
    calls = ownership.waits
    blocked = first_started(calls.start, calls.end, np.zeros(len(calls.start), np.int64))
    edges = merged(waiting.edges, clock.host.edges, blocked.edges)
    at, length = edges[:-1], np.diff(edges)
    step, held = waiting.over(at), clock.host.over(at)
    # Holders behind the spans are exchanges with other ranks.
    works = (step >= 0) & (held >= 0) & (held < len(ownership.spans.start))
    works &= blocked.over(at) < 0
    kind = np.full(np.count_nonzero(works), _HIDDEN)
    return _Pieces(at[works], step[works], held[works], length[works], kind)


def _groups(events: Events, ownership: Ownership, identity: Identity) -> tuple[Group, ...]:
    """Return the collectives by process group.

    A collective without a launch record belongs to what ran before the recording.
    """
    work, steps = ownership.work, ownership.steps
    host = host_steps(events, ownership)
    begins, ends = host or (ownership.windows.start, ownership.windows.end)
    mine = np.flatnonzero((work.tier == Tier.COMMUNICATION) & (work.launch >= 0))
    step = np.searchsorted(begins, work.launch[mine], side="right") - 1
    # Marks of steps have gaps between them; a collective in a gap belongs to the step before.
    inside = (step >= 0) & ((step < steps.count - 1) | (work.launch[mine] < ends[-1]))
    mine, step = mine[inside], step[inside]
    order = np.argsort(work.launch[mine], kind="stable")
    mine, step = mine[order], step[order]
    communication = ownership.communication
    collective, group = communication.collective[mine], communication.group[mine]
    found = []
    for number in distinct(group):
        at = np.flatnonzero(group == number)
        known = distinct(collective[at])
        name = events.groups[number] if number >= 0 else ""
        found.append(
            Group(
                name=name,
                ranks=identity.ranks_of(name),
                # Behind the kind may follow the process group.
                kinds=tuple(communication.names[kind].partition(" ")[0] for kind in known),
                kind=tuple(np.searchsorted(known, collective[at]).tolist()),
                step=tuple(step[at].tolist()),
                launch=tuple(work.launch[mine[at]].tolist()),
                start=tuple(work.start[mine[at]].tolist()),
                end=tuple(work.end[mine[at]].tolist()),
            )
        )
    return tuple(found)
