"""The clock time of a recording, dealt out once, for all who ask where it went.

Rows, phases, findings and the summaries of ranks sum up the same intervals. Each interval belongs
to one step, one pass and one holder, so that no sum loses a nanosecond or counts one twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from backspot.analysis.accounting.clock import Clock, WallKind
from backspot.analysis.accounting.holders import Holders
from backspot.analysis.accounting.steps import StepWindows
from backspot.analysis.attribution.launches import Windows
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import FAR, NOTHING, Timeline, first_started, grouped, merged, take
from backspot.trace.events import Ints, Mask


class Spent(NamedTuple):
    """Clock time in intervals that do not overlap; arrays with one entry each, in order of time.

    Attributes:
        start: when it starts in the trace, in nanoseconds.
        end: when it ends in the trace.
        length: how long it lasts, in nanoseconds: from start to end, or as ``Ledger.pace`` says.
        step: the step of this moment, ``NOTHING`` for none. Rows count what a pass spends in the
            step of the pass (``Amounts``).
        run: the pass that waits for the device whose clock this is, ``NOTHING`` for none.
        holder: who holds the clock, as in ``Holders``.
        kind: what the time is spent on, a ``WallKind``.
    """

    start: Ints
    end: Ints
    length: Ints
    step: Ints
    run: Ints
    holder: Ints
    kind: Ints

    @property
    def runs(self) -> Mask:
        """Whether device work runs, and is not only queued."""
        is_running: Mask = (self.kind == WallKind.GPU) | (self.kind == WallKind.COMMUNICATION)
        return is_running

    def where(self, chosen: Mask | Ints) -> Spent:
        """Return some of the intervals."""
        chosen = np.flatnonzero(chosen) if chosen.dtype == bool else chosen  # once for all columns
        return Spent(*(column[chosen] for column in self))

    def cut(self, times: Ints) -> Spent:
        """Return the intervals cut at these times, too, which are sorted and distinct.

        What is cut here lasts from start to end: a pace cuts before it changes lengths.
        """
        piece = np.searchsorted(self.start, times, side="right") - 1
        inside = (take(self.start, piece, FAR) < times) & (times < take(self.end, piece))
        piece, times = piece[inside], times[inside]
        if not len(times):
            return self
        start, end = np.insert(self.start, piece + 1, times), np.insert(self.end, piece, times)
        pieces = self.where(np.insert(np.arange(len(self.start)), piece, piece))
        return pieces._replace(start=start, end=end, length=end - start)


Paced: TypeAlias = Callable[[Spent], Spent]
"""Gives intervals the length that they have without the recording, cut where that changes."""


class Ledger(msgspec.Struct, frozen=True, dict=True):
    """The clock time of a recording.

    Attributes:
        ownership: the trace with its owners.
        clock: what runs at each moment.
        windows: the clock time of its steps, or of its passes where the trace has nothing else.
        pace: how long each moment lasts in a step that is not recorded; ``None`` where that is not
            known, so that all last as long as they were recorded.
    """

    ownership: Ownership
    clock: Clock
    windows: StepWindows | Windows
    pace: Paced | None = None

    @cached_property
    def holders(self) -> Holders:
        """What can hold the clock."""
        return Holders(self.ownership)

    @cached_property
    def steps(self) -> Timeline:
        """The step of each moment."""
        return _timeline_of(self.windows, np.arange(len(self.windows.start)))

    @cached_property
    def passes(self) -> Timeline:
        """The pass of each moment."""
        return _timeline_of(self.ownership.windows, np.arange(len(self.ownership.windows.start)))

    @cached_property
    def by_device(self) -> dict[int, Spent]:
        """The clock of the passes that wait for each device, ``NOTHING`` for the host alone."""
        return {
            device: self.spent(self.clock.of_passes(device), device, runs)
            for device, runs in grouped(self.ownership.windows.device)
        }

    @cached_property
    def whole(self) -> Spent:
        """The clock of the steps, as ``Clock.whole`` has it."""
        for device, spent in self.by_device.items():
            if self.clock.of_passes(device) is self.clock.whole:
                return spent
        device = next(iter(self.clock.devices), NOTHING)
        return self.spent(self.clock.whole, device, np.empty(0, np.int64))

    @cached_property
    def step_ns(self) -> Ints:
        """How long each step lasts, in nanoseconds."""
        if self.pace is None:
            return self.windows.end - self.windows.start
        spent = self.whole.where(self.whole.step >= 0)
        lengths = np.zeros(len(self.windows.start), np.int64)
        np.add.at(lengths, spent.step, spent.length)
        return lengths

    def elapsed(self, start: Ints, end: Ints) -> Ints:
        """Return how long it takes from each of these moments of the trace to another."""
        if self.pace is None or not len(self.whole.start):
            return end - start
        return self._passed(end) - self._passed(start)

    def _passed(self, times: Ints) -> Ints:
        """Return the nanoseconds from the first moment of the clock to these; evenly in between."""
        edges, passed = self._moments
        inside = np.interp(times, edges, passed)
        beyond = times - np.clip(times, edges[0], edges[-1])  # no step is there
        return np.rint(inside).astype(np.int64) + beyond

    @cached_property
    def _moments(self) -> tuple[Ints, Ints]:
        intervals = self.whole
        return np.append(intervals.start, intervals.end[-1:]), np.append(
            0, np.cumsum(intervals.length)
        )

    def spent(self, timeline: Timeline, device: int, runs: Ints) -> Spent:
        """Return the time of a clock.

        Args:
            timeline: who holds each moment, as ``Clock`` has it.
            device: the device that the clock is about.
            runs: the passes that wait for it.
        """
        windows = self.ownership.windows
        edges = (windows.start, windows.end, self.windows.start, self.windows.end)
        line = timeline.cut(merged(*edges, self.holders.edges))
        start, end = line.edges[:-1], line.edges[1:]
        spent = Spent(
            start=start,
            end=end,
            length=np.diff(line.edges),
            step=self.steps.over(start),
            run=_timeline_of(windows, runs).over(start),
            holder=self.holders.at(line.values[:-1], start),
            kind=self.clock.kinds(line, device).values[:-1],
        )
        return self.pace(spent) if self.pace else spent


def _timeline_of(windows: StepWindows | Windows, chosen: Ints) -> Timeline:
    return first_started(windows.start[chosen], windows.end[chosen], chosen)
