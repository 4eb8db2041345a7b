"""What spans and device work cost on the clock, in nanoseconds, over all recorded steps or by step.

Every moment of the clock has one holder: device work that runs or waits to run, else a span of the
host (see ``analysis.accounting.clock``). What a rule picks costs the time that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from backspot.analysis.accounting.clock import Clock
from backspot.analysis.accounting.steps import StepWindows
from backspot.analysis.attribution.launches import DeviceWork, Windows
from backspot.analysis.attribution.ownership import Ownership, Special
from backspot.analysis.attribution.spans import Spans
from backspot.analysis.timeline import (
    NOTHING,
    Timeline,
    first_started,
    layered,
    numbered,
    pieces,
    take,
)
from backspot.results.findings import Place
from backspot.trace.events import Ints, Mask

__all__ = ["Costs"]

_NAMED = 3  # how many nodes, operators or kernels a finding names


@dataclass(frozen=True)
class Costs:
    """The clock time of spans and of device work, and its sums by place and by name.

    Attributes:
        ownership: the trace with its owners.
        clock: who holds each moment.
        windows: the clock time of the steps.
        names: the trace's names.
    """

    ownership: Ownership
    clock: Clock
    windows: StepWindows | Windows
    names: Sequence[str]

    # Nanoseconds -----------------------------------------------------------------------------

    @cached_property
    def idle(self) -> Timeline:
        """0 where in the steps no device has work, running or queued; ``NOTHING`` elsewhere."""
        line = self.clock.whole.cut(self._steps.edges)
        free = (line.values < len(self._spans.start)) & (self._steps.over(line.edges) >= 0)
        # What is not free is one stretch, however many hold it one after the other.
        turns = np.append(True, free[1:] != free[:-1]) if len(free) else free
        return Timeline(line.edges[turns], np.where(free[turns], 0, NOTHING))

    @property
    def work_ns(self) -> Ints:
        """The clock time that each piece of device work holds, its wait in the queue included."""
        held: Ints = self._held[len(self._spans.start) :]
        return held

    @property
    def host_ns(self) -> Ints:
        """The clock time that each span holds on the host, while no device has work."""
        held: Ints = self._held[: len(self._spans.start)]
        return held

    @cached_property
    def span_ns(self) -> Ints:
        """The clock time of each span: of the host in it, and of the work that it launched."""
        spent: Ints = self.host_ns.copy()
        mine = self._work.span >= 0
        np.add.at(spent, self._work.span[mine], self.work_ns[mine])
        return spent

    @cached_property
    def device_ns(self) -> Ints:
        """How long each piece of device work runs, whether or not it holds the clock."""
        length: Ints = self._work.end - self._work.start
        return length

    @cached_property
    def busy_ns(self) -> int:
        """The clock time of the steps in which any device runs something."""
        busy = [device.busy for device in self.clock.devices.values()]
        if not busy:
            return 0
        _, holder, length = pieces(layered(*busy), self._steps)
        return int(length[holder >= 0].sum())

    def of_spans(self, chosen: Mask) -> int:
        """Return the clock time of these spans and of the device work that they launched."""
        return int(self.span_ns[chosen].sum())

    def of_work(self, chosen: Mask) -> int:
        """Return the clock time of this device work."""
        return int(self.work_ns[chosen].sum())

    # By step ---------------------------------------------------------------------------------

    def spans_by_step(self, group: Ints, count: int) -> Ints:
        """Sum the clock time of spans, with the device work that they launched, by group and step.

        Args:
            group: the group of each span, below ``count``; ``NOTHING`` is left out.
            count: how many groups there are.

        Returns:
            Nanoseconds, with one row a group and one column a step.
        """
        step, holder, length = self._pieces
        return self._by_step(
            take(np.append(group, take(group, self._work.span)), holder), step, length, count
        )

    def device_by_step(self, group: Ints, count: int) -> Ints:
        """Sum how long device work runs, as ``device_ns`` has it, by group and step.

        Args:
            group: the group of each piece of device work, below ``count``; ``NOTHING`` is left out.
            count: how many groups there are.

        Returns:
            Nanoseconds, with one row a group and one column a step, in which the work starts.
        """
        return self._by_step(group, self._steps.at(self._work.start), self.device_ns, count)

    def of_spans_by_step(self, chosen: Mask) -> Ints:
        """Return the clock time of these spans and of the work that they launched, by step."""
        found: Ints = self.spans_by_step(np.where(chosen, 0, NOTHING), 1)[0]
        return found

    def of_work_by_step(self, chosen: Mask) -> Ints:
        """Return the clock time of this device work, by step."""
        step, holder, length = self._pieces
        held = np.append(np.full(len(self._spans.start), NOTHING), np.where(chosen, 0, NOTHING))
        found: Ints = self._by_step(take(held, holder), step, length, 1)[0]
        return found

    def holds_in_most_steps(self, by_step: Ints, share: float) -> bool:
        """Whether a cost is at least this share of the step in more than half of the steps.

        One interruption does not make this true, however long it lasts.

        Args:
            by_step: nanoseconds, one entry a step.
            share: of each step's own clock time.
        """
        holds = (by_step > 0) & (by_step >= share * self.step_ns)
        return bool(2 * holds.sum() > len(by_step))

    @property
    def step_ns(self) -> Ints:
        """The clock time of each step."""
        length: Ints = self.windows.end - self.windows.start
        return length

    # By place --------------------------------------------------------------------------------

    def places(self, owner: Ints, wall_ns: Ints, count: Ints | None = None) -> tuple[Place, ...]:
        """Sum costs by owner.

        Args:
            owner: as in ``Ownership.owner``; ``NOTHING`` counts as outside of all modules.
            wall_ns: nanoseconds, one entry for each of ``owner``.
            count: how many things each entry stands for; 1 by default.

        Returns:
            The places, the most expensive first.
        """
        counts = np.ones(len(owner), np.int64) if count is None else count
        owners, inverse = numbered(np.maximum(owner, Special.OUTSIDE))
        spent = np.zeros(len(owners), np.int64)
        times = np.zeros(len(owners), np.int64)
        np.add.at(spent, inverse, wall_ns)
        np.add.at(times, inverse, counts)
        found = [
            Place(*self._path_and_class(number), int(many), int(cost))
            for number, many, cost in zip(owners.tolist(), times, spent, strict=True)
        ]
        return tuple(sorted(found, key=lambda place: (-place.wall_ns, -place.count, place.path)))

    def places_of_spans(self, chosen: Mask) -> tuple[Place, ...]:
        """Return the places of these spans, with the device work that they launched."""
        return self.places(self.ownership.owner[chosen], self.span_ns[chosen])

    def places_of_work(self, chosen: Mask, elsewhere: str = "") -> tuple[Place, ...]:
        """Return the places of this device work.

        Args:
            chosen: which work.
            elsewhere: the path to give to work that no module's call launched.
        """
        owner = take(self.ownership.owner, self._work.span)
        found = self.places(owner[chosen], self.work_ns[chosen])
        if not elsewhere:
            return found
        outside = Special.OUTSIDE.path
        return tuple(replace(p, path=elsewhere) if p.path == outside else p for p in found)

    # By name ---------------------------------------------------------------------------------

    def top_nodes(self, chosen: Mask) -> tuple[str, ...]:
        """Return the names of the nodes among these spans, the most expensive first; at most 3."""
        mine = chosen & self._spans.is_node
        return _top(self._spans.node[mine], self.span_ns[mine], self._spans.node_names)

    def top_kernels(self, chosen: Mask) -> tuple[str, ...]:
        """Return the names of this device work, the longest first; at most 3."""
        return _top(self._work.name[chosen], self.device_ns[chosen], self.names)

    def top_operators(self, name: Ints, wall_ns: Ints) -> tuple[str, ...]:
        """Return these names, the most expensive first; at most 3.

        Args:
            name: indices into the trace's names; ``NOTHING`` is left out.
            wall_ns: nanoseconds, one entry for each of ``name``.
        """
        known = name >= 0
        return _top(name[known], wall_ns[known], self.names)

    # -----------------------------------------------------------------------------------------

    @property
    def _spans(self) -> Spans:
        return self.ownership.spans

    @property
    def _work(self) -> DeviceWork:
        return self.ownership.work

    @cached_property
    def _steps(self) -> Timeline:
        """The step of each moment."""
        start, end = self.windows.start, self.windows.end
        return first_started(start, end, np.arange(len(start)))

    @cached_property
    def _held(self) -> Ints:
        """The clock time of each holder: of the spans, then of the device work."""
        held = np.zeros(len(self._spans.start) + len(self._work.start), np.int64)
        _, holder, length = self._pieces
        np.add.at(held, holder[holder >= 0], length[holder >= 0])
        return held

    @cached_property
    def _pieces(self) -> tuple[Ints, Ints, Ints]:
        """The step, the holder and the length of each piece of the steps' clock time."""
        return pieces(self.clock.whole, self._steps)

    def _by_step(self, group: Ints, step: Ints, length: Ints, count: int) -> Ints:
        found = np.zeros((count, len(self.windows.start)), np.int64)
        mine = (group >= 0) & (step >= 0)
        np.add.at(found, (group[mine], step[mine]), length[mine])
        return found

    def _path_and_class(self, owner: int) -> tuple[str, str]:
        owners = self.ownership.owners
        module = owners.module(owner)
        return owners.path(owner), module.class_name if module else ""


def _top(name: Ints, spent: Ints, names: Sequence[str]) -> tuple[str, ...]:
    which, inverse = numbered(name)
    sums = np.zeros(len(which), np.int64)
    np.add.at(sums, inverse, spent)
    ranked = np.argsort(-sums, kind="stable")[:_NAMED]
    return tuple(names[index] for index in which[ranked].tolist())
