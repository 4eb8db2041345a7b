"""What spans and device work cost on the clock: by step, and in a typical step, in nanoseconds.

Every moment of the clock has one holder: device work that runs or waits to run, else a span of the
host (see ``analysis.accounting.clock``). What a rule picks costs the time that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from backspot.analysis.accounting.amounts import summed, summed_by_step
from backspot.analysis.accounting.holders import Holders
from backspot.analysis.accounting.ledger import Ledger, Spent
from backspot.analysis.attribution.launches import DeviceWork
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.shares import Shares
from backspot.analysis.attribution.spans import Spans
from backspot.analysis.timeline import (
    NOTHING,
    Timeline,
    first_started,
    merged,
    numbered,
    take,
)
from backspot.analysis.typical import TypicalStep
from backspot.results.findings import Place
from backspot.trace.events import Ints, Mask

LEAST_SHARE = 0.01
"""A cause that takes less of a step than this is not there in that step."""
_NAMED = 3  # how many nodes, operators or kernels a finding names


@dataclass(frozen=True, slots=True)
class Removable:
    """The work that the remedy of a cause takes away, and nothing else of a module or a phase.

    No finding has a price above what this takes in a replay.

    Attributes:
        spans: whether each span goes: nodes, and calls of modules that would not be made at all.
        work: whether each piece of device work is part of the cause.
        waits: calls in which the host would not wait for a device, as indices into ``Events``.
        operators: operators that are part of the cause with all that they launch, as indices into
            ``Events``.
        stretches: host time from the first of some operators to the end of the last, with the
            Python between them: one row for the starts, one for the ends.
        with_host: whether the host's part is known. The host also needs time to launch device
            work, but spans can be too coarse to say how much.
    """

    spans: Mask
    work: Mask
    waits: Ints
    operators: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    stretches: Ints = field(default_factory=lambda: np.empty((2, 0), np.int64))
    with_host: bool = True


@dataclass(frozen=True, slots=True)
class Placed:
    """What a cause costs.

    Attributes:
        places: where, with the typical cost of each place, the most expensive first.
        wall_ns: the sum over the places, at most the whole step.
        steps: in how many steps the cause takes at least ``LEAST_SHARE`` of the step.
        removable: the work of the cause; ``None`` where that is not known, as of ``place``,
            ``places_at`` and ``places_by_step``. Without it, a finding has a price only by a named
            change.
        by_step: the clock time in each step; ``None`` if there is none.
    """

    places: tuple[Place, ...]
    wall_ns: int
    steps: int
    removable: Removable | None = None
    by_step: Ints | None = None


@dataclass(frozen=True)
class Costs:
    """The clock time of spans and of device work, and its sums by place and by name.

    Attributes:
        ledger: the clock time of the trace.
        names: the trace's names.
        typical: the steps that count.
    """

    ledger: Ledger
    names: Sequence[str]
    typical: TypicalStep

    # Nanoseconds -----------------------------------------------------------------------------

    @cached_property
    def idle(self) -> Timeline:
        """0 where in the steps no device has work, running or queued; ``NOTHING`` elsewhere."""
        line = self.ledger.clock.whole.cut(self._steps.edges)
        free = (line.values < len(self._spans.start)) & (self._steps.over(line.edges) >= 0)
        # What is not free is one stretch, however many hold it one after the other.
        turns = np.append(True, free[1:] != free[:-1]) if len(free) else free
        return Timeline(line.edges[turns], np.where(free[turns], 0, NOTHING))

    @cached_property
    def device_ns(self) -> Ints:
        """How long each piece of device work runs, whether or not it holds the clock."""
        length: Ints = self._work.end - self._work.start
        return length

    @cached_property
    def work_ns(self) -> Ints:
        """The clock time that each piece of device work holds, its wait in the queue included."""
        work_ns: Ints = self._held[self._holders.work >= 0]
        return work_ns

    @cached_property
    def span_ns(self) -> Ints:
        """The clock time of each span: of the host in it, and of the work that it launched."""
        with_span = self._holders.span >= 0
        return summed(self._holders.span[with_span], self._held[with_span], len(self._spans.start))

    def idle_within(self, start: Ints, end: Ints) -> Ints:
        """Return how long no device has work in each of these intervals, which do not overlap."""
        windows = first_started(start, end, np.arange(len(start)))
        line = self.idle.cut(windows.edges)
        number = windows.over(line.edges[:-1])
        free = np.flatnonzero((number >= 0) & (line.values[:-1] >= 0))
        length = self.ledger.elapsed(line.edges[free], line.edges[free + 1])
        return summed(number[free], length, len(start))

    def elapsed(self, start: Ints, end: Ints) -> Ints:
        """Return how long each of these intervals takes, as the clock has it."""
        return self.ledger.elapsed(start, end)

    # In a typical step -----------------------------------------------------------------------

    def of_spans(self, chosen: Mask) -> int:
        """Return the clock time of these spans and of the device work that they launched."""
        return self.typical.value(self.of_spans_by_step(chosen))

    def of_work(self, chosen: Mask) -> int:
        """Return the clock time of this device work."""
        return self.typical.value(self.of_work_by_step(chosen))

    def of_host(self, chosen: Mask) -> int:
        """Return the clock time that these spans hold on the host, while no device has work."""
        on_host = (self._holders.work < 0) & take(chosen, self._holders.span, False)
        return self.typical.value(self._held_by_step(np.where(on_host, 0, NOTHING), 1)[0])

    def of_device(self, chosen: Mask) -> int:
        """Return how long this device work runs, whether or not it holds the clock."""
        start, ns = self._work.start[chosen], self.device_ns[chosen]
        return self.typical.value(self.times_by_step(start, ns))

    def of_running(self, chosen: Mask) -> int:
        """Return how long what these spans launched runs; without a device, what they take."""
        if (self._work.device >= 0).any():
            return self.of_device(take(chosen, self._work.span, False))
        return self.of_spans(chosen)

    @cached_property
    def busy_ns(self) -> int:
        """The clock time in which any device runs something."""
        on_device = take(self._work.device, self._holders.work) >= 0
        busy = self._spent.where(self._spent.runs & on_device[self._spent.holder])
        return self.typical.value(summed(busy.step, busy.length, len(self.step_ns)))

    # By step ---------------------------------------------------------------------------------

    def spans_by_step(self, group: Ints, count: int) -> Ints:
        """Sum the clock time of spans, with the device work that they launched, by group and step.

        Args:
            group: the group of each span, below ``count``; ``NOTHING`` is left out.
            count: how many groups there are.

        Returns:
            Nanoseconds, with one row a group and one column a step.
        """
        return self._held_by_step(take(group, self._holders.span), count)

    def work_by_step(self, group: Ints, count: int) -> Ints:
        """Sum the clock time of device work, as ``spans_by_step`` does for spans."""
        return self._held_by_step(take(group, self._holders.work), count)

    def times_by_step(self, time: Ints, ns: Ints) -> Ints:
        """Sum these costs by the step in which each of these times is; others are left out."""
        sums: Ints = self._by_step(np.zeros_like(time), self._steps.at(time), ns, 1)[0]
        return sums

    def of_spans_by_step(self, chosen: Mask) -> Ints:
        """Return the clock time of these spans and of the work that they launched, by step."""
        sums: Ints = self.spans_by_step(np.where(chosen, 0, NOTHING), 1)[0]
        return sums

    def of_work_by_step(self, chosen: Mask) -> Ints:
        """Return the clock time of this device work, by step."""
        sums: Ints = self.work_by_step(np.where(chosen, 0, NOTHING), 1)[0]
        return sums

    def holds_in_most_steps(self, by_step: Ints, share: float) -> bool:
        """Whether a cost is at least this share of the step in more than half of the steps.

        One interruption does not make this true, however long it lasts.

        Args:
            by_step: nanoseconds, one entry a step.
            share: of each step's own clock time.
        """
        return 2 * self._steps_with(by_step, share) > len(by_step)

    @property
    def step_ns(self) -> Ints:
        """The clock time of each step."""
        return self.ledger.step_ns

    # By place --------------------------------------------------------------------------------

    def places_of_spans(self, chosen: Mask, *, with_work: bool = True) -> Placed:
        """Return the places of these spans, by default with the device work that they launched."""
        owner = self._placed_at(self.ownership.owner, chosen)
        work = take(chosen, self._work.span, False) & with_work
        placed = self._placed(owner, self.owned_by_step(chosen, work))
        return replace(placed, removable=self.removable(chosen, work))

    def places_of_work(self, chosen: Mask, elsewhere: str = "") -> Placed:
        """Return the places of this device work: the modules with the calls that launched it.

        Args:
            chosen: which work.
            elsewhere: the path to give to work that no module's call launched.
        """
        owner = self._placed_at(self._shares.largest[self._holders.work >= 0], chosen)
        none = np.zeros(len(self._spans.start), bool)
        placed = self._placed(owner, self.owned_by_step(none, chosen))
        removable = replace(self.removable(None, chosen), with_host=False)
        placed = replace(placed, removable=removable)
        return self.elsewhere(placed, elsewhere) if elsewhere else placed

    def elsewhere(self, placed: Placed, path: str) -> Placed:
        """Return the same with another path for what is outside of the model."""
        outside = Special.OUTSIDE.path
        places = (replace(p, path=path) if p.path == outside else p for p in placed.places)
        return replace(placed, places=tuple(places))

    def owned_by_step(self, spans: Mask, work: Mask) -> Ints:
        """Sum the clock time of spans, without device work, and of work, by owner and step.

        The modules inside a compiled region own their shares.

        Args:
            spans: which spans.
            work: which device work.

        Returns:
            Nanoseconds, with one row an owner and one column a step. What no module's call
            launched is outside of the model.
        """
        by_work = take(work, self._holders.work, False)
        chosen = np.where(self._holders.work >= 0, by_work, take(spans, self._holders.span, False))
        spent, pieces = self._spent, np.flatnonzero(chosen[self._spent.holder])
        place, share, divided = self._shares.split(spent.holder[pieces], spent.length[pieces])
        return self._by_step(
            self._shares.owner[share], spent.step[pieces[place]], divided, self._owners
        )

    def operators_by_step(self, time: Ints, ns: Ints, owner: Ints) -> Ints:
        """Sum costs that have a time by owner and step, as ``owned_by_step`` does clock time."""
        return self._by_step(owner, self._steps.at(time), ns, self._owners)

    def running_by_step(self, chosen: Mask) -> Ints:
        """Sum how long device work runs, by owner and step, as ``owned_by_step`` does clock time.

        Args:
            chosen: which device work.
        """
        shares, pieces = self.ownership.work_shares, np.flatnonzero(chosen)
        place, share, divided = shares.split(pieces, self.device_ns[pieces])
        step = self._steps.at(self._work.start[pieces])
        return self._by_step(shares.owner[share], step[place], divided, self._owners)

    def places_at(self, owner: Ints, time: Ints, ns: Ints, count: Ints | None = None) -> Placed:
        """Return the places of costs that have a time, each in the step of its time.

        Args:
            owner: as in ``Ownership.owner``; ``NOTHING`` counts as outside of all modules.
            time: when, one entry for each of ``owner``.
            ns: nanoseconds, one entry for each of ``owner``.
            count: how many things each entry stands for; 1 by default.
        """
        owner = np.maximum(owner, Special.OUTSIDE)
        by_step = self.operators_by_step(time, ns, owner)
        return self._placed(owner, by_step, count)

    def places_by_step(self, by_step: Ints, owner: Ints | None = None) -> Placed:
        """Return the places of costs by owner and step; owners without a cost are left out.

        Args:
            by_step: nanoseconds, with one row an owner and one column a step.
            owner: the owner of each thing to count; one a step by default.
        """
        costly: Mask = np.asarray(by_step.any(axis=1))
        if owner is None:
            owner = np.repeat(np.arange(len(by_step)), by_step.shape[1])
        return self._placed(np.where(costly[owner], owner, NOTHING), by_step)

    def place(self, path: str, by_step: Ints, count: int, class_name: str = "") -> Placed:
        """Return one place: a part of the step, or a module by its path.

        Args:
            by_step: what it costs in each step, in nanoseconds.
            count: how many things there are in all steps.
        """
        cost = min(self.typical.value(by_step), self.typical.value(self.step_ns))
        only = Place(path, class_name, self._per_step(count), cost)
        return Placed((only,), cost, self._steps_with(by_step, LEAST_SHARE), by_step=by_step)

    def removable(
        self,
        spans: Mask | None,
        work: Mask | None,
        waits: Ints | None = None,
        operators: Ints | None = None,
    ) -> Removable:
        """Return the work of a cause; what is left out is not part of the cause.

        A span that is part of the cause waits for no device.
        """
        own_spans = np.zeros(len(self._spans.start), bool) if spans is None else spans
        own_work = np.zeros(len(self._work.start), bool) if work is None else work
        calls = self.ownership.waits
        without = calls.event[own_spans[calls.span]]
        if waits is not None:
            without = merged(without, waits)
        none = np.empty(0, np.int64)
        return Removable(own_spans, own_work, without, none if operators is None else operators)

    def _placed(self, owner: Ints, by_step: Ints, count: Ints | None = None) -> Placed:
        """Return the places of these owners, and of owners with a cost; ``NOTHING`` is left out."""
        is_owned = owner >= 0
        counts = np.zeros(self._owners, np.int64)
        np.add.at(counts, owner[is_owned], 1 if count is None else count[is_owned])
        cost = self.typical.mean(by_step)
        listed = by_step.any(axis=1) | (counts > 0)
        places = [
            Place(
                *self.ownership.owners.named(number),
                self._per_step(int(counts[number])),
                int(cost[number]),
            )
            for number in np.flatnonzero(listed).tolist()
        ]
        places.sort(key=lambda place: (-place.wall_ns, -place.count, place.path))
        together = min(sum(place.wall_ns for place in places), self.typical.value(self.step_ns))
        sum_by_step = by_step.sum(axis=0)
        steps = self._steps_with(sum_by_step, LEAST_SHARE)
        return Placed(tuple(places), together, steps, by_step=sum_by_step)

    def _placed_at(self, owner: Ints, chosen: Mask) -> Ints:
        """Return the owner to place each thing at, ``NOTHING`` for what is not chosen."""
        return np.where(chosen, np.maximum(owner, Special.OUTSIDE), NOTHING)

    def _steps_with(self, by_step: Ints, share: float) -> int:
        return int(((by_step > 0) & (by_step >= share * self.step_ns)).sum())

    def _per_step(self, count: int) -> int:
        steps = len(self.step_ns)
        return max(1, (2 * count + steps) // (2 * steps))

    @property
    def _owners(self) -> int:
        return len(self.ownership.owners)

    # By name ---------------------------------------------------------------------------------

    def top_nodes(self, chosen: Mask) -> tuple[str, ...]:
        """Return the names of the nodes among these spans, the most expensive first; at most 3."""
        nodes = chosen & self._spans.is_node
        spent = self.span_ns[nodes]
        return _top(self._spans.node[nodes], spent, self._spans.node_names)

    def top_kernels(self, chosen: Mask) -> tuple[str, ...]:
        """Return the names of this device work, the longest first; at most 3."""
        return _top(self._work.name[chosen], self.device_ns[chosen], self.names)

    def top_operators(self, name: Ints, ns: Ints) -> tuple[str, ...]:
        """Return these names, the most expensive first; at most 3.

        Args:
            name: indices into the trace's names; ``NOTHING`` is left out.
            ns: nanoseconds, one entry for each of ``name``.
        """
        is_named = name >= 0
        return _top(name[is_named], ns[is_named], self.names)

    # -----------------------------------------------------------------------------------------

    @property
    def ownership(self) -> Ownership:
        """The trace with its owners."""
        return self.ledger.ownership

    @property
    def _holders(self) -> Holders:
        return self.ledger.holders

    @property
    def _spans(self) -> Spans:
        return self.ownership.spans

    @property
    def _work(self) -> DeviceWork:
        return self.ownership.work

    @property
    def _steps(self) -> Timeline:
        return self.ledger.steps

    @cached_property
    def _spent(self) -> Spent:
        """The clock time of the steps."""
        spent = self.ledger.whole
        return spent.where(spent.step >= 0)

    @cached_property
    def _held(self) -> Ints:
        """The clock time of each holder."""
        return summed(self._spent.holder, self._spent.length, len(self._holders.span))

    @cached_property
    def _shares(self) -> Shares:
        """The owners of all holders; those of device work by the span that launched it."""
        ownership, none = self.ownership, np.full(len(self._work.span), NOTHING)
        owner = take(ownership.owner, self._work.span, Special.OUTSIDE)
        work = ownership.compiled.shares.over(
            ownership.compiled.of_work, owner, none, owner_offset=len(Special), line_offset=0
        )
        return self._holders.shares_with(work, Special.OUTSIDE)

    def _held_by_step(self, group: Ints, count: int) -> Ints:
        """Sum the clock time of holders by group and step; the group ``NOTHING`` is left out."""
        spent = self._spent
        return self._by_step(group[spent.holder], spent.step, spent.length, count)

    def _by_step(self, group: Ints, step: Ints, length: Ints, count: int) -> Ints:
        counted = np.flatnonzero((group >= 0) & (step >= 0))
        return summed_by_step(
            group[counted], step[counted], length[counted], count, len(self.step_ns)
        )


def _top(name: Ints, spent: Ints, names: Sequence[str]) -> tuple[str, ...]:
    distinct_names, inverse = numbered(name)
    sums = np.zeros(len(distinct_names), np.int64)
    np.add.at(sums, inverse, spent)
    ranked = np.argsort(-sums, kind="stable")[:_NAMED]
    return tuple(names[index] for index in distinct_names[ranked].tolist())
