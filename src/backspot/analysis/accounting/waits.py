"""The calls in which the host waits for a device, and the lines of Python that make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import msgspec
import numpy as np

from backspot.analysis.accounting.activity import BACKWARD, IDLE, OTHER, Activity
from backspot.analysis.accounting.ledger import Ledger
from backspot.analysis.attribution.launches import waiting_calls
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.timeline import FAR, NOTHING, Timeline, enclosing, grouped, is_in, take
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

_AHEAD = 50_000
"""Nanoseconds from launch to start with which the host is ahead of the device again."""


class HostWaits(msgspec.Struct, frozen=True):
    """The calls of the steps in which the host waits for a device, by start.

    All are arrays with one entry a call.

    Attributes:
        event: index into ``Events``.
        start: nanoseconds.
        end: nanoseconds.
        step: the step.
        phase: index into ``activity.NAMES``.
        owner: as in ``Ownership.owner``; outside of all modules where no module's call waits.
        caller: the outermost operator around it, as an index into ``Events``; ``NOTHING`` for none.
        first: whether it is a wait of its own, and not the synchronization behind a copy that
            blocks: both are one wait.
        ns: how long it takes, in nanoseconds.
        idle: nanoseconds in which no device has work, during and after it, until the host is ahead
            again. Without the wait, a device idles less by at most the wait's own length.
    """

    event: Ints
    start: Ints
    end: Ints
    step: Ints
    phase: Ints
    owner: Ints
    caller: Ints
    first: Mask
    ns: Ints
    idle: Ints

    def where(self, keep: Mask) -> HostWaits:
        """Return those for which ``keep`` is true."""
        return HostWaits(*(getattr(self, name)[keep] for name in self.__struct_fields__))


def find_host_waits(events: Events, ledger: Ledger, activity: Activity | None) -> HostWaits:
    """Find the waits of the steps, in any phase and on any thread of the program.

    Args:
        ledger: the clock time of the steps.
        activity: the phases; without it, all is backward or other work.
    """
    ownership, steps = ledger.ownership, ledger.steps
    calls = _of_program(events, waiting_calls(events))
    calls = calls[steps.at(events.start[calls]) >= 0]
    start, end, thread = events.start[calls], events.end[calls], events.thread[calls]
    span = ownership.spans.of(events, calls)
    operators = events.chosen(events.names_where(names.is_operator), Category.OPERATOR)
    caller = enclosing(events, operators, thread, start)
    phase = activity.of_launches(thread, start) if activity else np.full(len(calls), OTHER)
    phase[phase < 0] = IDLE
    phase[take(ownership.passes.of_span, span) >= 0] = BACKWARD
    return HostWaits(
        event=calls,
        start=start,
        end=end,
        step=steps.at(start),
        phase=phase,
        owner=np.maximum(take(ownership.owner, span), Special.OUTSIDE),
        caller=caller,
        first=_own_waits(events, calls, thread, caller),
        ns=ledger.elapsed(start, end),
        idle=_idle(ledger, start, end),
    )


def _of_program(events: Events, calls: Ints) -> Ints:
    """Leave out the synchronizations with which a recording ends: nothing comes after them."""
    runtime = events.of(Category.RUNTIME)
    is_synchronization = events.names_where(names.is_device_synchronization)
    others = runtime[~is_synchronization[events.name[runtime]]]
    last = int(events.start[others].max(initial=-1))
    return calls[~is_synchronization[events.name[calls]] | (events.start[calls] <= last)]


def _own_waits(events: Events, calls: Ints, thread: Ints, caller: Ints) -> Mask:
    """Whether each call is not the synchronization directly behind a copy that blocks."""
    runtime = events.of(Category.RUNTIME)
    runtime = runtime[np.lexsort((events.start[runtime], events.thread[runtime]))]
    place = np.empty(len(events.start), np.int64)
    place[runtime] = np.arange(len(runtime))
    before = runtime[place[calls] - 1] if len(calls) else calls
    of_copy = is_in(before, calls) & (events.correlation[before] > 0)
    of_copy &= ~events.names_where(names.is_synchronization)[events.name[before]]
    around = np.full(len(events.start), NOTHING)
    around[calls] = caller
    same = (events.thread[before] == thread) & (around[before] == caller)
    own: Mask = ~(of_copy & same & (events.start[before] < events.start[calls]))
    return own


def _idle(ledger: Ledger, begin: Ints, end: Ints) -> Ints:
    """Return how long no device has work because of each wait.

    After a wait the host has nothing queued. Until it is ahead again, the next wait begins or the
    step ends, devices idle between kernels.
    """
    ownership, steps, line = ledger.ownership, ledger.steps, ledger.clock.whole
    count = len(ownership.spans.start)
    if not len(line.edges) or not len(begin):
        return np.zeros(len(begin), np.int64)
    free = (line.values < count).astype(np.int64)
    until = np.append(0, np.cumsum(free[:-1] * ledger.elapsed(line.edges[:-1], line.edges[1:])))

    def before(times: Ints) -> Ints:
        edge = np.maximum(np.searchsorted(line.edges, times, side="right") - 1, 0)
        inside = np.clip(ledger.elapsed(line.edges[edge], times), 0, None)
        result: Ints = until[edge] + free[edge] * inside * (edge < len(free) - 1)
        return result

    work = ownership.work
    launched = np.flatnonzero(work.launch >= 0)
    launched = launched[np.argsort(work.launch[launched], kind="stable")]
    ahead = launched[work.start[launched] - work.launch[launched] > _AHEAD]
    after = np.searchsorted(work.launch[ahead], end, side="left")
    stop = np.append(work.start[ahead], FAR)[after]
    stop = np.minimum(stop, np.append(begin[1:], FAR))
    ends = np.append(steps.edges, FAR)[np.searchsorted(steps.edges, begin, side="right")]
    stop = np.maximum(np.minimum(stop, ends), end)
    waited = ledger.elapsed(begin, end)
    idle: Ints = np.minimum(before(stop) - before(begin), waited + before(end) - before(begin))
    return idle


def lines_of_waits(
    events: Events, waits: HostWaits, at_line: Timeline, lines: Sequence[str]
) -> list[str]:
    """Return the line of each wait, ``""`` where it is not known.

    Where the live half has marked it, the mark follows the wait on its thread. Elsewhere it is the
    line of Python that runs.

    Args:
        at_line: index into ``lines`` at each moment, as stacks say.
    """
    running = at_line.at(waits.start).tolist()
    line_texts = [lines[line_number] if line_number >= 0 else "" for line_number in running]
    marks = events.prefixed(Category.ANNOTATION, names.WAITED_AT)
    marks = marks[np.argsort(events.start[marks], kind="stable")]
    released = events.names_where(names.is_release)[events.name[waits.event]]
    for thread, members in grouped(events.thread[waits.event]):
        own_marks = marks[events.thread[marks] == thread]
        # PyTorch does not warn of calls that only wait, such as torch.cuda.synchronize(), nor of
        # its allocator's.
        warned = members[waits.first[members] & (waits.caller[members] >= 0) & ~released[members]]
        behind = np.searchsorted(waits.start[warned], events.start[own_marks], side="right")
        before = 0
        for count, own in (
            (wait_number, own_marks[places]) for wait_number, places in grouped(behind)
        ):
            # Marks beyond the waits since the mark before are of waits on autograd's threads.
            number = min(len(own), count - before)
            for wait, mark in zip(warned[count - number : count], own, strict=False):
                line_texts[wait] = events.names[events.name[mark]].removeprefix(names.WAITED_AT)
            before = count
        for wait, following in pairwise(members.tolist()):
            if not waits.first[following]:
                line_texts[following] = line_texts[wait]
    return line_texts


_Key: TypeAlias = tuple[int, tuple[str, str], str]
"""What says which wait of a step it is: the phase, the module, the operator."""


def lines_by_turn(
    events: Events, ownership: Ownership, waits: HostWaits, lines: Sequence[str]
) -> dict[_Key, list[str]]:
    """Return the lines of one step's waits by what they do, in their order; of the longest step."""
    longest: dict[_Key, list[str]] = {}
    for _, members in grouped(waits.step):
        of_step: dict[_Key, list[str]] = {}
        for wait, key in zip(
            members.tolist(), _keys(events, ownership, waits, members), strict=True
        ):
            of_step.setdefault(key, []).append(lines[wait])
        for key, wait_lines in of_step.items():
            if len(wait_lines) > len(longest.get(key, ())):
                longest[key] = wait_lines
    return longest


def lines_as_in(
    known_lines: Mapping[_Key, Sequence[str]],
    events: Events,
    ownership: Ownership,
    waits: HostWaits,
) -> list[str]:
    """Return the line of each wait, as the same wait of a step with stacks has it; ``""`` for none.

    Args:
        known_lines: what ``lines_by_turn`` says of the steps with stacks.
    """
    lines = [""] * len(waits.event)
    for _, members in grouped(waits.step):
        turns: Counter[_Key] = Counter()
        for wait, key in zip(
            members.tolist(), _keys(events, ownership, waits, members), strict=True
        ):
            candidates = known_lines.get(key, ())
            if turns[key] < len(candidates):
                lines[wait] = candidates[turns[key]]
            elif len(set(candidates)) == 1:
                lines[wait] = candidates[0]
            turns[key] += 1
    return lines


def _keys(events: Events, ownership: Ownership, waits: HostWaits, members: Ints) -> list[_Key]:
    caller = np.where(waits.caller >= 0, waits.caller, waits.event)[members]
    return [
        (phase, ownership.owners.named(owner), events.names[name])
        for phase, owner, name in zip(
            waits.phase[members].tolist(),
            waits.owner[members].tolist(),
            events.name[caller].tolist(),
            strict=True,
        )
    ]
