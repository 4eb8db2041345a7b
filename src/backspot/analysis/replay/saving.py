"""What a step would save if part of its work took less time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.replay.cost import ProfilerCost
from backspot.analysis.replay.host import Floats
from backspot.analysis.replay.recording import Recording
from backspot.analysis.replay.replay import host_times
from backspot.analysis.replay.simulation import Variants, simulate
from backspot.analysis.timeline import grouped, numbered
from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.trace.events import Ints, Mask

__all__ = [
    "Change",
    "Saving",
    "free_owners",
    "owners_within",
    "saved",
    "scaled_owners",
    "scaled_spans",
    "what_if",
]

_CELLS = 16_000_000  # numbers in the table of a simulation: 128 MB


@dataclass(frozen=True, slots=True)
class Change:
    """Work that takes another time than it did.

    Attributes:
        spans: indices of spans; the host's time in them is scaled, and that of the engine
            directly after them.
        span_factors: for each span what its time is multiplied by, 0 for free.
        work: indices of device work.
        work_factors: for each piece of device work what its time is multiplied by.
        waits: calls in which the host no longer waits for a device, as indices into ``Events``.
    """

    spans: Ints
    span_factors: Floats
    work: Ints
    work_factors: Floats
    waits: Ints = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Saving:
    """What each step saves.

    Attributes:
        typical_ns: nanoseconds, the median over the steps.
        low_ns: the lower quartile over the steps, at that end of the uncertainty of the profiler's
            cost where it is lower.
        high_ns: the upper quartile, at the other end.
        by_step: what each step saves; a step can lose where the work of another moves into it.
    """

    typical_ns: float
    low_ns: float
    high_ns: float
    by_step: tuple[float, ...]


def scaled_owners(
    ownership: Ownership, factors: Mapping[int, float], *, forward: bool = False
) -> Change:
    """Return the change in which the backward of some owners takes another time.

    This scales the nodes of a module, the engine's time after each of these, what runs again in
    them, and the device work that they launch. A node that is free waits for no device. The
    module's share of the optimizer is not scaled. A compiled kernel that works for several modules
    is scaled by their shares.

    Args:
        ownership: the owners of a trace.
        factors: for each owner what its time is multiplied by, 0 for free.
        forward: scale the forward calls of modules, and their device work, too.
    """
    factor = np.ones(len(ownership.owners))
    factor[list(factors)] = list(factors.values())
    of_spans, of_work = factor[ownership.owner], ownership.work_shares.mean(factor)
    spans = (of_spans != 1) & (forward | (ownership.passes.of_span >= 0))
    work = (of_work != 1) & (forward | (ownership.work.run >= 0))
    return Change(
        spans=np.flatnonzero(spans),
        span_factors=of_spans[spans],
        work=np.flatnonzero(work),
        work_factors=of_work[work],
        waits=_waits_in(ownership, spans & (of_spans == 0)),
    )


def free_owners(ownership: Ownership, group: Ints | None = None) -> dict[int, Change]:
    """Return for each group of owners the change in which their backward is free.

    As ``scaled_owners`` for one group after the other, in one go.

    Args:
        ownership: the owners of a trace.
        group: the group of each owner, such as its row; by default each owner is one.

    Returns:
        The change for each group with a backward.
    """
    group = np.arange(len(ownership.owners)) if group is None else group
    waits = ownership.waits
    in_pass = ownership.passes.of_span >= 0
    spans = dict(grouped(group[ownership.owner], np.flatnonzero(in_pass)))
    shares = ownership.work_shares
    share = np.flatnonzero(np.repeat(ownership.work.run >= 0, shares.count))
    work = dict(grouped(group[shares.owner], share))
    calls = dict(grouped(group[ownership.owner[waits.span]], np.flatnonzero(in_pass[waits.span])))
    none = np.empty(0, np.int64)
    found = {}
    for number in sorted({*spans, *work}):
        mine = spans.get(number, none)
        done, part = shares.parts(work.get(number, none))
        found[number] = Change(
            spans=mine,
            span_factors=np.zeros(len(mine)),
            work=done,
            work_factors=1 - part,
            waits=waits.event[calls.get(number, none)],
        )
    return found


def _waits_in(ownership: Ownership, spans: Mask) -> Ints:
    """Return the calls that wait for a device in these spans, as indices into ``Events``."""
    waits = ownership.waits
    mine: Ints = waits.event[spans[waits.span]]
    return mine


def what_if(recording: Recording, cost: ProfilerCost, factors: Mapping[str, float]) -> Saving:
    """Return what a step would take less if the backward of some modules took another time.

    Args:
        recording: the recording.
        cost: what the profiler cost; steps are compared without that cost.
        factors: for each module's path what the time of its backward is multiplied by: 0 for free,
            0.5 for twice as fast. The modules in it are scaled too, if their own paths are not
            given. The path of an owner that is no module names that owner alone.

    Raises:
        UsageError: If a path names no owner of the trace, or a factor is not between 0 and 1.
    """
    ownership = recording.ownership
    owners: dict[int, float] = {}
    for path in sorted(factors, key=len):
        factor = factors[path]
        if not 0 <= factor <= 1:
            raise UsageError(f"{quoted(path)}: {quoted(factor)} is not a factor between 0 and 1")
        mine = owners_within(ownership, path)
        if not mine:
            raise UsageError(f"no module {quoted(path)} has a backward in this recording")
        owners.update(dict.fromkeys(mine, factor))
    return saved(recording, cost, [scaled_owners(ownership, owners)])[0]


def owners_within(ownership: Ownership, path: str) -> list[int]:
    """Return the owner with a path and, for a module, those of all modules in it."""
    owners = ownership.owners
    return [
        owner
        for owner in range(len(owners))
        if owners.path(owner) == path
        or (
            owners.module(owner) is not None
            and (path == "" or owners.path(owner).startswith(f"{path}."))
        )
    ]


def scaled_spans(
    spans: Mask, work: Mask, factor: float = 0.0, *, waits: Ints | None = None
) -> Change:
    """Return the change in which these spans and pieces of device work take another time.

    Args:
        spans: for each span whether it changes.
        work: for each piece of device work whether it changes.
        factor: what their time is multiplied by, 0 for free.
        waits: calls in which the host no longer waits for a device, as indices into ``Events``.
    """
    mine, done = np.flatnonzero(spans), np.flatnonzero(work)
    none = np.empty(0, np.int64)
    return Change(
        spans=mine,
        span_factors=np.full(len(mine), factor),
        work=done,
        work_factors=np.full(len(done), factor),
        waits=none if waits is None else waits,
    )


def saved(
    recording: Recording, cost: ProfilerCost, changes: Sequence[Change]
) -> tuple[Saving, ...]:
    """Return what a step would take less with each of these changes alone.

    The recording is replayed once for many changes, for the cost of the profiler and for both ends
    of its uncertainty. The time is linear in the number of changes.

    Args:
        recording: the recording.
        cost: what the profiler cost; steps are compared without that cost.
        changes: the changes.
    """
    if not changes:
        return ()
    spent = [_saved(recording, one, changes) for one in cost.range()]
    return tuple(_saving([table[:, at] for table in spent]) for at in range(len(changes)))


def _saving(by_step: list[Floats]) -> Saving:
    quartiles = np.array([np.quantile(one, [0.25, 0.5, 0.75]) for one in by_step])
    return Saving(
        typical_ns=float(quartiles[0, 1]),
        low_ns=float(quartiles.min()),
        high_ns=float(quartiles.max()),
        by_step=tuple(by_step[0].tolist()),
    )


def _saved(recording: Recording, cost: ProfilerCost, changes: Sequence[Change]) -> Floats:
    """Return what each step (rows) saves with each change (columns), in nanoseconds."""
    lengths, work = recording.host(cost), recording.work(cost)
    host = host_times(recording, lengths[:, None])
    by_span = _BySpan(recording, lengths)
    found = np.empty((len(recording.steps.start), len(changes)))
    size = max(1, _CELLS // max(1, len(work)))
    for first in range(0, len(changes), size):
        some = changes[first : first + size]
        variants = Variants(
            count=len(some) + 1,  # the first is without any change
            host=_sparse([by_span.less(change) for change in some]),
            work=_sparse([(one.work, work[one.work] * (1 - one.work_factors)) for one in some]),
            skipped=_skipped(some),
        )
        simulated = simulate(recording, host, work[:, None], variants)
        taken = simulated.step_lengths(recording)
        found[:, first : first + size] = taken[:, :1] - taken[:, 1:]
    return found


def _sparse(less: Sequence[tuple[Ints, Floats]]) -> dict[int, list[tuple[int, float]]]:
    """Return, for each index that a change makes shorter, the variants and by how much.

    Args:
        less: for each change its indices and nanoseconds; the first change is variant 1.
    """
    found: dict[int, list[tuple[int, float]]] = {}
    for column, (index, amount) in enumerate(less, 1):
        for at, one in zip(index.tolist(), amount.tolist(), strict=True):
            found.setdefault(at, []).append((column, one))
    return found


def _skipped(changes: Sequence[Change]) -> dict[int, Mask]:
    """Return the waits that some changes skip, and the variants that do; the first one is none."""
    found: dict[int, Mask] = {}
    for column, change in enumerate(changes, 1):
        for event in change.waits.tolist():
            found.setdefault(event, np.zeros(len(changes) + 1, bool))[column] = True
    return found


class _BySpan:
    """The host's intervals by the span that they belong to."""

    def __init__(self, recording: Recording, lengths: Floats) -> None:
        line = recording.line
        order = np.argsort(line.span, kind="stable")
        self._lengths, self._station = lengths[order], recording.station[order]
        count = len(recording.ownership.spans.start)
        self._begins = np.searchsorted(line.span[order], np.arange(count + 1))

    def less(self, change: Change) -> tuple[Ints, Floats]:
        """Return the stations that the host comes to earlier, and by how many nanoseconds."""
        first, last = self._begins[change.spans], self._begins[change.spans + 1]
        number = last - first
        offsets = np.repeat(first - np.append(0, np.cumsum(number)[:-1])[: len(number)], number)
        at = np.arange(int(number.sum())) + offsets
        amount = self._lengths[at] * np.repeat(1.0 - change.span_factors, number)
        stations, which = numbered(self._station[at])
        less: Floats = np.bincount(which, amount, minlength=len(stations)).astype(np.float64)
        return stations, less
