"""What a step would save if part of its work took less time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.replay.cost import ProfilerCost
from backspot.analysis.replay.host import Floats
from backspot.analysis.replay.recording import Recording
from backspot.analysis.replay.replay import host_times
from backspot.analysis.replay.simulation import simulate
from backspot.analysis.timeline import grouped
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

_CELLS = 4_000_000  # numbers in one table of the simulation


@dataclass(frozen=True, slots=True)
class Change:
    """Work that takes another time than it did.

    Attributes:
        spans: indices of spans; the host's time in them is scaled, and that of the engine
            directly after them.
        span_factors: for each span what its time is multiplied by, 0 for free.
        work: indices of device work.
        work_factors: for each piece of device work what its time is multiplied by.
    """

    spans: Ints
    span_factors: Floats
    work: Ints
    work_factors: Floats


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


def scaled_owners(ownership: Ownership, factors: Mapping[int, float]) -> Change:
    """Return the change in which the backward of some owners takes another time.

    This scales the nodes of a module, the engine's time after each of these, what runs again in
    them, and the device work that they launch. The forward of the module and its share of the
    optimizer are not scaled.

    Args:
        ownership: the owners of a trace.
        factors: for each owner what its time is multiplied by, 0 for free.
    """
    factor = np.ones(len(ownership.owners))
    factor[list(factors)] = list(factors.values())
    spans = np.flatnonzero((ownership.passes.of_span >= 0) & (factor[ownership.owner] != 1))
    work = np.flatnonzero((ownership.work.run >= 0) & (factor[ownership.work_owner] != 1))
    return Change(spans, factor[ownership.owner[spans]], work, factor[ownership.work_owner[work]])


def free_owners(ownership: Ownership) -> dict[int, Change]:
    """Return for each owner with a backward the change in which its backward is free."""
    spans = np.flatnonzero(ownership.passes.of_span >= 0)
    work = np.flatnonzero(ownership.work.run >= 0)
    of_spans = dict(grouped(ownership.owner, spans))
    of_work = dict(grouped(ownership.work_owner, work))
    nothing = np.empty(0, np.int64)
    found = {}
    for owner in sorted({*of_spans, *of_work}):
        mine, done = of_spans.get(owner, nothing), of_work.get(owner, nothing)
        found[owner] = Change(mine, np.zeros(len(mine)), done, np.zeros(len(done)))
    return found


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


def scaled_spans(spans: Mask, work: Mask, factor: float = 0.0) -> Change:
    """Return the change in which these spans and pieces of device work take another time.

    Args:
        spans: for each span whether it changes.
        work: for each piece of device work whether it changes.
        factor: what their time is multiplied by, 0 for free.
    """
    mine, done = np.flatnonzero(spans), np.flatnonzero(work)
    return Change(mine, np.full(len(mine), factor), done, np.full(len(done), factor))


def saved(
    recording: Recording, cost: ProfilerCost, changes: Sequence[Change]
) -> tuple[Saving, ...]:
    """Return what a step would take less with each of these changes alone.

    The recording is replayed once for many changes, for the cost of the profiler and for both ends
    of its uncertainty. The time is linear in the number of changes; see ``benchmarks/cost``.

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
    host = host_times(recording, lengths[:, None])[:, 0]
    by_span = _BySpan(recording, lengths)
    steps = len(recording.steps.start)
    found = np.empty((steps, len(changes)))
    size = max(1, _CELLS // max(1, len(host) + len(work)))
    for first in range(0, len(changes), size):
        some = changes[first : first + size]
        hosts = np.repeat(host[:, None], len(some) + 1, axis=1)
        works = np.repeat(work[:, None], len(some) + 1, axis=1)
        for column, change in enumerate(some, 1):
            by_span.scale(hosts[:, column], change)
            works[change.work, column] *= change.work_factors
        taken = simulate(recording, hosts, works).step_lengths(recording)
        found[:, first : first + size] = taken[:, :1] - taken[:, 1:]
    return found


class _BySpan:
    """The host's intervals by the span that they belong to."""

    def __init__(self, recording: Recording, lengths: Floats) -> None:
        line = recording.line
        order = np.argsort(line.span, kind="stable")
        self._lengths, self._station = lengths[order], recording.station[order]
        count = len(recording.ownership.spans.start)
        self._begins = np.searchsorted(line.span[order], np.arange(count + 1))

    def scale(self, host: Floats, change: Change) -> None:
        """Scale in place the host's time to each station."""
        first, last = self._begins[change.spans], self._begins[change.spans + 1]
        number = last - first
        offsets = np.repeat(first - np.append(0, np.cumsum(number)[:-1])[: len(number)], number)
        at = np.arange(int(number.sum())) + offsets
        less = self._lengths[at] * np.repeat(1.0 - change.span_factors, number)
        host -= np.bincount(self._station[at], less, minlength=len(host))
