"""How long the host's parts of a step really take, where stacks were recorded.

Recording stacks costs time at each call of a function, and Python itself runs slower meanwhile. So
each gap between two neighbouring starts and ends of operators gets the time that the same gap has
in the steps without stacks. From that, what recording operators adds is taken off: each costs the
same, as much as makes a step as long as it is without a profiler.
"""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.accounting.unrecorded import LABEL, NODE, Floats, unrecorded
from backspot.analysis.recording import Recording
from backspot.analysis.timeline import NOTHING, median
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask

_OPERATOR, _CALL = 1.0, 0.2
"""What recording an operator or a call of the runtime, and a function's call costs, relative to an
operator."""


class HostSteps(msgspec.Struct, frozen=True):
    """The steps of a recording, as the host has them.

    Attributes:
        events: the trace.
        start: when each step starts, in nanoseconds.
        end: when it ends.
        chosen: whether it counts for a typical step.
        noted: the operators that made nodes whose lines were noted.
    """

    events: Events
    start: Ints
    end: Ints
    chosen: Mask
    noted: Ints

    @classmethod
    def of(cls, recording: Recording) -> HostSteps:
        """Return the steps of a recording: as marked, else as on the clock."""
        marks, windows = recording.ownership.steps, recording.windows
        marked = marks if len(marks.start) == len(windows.start) else windows
        chosen, noted = recording.typical.chosen, recording.ownership.noted
        return cls(recording.events, marked.start, marked.end, chosen, noted)


def real_time(stacked: HostSteps, plain: HostSteps | None, step_ns: int) -> tuple[Ints, Floats]:
    """Return moments of the recording with stacks, and the real time at each of them.

    Args:
        stacked: the steps with stacks.
        plain: other steps of the same training without stacks, if there are any.
        step_ns: how long a typical step takes without a profiler.

    Returns:
        Sorted times, and nanoseconds that pass as these do. Between two moments, real time passes
        evenly.
    """
    names = {name: index for index, name in enumerate(stacked.events.names)}
    chosen = np.flatnonzero(plain.chosen).tolist() if plain else ()
    gaps = [_gaps(plain or stacked, step, names) for step in chosen]
    times, lengths = [], []
    for step in range(len(stacked.start)):
        stacked_gaps = _gaps(stacked, step, names)
        same = [
            gaps_of_step
            for gaps_of_step in gaps
            if np.array_equal(gaps_of_step.key, stacked_gaps.key)
        ]
        others = same if plain else [stacked_gaps]
        begin, end = len(stacked_gaps.key), 0
        if not others:
            others = gaps[:1]
            begin, end = _alike(stacked_gaps.key, others[0].key)
        folded = [gaps_of_step.only(begin, end) for gaps_of_step in others]
        length = median([np.diff(part_gaps.time) for part_gaps in folded])
        cost = median([part_gaps.cost for part_gaps in folded])
        times.append(stacked_gaps.only(begin, end).time)
        lengths.append(np.append(unrecorded(length, cost, step_ns), 0.0))
    # Between steps, time passes as it was recorded.
    for before, length, after in zip(times, lengths, times[1:], strict=False):
        length[-1] = after[0] - before[-1]
    moments = np.concatenate(times) if times else np.zeros(1, np.int64)
    passed = np.cumsum(np.append(0.0, np.concatenate(lengths)))[:-1] if times else np.zeros(1)
    return moments, passed


class _Gaps(msgspec.Struct, frozen=True):
    """The gaps of one step between starts and ends of operators.

    Attributes:
        time: the step's start, the starts and ends in order, and the step's end.
        key: what starts or ends at each of the times between; twice the name, plus 1 for an end.
        cost: what recording adds to each gap, relative to an operator.
    """

    time: Ints
    key: Ints
    cost: Floats

    def only(self, begin: int, end: int) -> _Gaps:
        """Return the gaps with the first ``begin`` and the last ``end`` times between alone."""
        kept_times = np.delete(np.arange(len(self.time)), np.arange(begin, len(self.key) - end) + 1)
        summed = np.append(0.0, np.cumsum(self.cost))
        return _Gaps(self.time[kept_times], self.key, np.diff(summed[kept_times]))


def _gaps(steps: HostSteps, step: int, names: dict[str, int]) -> _Gaps:
    events, start, end = steps.events, int(steps.start[step]), int(steps.end[step])

    def within(index: Ints) -> Ints:
        return index[(events.start[index] >= start) & (events.start[index] < end)]

    operators = within(events.of(Category.OPERATOR))
    number = np.array([names.get(name, NOTHING) for name in events.names], np.int64)
    is_label = events.is_label[events.name[operators]]
    name, weight = number[events.name[operators]], np.where(is_label, LABEL, _OPERATOR)
    moments = np.concatenate([events.start[operators], np.minimum(events.end[operators], end)])
    key = np.concatenate([2 * name, 2 * name + 1])
    order = np.lexsort((np.append(operators, operators), moments))
    half = np.append(weight, weight)[order] / 2
    ends = key[order] % 2
    time = np.concatenate([[start], moments[order], [end]])
    cost = np.append(half * (1 - ends), 0.0) + np.append(0.0, half * ends)
    calls = within(events.of(Category.RUNTIME))
    for starts, cost_of_event in (
        (events.start[calls], _OPERATOR),
        (events.frames.calls, _CALL),
        (events.start[steps.noted], NODE),
    ):
        place = np.searchsorted(time, starts, side="right") - 1
        inside = (place >= 0) & (place < len(cost)) & (starts < end)
        cost += cost_of_event * np.bincount(place[inside], minlength=len(cost))
    return _Gaps(time, key[order], cost)


def _alike(first: Ints, second: Ints) -> tuple[int, int]:
    """Return how many entries are equal at the beginning, and how many at the end of the rest."""
    most = min(len(first), len(second))
    differs = np.flatnonzero(first[:most] != second[:most])
    begin = int(differs[0]) if len(differs) else most
    differs = np.flatnonzero(first[::-1][: most - begin] != second[::-1][: most - begin])
    return begin, int(differs[0]) if len(differs) else most - begin
