"""What the host does at each line of the user's Python, in steps recorded with stacks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backspot.analysis.accounting.activity import BACKWARD, IDLE, NAMES, OTHER, Activity
from backspot.analysis.accounting.clock import Clock
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.sites import HostSites
from backspot.analysis.timeline import (
    NOTHING,
    Timeline,
    first_started,
    grouped,
    innermost,
    layered,
    merged,
    numbered,
    take,
)
from backspot.analysis.typical import TypicalStep
from backspot.results.host import HostLine
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask


def find_host_lines(
    events: Events,
    ownership: Ownership,
    host_sites: HostSites,
    clock: Clock,
    steps: Timeline,
    typical: TypicalStep,
    activity: Activity | None,
    real: tuple[Ints, NDArray[np.float64]],
) -> tuple[HostLine, ...]:
    """Deal out the host's time of the steps to lines, those first that hold up the step longest.

    Lines that run a backward come last: rows say what its nodes take.

    Args:
        host_sites: the places of the user's code.
        clock: who holds each moment.
        steps: the step at each moment.
        typical: the steps that count.
        activity: the phases; without it, all is other work.
        real: moments, and the real time at each of them, as ``real_time`` has it.
    """
    line, sites = host_sites.line, host_sites.sites
    if not sites:
        return ()
    working, idle, owner = _working(events), _idle(ownership, clock), _owners(ownership, clock)
    phases = phases_of_host(ownership, activity)
    collecting = _during(events, events.prefixed(Category.ANNOTATION, names.COLLECTION))
    lines = (line, working, idle, owner, phases, steps)
    edges = merged(collecting.edges, *(line.edges for line in lines))
    edge, length = edges[:-1], np.diff(np.interp(edges, *real))
    site, busy, free, held, phase, step = (line.over(edges)[:-1] for line in lines)
    inside = (site >= 0) & (step >= 0) & (collecting.over(edges)[:-1] < 0)
    phase[phase < 0] = IDLE if activity else OTHER
    number, of_torch = np.divmod(site, 2)  # odd within PyTorch
    on_device = len(ownership.work.start) > 0
    operator = events.of(Category.OPERATOR)
    operator = operator[~events.is_label[events.name[operator]]]
    amounts = (
        _in_pieces(edge, host_sites.calls),
        _in_pieces(edge, _outermost(events, operator)),
        length,
        length * ((of_torch == 0) & (busy < 0)),
        length * ((of_torch == 1) & (busy < 0)),
        length * ((free >= 0) | (not on_device)),
    )
    key = number * len(NAMES) + phase
    codes, group = numbered(key[inside])
    sums = np.zeros((len(amounts), len(codes), len(typical.weight)), np.int64)
    for into, amount in zip(sums, amounts, strict=True):
        np.add.at(into, (group, step[inside]), np.round(amount[inside]).astype(np.int64))
    counts, times = typical.count(sums[:2]), typical.mean(sums[2:])
    of_owner = np.zeros((len(codes), len(ownership.owners)))
    np.add.at(of_owner, (group, np.maximum(held, Special.OUTSIDE)[inside]), amounts[3][inside])
    running = set((line.at(ownership.passes.start) // 2 * len(NAMES) + BACKWARD).tolist())
    host: tuple[list[HostLine], list[HostLine]] = ([], [])
    for index, code in enumerate(codes.tolist()):
        place, of_phase = sites[code // len(NAMES)], code % len(NAMES)
        wall, python, *others = times[:, index].tolist()
        if wall:
            mostly = int(of_owner[index].argmax()) if 2 * python >= wall else Special.OUTSIDE
            module = ownership.owners.named(mostly)
            location = (place.file, place.line, place.last_line, place.function, NAMES[of_phase])
            of_site = (*module, *counts[:, index].tolist(), wall, python, *others)
            host[code in running].append(HostLine(*location, *of_site))
    for lines_of_kind in host:
        lines_of_kind.sort(
            key=lambda host_line: (
                -host_line.idle_ns,
                -host_line.wall_ns,
                host_line.file,
                host_line.line,
                host_line.path,
            )
        )
    return (*host[0], *host[1])


def _in_pieces(edges: Ints, times: Ints) -> Ints:
    """Return how many of these times lie in each piece, which begin at sorted times."""
    piece = np.searchsorted(edges, times, side="right") - 1
    return np.bincount(piece[piece >= 0], minlength=len(edges))


def _outermost(events: Events, operators: Ints) -> Ints:
    """Return when each of these operators starts that no other of them contains."""
    starts = [events.start[operators[:0]]]
    for _, members in grouped(events.thread, operators):
        line = first_started(events.start[members], events.end[members], np.arange(len(members)))
        starts.append(line.edges[line.values >= 0])
    return np.concatenate(starts)


def _owners(ownership: Ownership, clock: Clock) -> Timeline:
    """Return whose node or call the host executes."""
    line = clock.host
    inside = np.where(line.values < len(ownership.spans.start), line.values, NOTHING)
    return Timeline(line.edges, take(ownership.owner, inside))


def phases_of_host(ownership: Ownership, activity: Activity | None) -> Timeline:
    """Return the phase that the host is in."""
    passes = ownership.passes
    backward = first_started(passes.start, passes.end, np.full(len(passes.start), BACKWARD))
    return layered(backward, *([activity.host] if activity else []))


def _working(events: Events) -> Timeline:
    """Return when an operator or a call of a device's runtime runs on any thread.

    A hook that runs within an operator of autograd's is Python, until it calls an operator itself.
    """
    index = events.of(Category.OPERATOR, Category.RUNTIME)
    index = index[~events.is_label[events.name[index]]]
    frames, starts, ends = events.frames, [], []
    of_frames = dict(grouped(frames.thread))
    for thread, members in grouped(events.thread, index):
        calls = of_frames.get(thread, frames.thread[:0])
        outermost = first_started(events.start[members], events.end[members], members)
        calls = calls[outermost.at(frames.start[calls]) >= 0]  # others hold nothing of an operator
        line = innermost(
            np.concatenate([events.start[members], frames.start[calls]]),
            np.concatenate([events.end[members], frames.start[calls] + frames.duration[calls]]),
        ).timeline
        runs = (line.values[:-1] >= 0) & (line.values[:-1] < len(members))
        starts.append(line.edges[:-1][runs])
        ends.append(line.edges[1:][runs])
    start, end = (np.concatenate([index[:0], *times_of]) for times_of in (starts, ends))
    return first_started(start, end, np.zeros(len(start), np.int64))


def _during(events: Events, index: Ints) -> Timeline:
    """Return when any of these events runs."""
    start, end = events.start[index], events.end[index]
    return first_started(start, end, np.zeros(len(index), np.int64))


def _idle(ownership: Ownership, clock: Clock) -> Timeline:
    """Return when no device has work, running or queued."""
    line = clock.whole
    free: Mask = line.values < len(ownership.spans.start)
    return Timeline(line.edges, np.where(free, 0, NOTHING))
