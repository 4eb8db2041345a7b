"""Replay a recording with many changes at a time: the steps with part of their work taking less."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.replay.host import ZERO, Floats, ProfilerCost
from backspot.analysis.replay.replay import host_times
from backspot.analysis.replay.replayable import Replayable
from backspot.analysis.replay.simulation import simulate
from backspot.analysis.timeline import grouped, numbered
from backspot.trace.events import Ints, Mask

_CELLS = 8_000_000  # numbers in the tables of a simulation: 64 MB; larger ones are no faster


class Change(msgspec.Struct, frozen=True):
    """Work that takes another time than it did.

    Attributes:
        host: indices of intervals of the host's line.
        host_factors: for each what its time is multiplied by, 0 for free.
        work: indices of device work.
        work_factors: for each piece of device work what its time is multiplied by.
        waits: calls in which the host no longer waits for a device, as indices into ``Events``.
        update: what part of the update of the parameters goes: of the host's time and of the device
            work.
    """

    host: Ints
    host_factors: Floats
    work: Ints
    work_factors: Floats
    waits: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    update: tuple[float, float] = (0.0, 0.0)


def change_of(
    recording: Replayable,
    parts: tuple[Ints, Floats],
    work: tuple[Ints, Floats],
    waits: Ints | None = None,
    update: tuple[float, float] = (0.0, 0.0),
) -> Change:
    """Return a change.

    Args:
        parts: what the host does, as in ``Replayable.part``, and the factor of each. The engine's
            time directly after a span is a part of the span.
        work: device work, and the factor of each piece.
        waits: as in ``Change``.
        update: as in ``Change``.
    """
    host, number = recording.intervals(parts[0])
    none = np.empty(0, np.int64)
    skipped = none if waits is None else waits
    return Change(host, np.repeat(parts[1], number), *work, skipped, update)


def scaled_owners(recording: Replayable, factors: Mapping[int, float]) -> Change:
    """Return the change in which the work of some owners takes another time.

    This scales the calls of a module, its nodes, the engine's time after each of these, what runs
    again in them, the device work that they launch, and its share of the update of the parameters.
    What is free waits for no device. A compiled kernel that works for several modules is scaled by
    their shares, and so is its launch.

    Args:
        factors: for each owner what its time is multiplied by, 0 for free.
    """
    ownership = recording.ownership
    factor = np.ones(len(ownership.owners))
    factor[list(factors)] = list(factors.values())
    of_spans, of_work = factor[ownership.owner], ownership.work_shares.mean(factor)
    of_work[recording.outside] = factor[Special.OUTSIDE]
    of_parts = np.concatenate(
        [of_spans, ownership.launch_shares.mean(factor), factor[[Special.OUTSIDE]]]
    )
    host, work = np.flatnonzero(of_parts != 1), np.flatnonzero(of_work != 1)
    of_host, of_device = (recording.of_update @ (1 - factor)).tolist()
    return change_of(
        recording,
        (host, of_parts[host]),
        (work, of_work[work]),
        ownership.waits.event[of_spans[ownership.waits.span] == 0],
        (of_host, of_device),
    )


def free_owners(recording: Replayable) -> dict[int, Change]:
    """Return for each owner with any work the change in which that work is free.

    As ``scaled_owners`` for one owner after the other, in one go.
    """
    ownership = recording.ownership
    waits, count = ownership.waits, len(ownership.spans.start)
    spans = dict(grouped(ownership.owner))
    launched, worked = _by_owner(ownership.launch_shares), _by_owner(ownership.work_shares)
    calls = dict(grouped(ownership.owner[waits.span]))
    none, nothing = np.empty(0, np.int64), (np.empty(0, np.int64), np.empty(0))
    changes = {}
    for number in sorted({*spans, *launched, *worked} - {int(Special.ENGINE)}):
        launch, part_of_launch = launched.get(number, nothing)
        worked_on, fraction = worked.get(number, nothing)
        own_spans, outside = spans.get(number, none), none
        if number == Special.OUTSIDE:
            outside = np.array([recording.forward_outside])
            worked_on = np.append(worked_on, recording.outside)
            fraction = np.append(fraction, np.ones(len(recording.outside)))
        done_for = np.concatenate([own_spans, launch + count, outside])
        left_over = np.concatenate(
            [np.zeros(len(own_spans)), 1 - part_of_launch, np.zeros(len(outside))]
        )
        of_host, of_device = recording.of_update[:, number].tolist()
        changes[number] = change_of(
            recording,
            (done_for, left_over),
            (worked_on, 1 - fraction),
            waits.event[calls.get(number, none)],
            (of_host, of_device),
        )
    return changes


def _by_owner(shares: Shares) -> dict[int, tuple[Ints, Floats]]:
    """Return what each owner has a share of, and how large its share is."""
    by_owner = {}
    for owner, members in grouped(shares.owner):
        by_owner[owner] = shares.parts(members)
    return by_owner


def change_of_paths(recording: Replayable, factors: Mapping[str, float]) -> Change:
    """Return the change in which some modules take another time.

    Args:
        factors: for each module's path what its time is multiplied by: 0 for free, 0.5 for twice as
            fast. The modules in it are scaled too, if their own paths are not given. The path of an
            owner that is no module names that owner alone.
    """
    owners: dict[int, float] = {}
    paths = sorted(factors, key=len)
    for path, within in owners_within(recording.ownership, paths).items():
        owners.update(dict.fromkeys(within, factors[path]))
    return scaled_owners(recording, owners)


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


class Replays(msgspec.Struct, frozen=True):
    """A recording replayed with many changes at one cost of the profiler; nanoseconds.

    Attributes:
        recorded: how long each step takes at no cost of the profiler, as it was recorded.
        replayed: the same at this cost.
        steps: how long each step takes without any change. Where workers pace the training, their
            mean is from batch to batch.
        saved: what each step (rows) saves with each change (columns).
        shorter: for each change the time that it takes from host and devices in an average step.
    """

    recorded: Floats
    replayed: Floats
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
    costs = *cost.range(), ZERO  # the last one without any change
    lengths, work = recording.host(*costs), recording.work(*costs)
    host = host_times(recording, lengths)
    # What comes before the first step stays: else that step would begin sooner, and end as late.
    of_steps = recording.steps.of_work >= 0
    begins = recording.graph.launch[recording.steps.of_work == 0].min(
        initial=recording.steps.start[0]
    )
    changing = lengths[:, :-1].copy(order="K")
    changing[: np.searchsorted(recording.line.edges[:-1], begins)] = 0.0
    changing_work = np.where(of_steps[:, None], work[:, :-1], 0.0)
    updating = _of_update(recording, changing, changing_work)
    recorded, steps = np.empty(0), np.empty((0, len(costs) - 1))
    replayed = steps
    savings = np.empty((len(recording.steps.start), len(costs) - 1, len(changes)))
    shorter = np.empty((len(costs) - 1, len(changes)))
    first_paced, paced = _paced_by_workers(recording)
    size = max(1, _CELLS // max(1, 3 * work.size + 2 * host.size))
    for first in range(0, max(1, len(changes)), size):
        batch = changes[first : first + size]
        on_host = [(change.host, change.host_factors) for change in batch]
        on_device = [(change.work, change.work_factors) for change in batch]
        of_host, less_of_host = _with_changes(host, on_host, changing, recording.station)
        of_work, less_of_work = _with_changes(work, on_device, changing_work)
        taken_off = less_of_host + less_of_work
        for table, (index, amount), side in zip((of_host, of_work), updating, (0, 1), strict=True):
            gone = np.array([change.update[side] for change in batch])
            _by_cost(table, len(batch))[index, :, 1:] -= amount[:, :, None] * gone
            taken_off += amount.sum(axis=0)[:, None] * gone
        simulated = simulate(recording, of_host, of_work, _skipped(batch, len(costs) - 1))
        lengths = simulated.step_lengths(recording, of_work)
        recorded, step_times = lengths[:, -1], _by_cost(lengths, len(batch))
        replayed = step_times[:, :, 0]
        steps = replayed.copy()
        saved = step_times[:, :, :1] - step_times[:, :, 1:]
        if len(paced):
            times = np.diff(_by_cost(simulated.at(recording, paced), len(batch)), axis=0)
            between = times[:, :, :1] - times[:, :, 1:]
            saved[:] = between.mean(axis=0)
            saved[first_paced + 1 : first_paced + len(paced)] = between
            steps[0] += times[:, :, 0].mean(axis=0) * len(steps) - steps.sum(axis=0)
        elif recording.workers_decide:  # the next late batch comes after the recording
            fetches = set(recording.batches.event.tolist())
            saved[:, :, [fetches.isdisjoint(change.waits.tolist()) for change in batch]] = 0.0
        savings[:, :, first : first + size] = saved
        waited = [recording.events.duration[change.waits].sum() for change in batch]
        shorter[:, first : first + size] = taken_off + waited
    shorter /= max(1, len(steps))
    return tuple(
        Replays(recorded, replayed[:, index], steps[:, index], savings[:, index], shorter[index])
        for index in range(len(shorter))
    )


def _paced_by_workers(recording: Replayable) -> tuple[int, Ints]:
    """Return moments from which to which a step's time counts where workers decide it.

    There a faster step ends sooner, and the next one waits for longer. The first recorded step
    would have no longer wait, as what came before it is not recorded, and take the time for saved.
    From batch to batch it is the same in all steps.

    Returns:
        The first step that waits for workers; and for each step from it to the last that waits,
        when its batch has arrived, or its end if it does not wait. Empty if few steps lie between:
        then only the whole training can tell that workers decide.
    """
    steps = recording.steps
    ends = np.array([wait.end for wait in recording.waits if wait.follows >= 0], np.int64)
    step = np.searchsorted(steps.start, ends, side="right") - 1
    ends, step = ends[step >= 0], step[step >= 0]
    if not len(step) or step.max() - step.min() < max(1, len(steps.start) // 2):
        return 0, ends[:0]
    paced_ends = steps.host_end.copy()
    paced_ends[step] = ends  # sorted: the last one of each step
    first = int(step.min())
    return first, paced_ends[first : int(step.max()) + 1]


def _by_cost(table: Floats, count: int) -> Floats:
    """Return a table by cost and variant (the last axes), without its last column."""
    return table[:, :-1].reshape(len(table), (table.shape[1] - 1) // (count + 1), count + 1)


def _of_update(
    recording: Replayable, lengths: Floats, work: Floats
) -> tuple[tuple[Ints, Floats], tuple[Ints, Floats]]:
    """Return how long the host takes for the update before each station, and each piece of work."""
    intervals = recording.intervals(np.array([recording.forward_outside + 1]))[0]
    stations, station = numbered(recording.station[intervals])
    of_host = [np.bincount(station, column, len(stations)) for column in lengths[intervals].T]
    return (stations, np.stack(of_host, axis=1)), (recording.update, work[recording.update])


def _with_changes(
    times: Floats,
    changes: Sequence[tuple[Ints, Floats]],
    amount: Floats,
    index: Ints | None = None,
) -> tuple[Floats, Floats]:
    """Return the times in each variant (columns), and what each change takes less in all.

    For each cost but the last, the times are without any change and then with each; and the last
    variant is without any at the last cost. The second has a row a cost and a column a change.

    Args:
        times: nanoseconds of each station or piece of work (rows), with one column for each cost.
        changes: the rows of ``amount`` that each makes shorter, and what these are multiplied by.
        amount: nanoseconds, with one column for each cost but the last.
        index: the row of ``times`` that each row of ``amount`` is a part of; by default its own.
    """
    rows, factors, column = _joined(changes)
    variants = np.empty((len(times), amount.shape[1] * (len(changes) + 1) + 1))
    variants[:, -1] = times[:, -1]
    _by_cost(variants, len(changes))[:] = times[:, :-1, None]
    key = (rows if index is None else index[rows]) * variants.shape[1] + column
    shortened, left = np.empty((amount.shape[1], len(changes))), 1.0 - factors
    for column_index, column_amount in enumerate(amount.T):
        less = column_amount.take(rows) * left
        shortened[column_index] = np.bincount(column, less, len(changes) + 1)[1:]
        np.subtract.at(variants.reshape(-1), key + column_index * (len(changes) + 1), less)
    return variants, shortened


def _joined(changes: Sequence[tuple[Ints, Floats]]) -> tuple[Ints, Floats, Ints]:
    """Return all indices of some changes, with their factors and the variant of each."""
    empty = np.empty(0, np.int64)
    column = np.repeat(np.arange(1, len(changes) + 1), [len(indices) for indices, _ in changes])
    index = np.concatenate([empty, *(indices for indices, _ in changes)])
    return index, np.concatenate([empty, *(factor for _, factor in changes)]), column


def _skipped(changes: Sequence[Change], costs: int) -> dict[int, Mask]:
    """Return the waits that some changes skip, and the variants that do, as ``Variants`` has it."""
    skipped: dict[int, Mask] = {}
    for column, change in enumerate(changes, 1):
        for event in change.waits.tolist():
            skipped.setdefault(event, np.zeros(len(changes) + 1, bool))[column] = True
    return {event: np.append(np.tile(skips, costs), False) for event, skips in skipped.items()}
