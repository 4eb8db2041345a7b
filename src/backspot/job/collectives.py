"""The collectives of one rank: what each of them is, and when the host waits for it.

A trace of gloo says when an exchange runs, and not when the host waits for it. A host that waits
records nothing until the exchange has ended. So it waits from the last event on the thread that
started the exchange, unless that event is in an operator that computes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from backspot.analysis.attribution.communication import Communication, find_communication
from backspot.analysis.attribution.launches import DeviceWork, Precedence, find_device_work
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.timeline import (
    FAR,
    NOTHING,
    Timeline,
    distinct,
    enclosing,
    first_started,
    grouped,
    innermost,
    merged,
    take,
)
from backspot.job.identity import Identity
from backspot.job.summary import Call, Group, Purpose
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask


@dataclass(frozen=True)
class Collectives:
    """The work of the devices with all exchanges of the host, also those that no pass starts.

    ``place`` has for each piece of ``Ownership.work`` its index in ``work``.
    """

    events: Events
    ownership: Ownership
    work: DeviceWork
    communication: Communication
    place: Ints

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The name of each collective in ``communication`` without its process group."""
        return tuple(name.partition(" ")[0] for name in self.communication.names)

    @cached_property
    def waits(self) -> Timeline:
        """For which exchange the host waits, as an index into ``work``; never with a device."""
        work, events = self.work, self.events
        if (work.device >= 0).any():
            return first_started(work.start[:0], work.end[:0], work.start[:0])
        launched = np.flatnonzero(work.launch >= 0)
        since = np.full(len(launched), FAR)
        computes = events.names_where(_computes)
        recorded = dict(grouped(events.thread, events.of(Category.OPERATOR, Category.ANNOTATION)))
        for thread, pieces in grouped(work.thread[launched]):
            index = recorded[thread]
            edges = merged(events.start[index], events.end[index])
            end = work.end[launched[pieces]]
            # The operators that launch them are among these, so there is an edge before each end.
            last = edges[np.searchsorted(edges, end, side="left") - 1]
            nesting = innermost(events.start[index], events.end[index])
            on_top = take(index, nesting.timeline.at(last))
            idle = ~take(computes, take(events.name, on_top), False)
            idle |= take(events.category, on_top) != Category.OPERATOR
            since[pieces[idle]] = np.maximum(last, work.start[launched[pieces]])[idle]
        ends_later = since < work.end[launched]
        return first_started(
            since[ends_later], work.end[launched[ends_later]], launched[ends_later]
        )


def find_collectives(events: Events, ownership: Ownership) -> Collectives:
    """Find all collectives that a rank launches."""
    work, communication = ownership.work, ownership.communication
    on_host = events.prefix_mask(*names.HOST_COLLECTIVES)
    if len(events.chosen(on_host, Category.OPERATOR, Category.ANNOTATION)):
        work = find_device_work(events, ownership.spans, ownership.passes, all_exchanges=True)
        communication = find_communication(events, ownership.spans, work)
    work_of = np.full(len(events.start), NOTHING, np.int64)
    work_of[work.event] = np.arange(len(work.event))
    return Collectives(events, ownership, work, communication, work_of[ownership.work.event])


def _computes(name: str) -> bool:
    """Whether an operator computes while it runs nothing else.

    Functions of Python have names without a namespace, and can wait themselves.
    """
    return "::" in name and not name.startswith(
        (*names.LAUNCHES_OF_COLLECTIVES, *names.HOST_COLLECTIVES, *names.NODE_NAMESPACES)
    )


def groups_of(
    collectives: Collectives,
    identity: Identity,
    times: tuple[Ints, Ints],
    exposed: Ints,
    launching: Ints,
) -> tuple[Group, ...]:
    """Return the collectives by process group.

    A collective without a launch record belongs to what ran before the recording.

    Args:
        times: when the host begins and ends each step.
        exposed: for each piece of work, how long it runs alone while other work, or the host,
            waits.
        launching: for each, how long its launch as a collective holds the clock.
    """
    work, events = collectives.work, collectives.events
    begins, ends = times
    exchanges = np.flatnonzero((work.precedence == Precedence.COMMUNICATION) & (work.launch >= 0))
    step = np.searchsorted(begins, work.launch[exchanges], side="right") - 1
    # Marks of steps have gaps between them; a collective in a gap belongs to the step before.
    last = collectives.ownership.steps.count - 1
    inside = (step >= 0) & ((step < last) | (work.launch[exchanges] < ends[-1]))
    exchanges, step = exchanges[inside], step[inside]
    order = np.argsort(work.launch[exchanges], kind="stable")
    exchanges, step = exchanges[order], step[order]
    group = collectives.communication.group[exchanges]
    calls = _calls(collectives, exchanges, identity)
    groups = []
    for number in distinct(group):
        members = np.flatnonzero(group == number)
        distinct_calls = list(dict.fromkeys(calls[member] for member in members.tolist()))
        number_of = {call: index for index, call in enumerate(distinct_calls)}
        name = events.groups[number] if number >= 0 else ""
        groups.append(
            Group(
                name=name,
                ranks=identity.ranks_of(name),
                calls=tuple(distinct_calls),
                call=tuple(number_of[calls[member]] for member in members.tolist()),
                step=tuple(step[members].tolist()),
                launch=tuple(work.launch[exchanges[members]].tolist()),
                start=tuple(work.start[exchanges[members]].tolist()),
                end=tuple(work.end[exchanges[members]].tolist()),
                exposed=tuple(exposed[exchanges[members]].tolist()),
                launching=tuple(launching[exchanges[members]].tolist()),
                is_one=bool(name) or not identity.has_several,
            )
        )
    return tuple(groups)


def _calls(collectives: Collectives, exchanges: Ints, identity: Identity) -> list[Call]:
    """Return what these collectives are."""
    events, communication = collectives.events, collectives.communication
    owners = collectives.ownership.owners
    owner = take(collectives.ownership.owner, collectives.work.span[exchanges], Special.OUTSIDE)
    # Statistics of batches are no activations.
    inside = owners.mask(
        lambda owner_row: not owner_row.is_region and owner_row.class_name != names.SYNC_BATCH_NORM
    )
    attends = _of_attention(collectives, exchanges)
    backward = (collectives.work.run[exchanges] >= 0).tolist()
    peers = _peers(collectives, exchanges, identity)
    calls_found = []
    for index, exchange in enumerate(exchanges.tolist()):
        purpose: Purpose = ""
        module = ""
        if communication.of_parameters[exchange]:
            mark = communication.gather[exchange]
            purpose = "parameters"
            module = (names.gathered_module(events.names[mark]) if mark >= 0 else None) or ""
        elif communication.of_gradients[exchange]:
            purpose = "gradients"
        elif inside[owner[index]]:
            purpose = "attention" if attends[index] else "activations"
            module = owners.path(int(owner[index]))
        kind = collectives.kinds[communication.collective[exchange]]
        size = int(communication.bytes[exchange])
        calls_found.append(
            Call(kind, purpose, module, size, backward[index], *peers.get(index, ()))
        )
    return calls_found


def _peers(
    collectives: Collectives, exchanges: Ints, identity: Identity
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return for transfers the ranks that they go to and come from, where the trace says so.

    Operators say so: with NCCL always, with others by their inputs. Those that are launched
    together come before their launch.
    """
    events, work = collectives.events, collectives.work
    kinds = collectives.communication.collective[exchanges].tolist()
    moves = np.flatnonzero([collectives.kinds[kind] == names.POINT_TO_POINT for kind in kinds])
    if not len(moves):
        return {}
    operators = events.chosen(events.prefix_mask(names.SEND, names.RECEIVE), Category.OPERATOR)
    calls = events.chosen(events.prefix_mask(names.COLLECTIVE_CALL), Category.OPERATOR)
    around = enclosing(events, operators, events.thread[calls], events.start[calls])
    described = dict(zip(around.tolist(), calls.tolist(), strict=True))
    # In the order of their launch:
    launches = {thread: moves[rows] for thread, rows in grouped(work.thread[exchanges[moves]])}
    peers: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for operator in operators.tolist():
        of_thread = launches.get(int(events.thread[operator]), moves[:0])
        next_one = np.searchsorted(work.launch[exchanges[of_thread]], events.start[operator])
        if next_one == len(of_thread):
            continue
        moved = int(of_thread[next_one])
        peer = _peer(events, operator, described.get(operator, NOTHING), identity)
        to, sources = peers.get(moved, ((), ()))
        sends = events.names[events.name[operator]].startswith(names.SEND)
        peers[moved] = ((*to, peer), sources) if sends else (to, (*sources, peer))
    return {
        exchange: ranks for exchange, ranks in peers.items() if NOTHING not in ranks[0] + ranks[1]
    }


def _peer(events: Events, operator: int, call: int, identity: Identity) -> int:
    """Return the rank that an operator transfers to or from, -1 if it is not known."""
    if call >= 0 and events.peer[call] >= 0:
        return int(events.peer[call])
    if identity.world_size == 2 and identity.rank is not None:
        return 1 - identity.rank
    group = events.groups[events.group[call]] if call >= 0 and events.group[call] >= 0 else ""
    ranks, signature = identity.ranks_of(group), int(events.signature[operator])
    with suppress(msgspec.DecodeError, ValueError, IndexError):
        if signature >= 0:
            inputs = msgspec.json.decode(events.signatures[signature].values, type=list[str])
            if (place := int(inputs[2])) >= 0:
                return ranks[place]
    return NOTHING


def _of_attention(collectives: Collectives, moved: Ints) -> Mask:
    """Return whether an operator of attention exchanges with each of these collectives.

    It launches the collective itself; or the call of a module exchanges by all-to-all before the
    operator and after it, and runs the operator itself.
    """
    events, work, spans = collectives.events, collectives.work, collectives.ownership.spans
    operators = events.chosen(events.prefix_mask(*names.ATTENTION), Category.OPERATOR)
    attends = enclosing(events, operators, work.thread[moved], work.launch[moved]) >= 0
    all_to_all = np.array([kind == names.ALL_TO_ALL for kind in collectives.kinds], bool)
    exchanges = all_to_all[collectives.communication.collective[moved]] & (work.run[moved] < 0)
    runs = dict(grouped(spans.of(events, operators)))
    for span, rows in grouped(work.span[moved], np.flatnonzero(exchanges)):
        launch = work.launch[moved[rows]]
        begin = events.start[operators[runs.get(span, rows[:0])]]
        if span >= 0 and ((launch.min() < begin) & (begin < launch.max())).any():
            attends[rows] = True
    return attends
