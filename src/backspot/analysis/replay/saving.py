"""Replay a recording with many changes at a time: the steps with part of their work taking less."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.replay.host import Floats, ProfilerCost
from backspot.analysis.replay.replay import host_times
from backspot.analysis.replay.replayable import Replayable
from backspot.analysis.replay.simulation import simulate
from backspot.analysis.timeline import grouped, take
from backspot.trace.events import Ints, Mask

_CELLS = 16_000_000  # numbers in the tables of a simulation: 128 MB


@dataclass(frozen=True, slots=True)
class Change:
    """Work that takes another time than it did.

    Attributes:
        host: indices of what the host does, as in ``Replayable.part``: its time for them is scaled,
            and that of the engine directly after spans.
        host_factors: for each what its time is multiplied by, 0 for free.
        work: indices of device work.
        work_factors: for each piece of device work what its time is multiplied by.
        waits: calls in which the host no longer waits for a device, as indices into ``Events``.
    """

    host: Ints
    host_factors: Floats
    work: Ints
    work_factors: Floats
    waits: Ints = field(default_factory=lambda: np.empty(0, np.int64))


def scaled_owners(
    ownership: Ownership, factors: Mapping[int, float], *, forward: bool = False
) -> Change:
    """Return the change in which the backward of some owners takes another time.

    This scales the nodes of a module, the engine's time after each of these, what runs again in
    them, and the device work that they launch. A node that is free waits for no device. The
    module's share of the optimizer is not scaled. A compiled kernel that works for several modules
    is scaled by their shares, and so is its launch.

    Args:
        factors: for each owner what its time is multiplied by, 0 for free.
        forward: scale the forward calls of modules, and their device work, too.
    """
    factor = np.ones(len(ownership.owners))
    factor[list(factors)] = list(factors.values())
    of_spans, of_work = factor[ownership.owner], ownership.work_shares.mean(factor)
    of_host = np.append(of_spans, ownership.launch_shares.mean(factor))
    host = (of_host != 1) & (forward | _in_backward(ownership))
    work = (of_work != 1) & (forward | (ownership.work.run >= 0))
    return Change(
        host=np.flatnonzero(host),
        host_factors=of_host[host],
        work=np.flatnonzero(work),
        work_factors=of_work[work],
        waits=ownership.waits.event[(host & (of_host == 0))[ownership.waits.span]],
    )


def _in_backward(ownership: Ownership) -> Mask:
    """Return whether the host does each span, and each compiled launch behind them, in a pass."""
    in_pass: Mask = ownership.passes.of_span >= 0
    return np.append(in_pass, take(in_pass, ownership.compiled.span, False))


def free_owners(ownership: Ownership) -> dict[int, Change]:
    """Return for each owner with a backward the change in which that backward is free.

    As ``scaled_owners`` for one owner after the other, in one go.
    """
    waits = ownership.waits
    in_backward, count = _in_backward(ownership), len(ownership.spans.start)
    in_pass, of_launches = in_backward[:count], in_backward[count:]
    spans = dict(grouped(ownership.owner, np.flatnonzero(in_pass)))
    launched = _by_owner(ownership.launch_shares, of_launches)
    worked = _by_owner(ownership.work_shares, ownership.work.run >= 0)
    calls = dict(grouped(ownership.owner[waits.span], np.flatnonzero(in_pass[waits.span])))
    none = np.empty(0, np.int64)
    found = {}
    for number in sorted({*spans, *launched, *worked}):
        mine = spans.get(number, none)
        launch, part_of_launch = ownership.launch_shares.parts(launched.get(number, none))
        done, part = ownership.work_shares.parts(worked.get(number, none))
        found[number] = Change(
            host=np.append(mine, launch + count),
            host_factors=np.append(np.zeros(len(mine)), 1 - part_of_launch),
            work=done,
            work_factors=1 - part,
            waits=waits.event[calls.get(number, none)],
        )
    return found


def _by_owner(shares: Shares, chosen: Mask) -> dict[int, Ints]:
    """Return the shares of the chosen things by their owner."""
    mine = np.flatnonzero(np.repeat(chosen, shares.count))
    return {number: mine[at] for number, at in grouped(shares.owner[mine])}


def change_of_paths(ownership: Ownership, factors: Mapping[str, float]) -> Change:
    """Return the change in which the backward of some modules takes another time.

    Args:
        factors: for each module's path what the time of its backward is multiplied by: 0 for free,
            0.5 for twice as fast. The modules in it are scaled too, if their own paths are not
            given. The path of an owner that is no module names that owner alone.
    """
    owners: dict[int, float] = {}
    for path, within in owners_within(ownership, sorted(factors, key=len)).items():
        owners.update(dict.fromkeys(within, factors[path]))
    return scaled_owners(ownership, owners)


def owners_within(ownership: Ownership, paths: Iterable[str]) -> dict[str, list[int]]:
    """Return for each path the owner with it and, for a module, those of all modules in it."""
    owners = ownership.owners
    found: dict[str, list[int]] = {path: [] for path in paths}
    roots = {(module.path, module.root) for _, module in owners.each_module()}
    for owner in Special:
        found.get(owner.path, []).append(owner)
    for number, module in owners.each_module():
        for path in {"", *accumulate(module.path.split("."), "{}.{}".format)}:
            if path in found and (path, module.root) in roots:
                found[path].append(number)
    return found


def free_spans(
    ownership: Ownership,
    spans: Mask,
    work: Mask,
    *,
    waits: Ints | None = None,
) -> Change:
    """Return the change in which these spans and pieces of device work are free.

    Args:
        spans: for each span whether it is free, with the launches of compiled code in it.
        work: for each piece of device work whether it is free.
        waits: calls in which the host no longer waits for a device, as indices into ``Events``.
    """
    launches = take(spans, ownership.compiled.span, False)
    mine, done = np.flatnonzero(np.append(spans, launches)), np.flatnonzero(work)
    none = np.empty(0, np.int64)
    return Change(
        host=mine,
        host_factors=np.zeros(len(mine)),
        work=done,
        work_factors=np.zeros(len(done)),
        waits=none if waits is None else waits,
    )


@dataclass(frozen=True, slots=True)
class Replays:
    """A recording replayed with many changes at one cost of the profiler; nanoseconds.

    Attributes:
        steps: how long each step takes without any change.
        saved: what each step (rows) saves with each change (columns).
        shorter: for each change the time that it takes from host and devices in an average step.
    """

    steps: Floats
    saved: Floats
    shorter: Floats


def replays(
    recording: Replayable, cost: ProfilerCost, changes: Sequence[Change]
) -> tuple[Replays, ...]:
    """Replay a recording with each of these changes alone.

    The recording is run through once for many changes, for the cost of the profiler and for both
    ends of its uncertainty. The time is linear in the number of changes.

    Returns:
        The replays at the cost, and where it is uncertain at the least and the greatest likely one.
    """
    costs = cost.range()
    lengths, work = recording.host(*costs), recording.work(*costs)
    host = host_times(recording, lengths)
    by_part = _ByPart(recording, lengths)
    steps = np.empty((0, len(costs)))
    found = np.empty((len(recording.steps.start), len(costs), len(changes)))
    shorter = np.empty((len(costs), len(changes)))
    size = max(1, _CELLS // max(1, 3 * work.size + 2 * host.size))
    for first in range(0, max(1, len(changes)), size):
        some = changes[first : first + size]
        of_host = by_part.less([(one.host, one.host_factors) for one in some])
        of_work = _less(*_joined([(one.work, one.work_factors) for one in some]), work)
        simulated = simulate(
            recording,
            of_host.taken_from(host, len(some)),
            of_work.taken_from(work, len(some)),
            _skipped(some, len(costs)),
        )
        taken = simulated.step_lengths(recording, work[:, :, None])
        steps = taken[:, :, 0]
        found[:, :, first : first + size] = taken[:, :, :1] - taken[:, :, 1:]
        waited = [recording.events.duration[change.waits].sum() for change in some]
        shorter[:, first : first + size] = (
            of_host.by_column(len(some)) + of_work.by_column(len(some)) + waited
        )
    shorter /= max(1, len(steps))
    return tuple(Replays(steps[:, at], found[:, at], shorter[at]) for at in range(len(costs)))


@dataclass(frozen=True, slots=True)
class _Less:
    """What some changes make shorter, sorted by index; one entry for each index and change.

    Attributes:
        index: the station or the piece of work.
        column: the variant; that of the first change is 1.
        amount: nanoseconds, with one column for each cost.
    """

    index: Ints
    column: Ints
    amount: Floats

    def taken_from(self, times: Floats, count: int) -> Floats:
        """Return the times in each variant: without any change, and then with each change.

        Args:
            times: nanoseconds of each index (rows), with one column for each cost.
            count: the number of changes.
        """
        found: Floats = np.repeat(times[:, :, None], count + 1, axis=2)
        found[self.index, :, self.column] -= self.amount
        return found

    def by_column(self, count: int) -> Floats:
        """Return what each change takes less in all (columns), at each cost (rows)."""
        sums = [np.bincount(self.column - 1, one, minlength=count) for one in self.amount.T]
        found: Floats = np.stack(sums).astype(np.float64)
        return found


def _joined(changes: Sequence[tuple[Ints, Floats]]) -> tuple[Ints, Floats, Ints]:
    """Return all indices of some changes, with their factors and the variant of each."""
    empty = np.empty(0, np.int64)
    column = np.repeat(np.arange(1, len(changes) + 1), [len(one) for one, _ in changes])
    index = np.concatenate([empty, *(one for one, _ in changes)])
    return index, np.concatenate([empty, *(factor for _, factor in changes)]), column


def _less(
    rows: Ints, factors: Floats, column: Ints, amount: Floats, index: Ints | None = None
) -> _Less:
    """Return what changes make shorter.

    Args:
        rows: rows of ``amount`` that changes make shorter.
        factors: what each is multiplied by.
        column: the variant of each.
        amount: nanoseconds, with one column for each cost.
        index: the index of each row of ``amount``; by default its own.
    """
    at = rows if index is None else index[rows]
    key = at * (int(column.max(initial=0)) + 1) + column
    order = np.argsort(key, kind="stable")
    key = key[order]
    begins = np.flatnonzero(np.append(True, key[1:] != key[:-1]))[: len(key)]
    less = amount.take(rows[order], axis=0)
    less *= (1.0 - factors[order])[:, None]
    summed: Floats = np.add.reduceat(less, begins, axis=0) if len(begins) else less
    first = order[begins]
    return _Less(at[first], column[first], summed)


def _skipped(changes: Sequence[Change], costs: int) -> dict[int, Mask]:
    """Return the waits that some changes skip, and the variants that do, as ``Variants`` has it."""
    found: dict[int, Mask] = {}
    for column, change in enumerate(changes, 1):
        for event in change.waits.tolist():
            found.setdefault(event, np.zeros(len(changes) + 1, bool))[column] = True
    return {event: np.tile(skips, costs) for event, skips in found.items()}


class _ByPart:
    """The host's intervals by what they are done for."""

    def __init__(self, recording: Replayable, lengths: Floats) -> None:
        part = recording.part
        order = np.argsort(part, kind="stable")
        self._lengths, self._station = lengths[order], recording.station[order]
        ownership = recording.ownership
        count = len(ownership.spans.start) + len(ownership.compiled.event)
        self._begins = np.searchsorted(part[order], np.arange(count + 1))

    def less(self, changes: Sequence[tuple[Ints, Floats]]) -> _Less:
        """Return the stations that the host comes to earlier, and by how many nanoseconds.

        Args:
            changes: for each change what the host does, and what its time is multiplied by.
        """
        parts, factors, column = _joined(changes)
        first = self._begins[parts]
        number = self._begins[parts + 1] - first
        rows = np.repeat(first - (np.cumsum(number) - number), number)
        rows += np.arange(len(rows))
        of_rows = np.repeat(factors, number), np.repeat(column, number)
        return _less(rows, *of_rows, self._lengths, self._station)
