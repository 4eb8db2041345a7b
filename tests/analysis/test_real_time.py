"""How long the parts of a step with stacks really take, from the steps without."""

from __future__ import annotations

import numpy as np
import pytest

from backspot.analysis.host.real_time import HostSteps, real_time
from backspot.trace import read_events
from support.synthetic import Trace

US = 1_000


def steps_of(tmp_path, *gaps_of_steps, operator=10 * US, names="abcdef"):
    """Steps of operators that take as long each, with gaps of so many microseconds between."""
    trace, start, end, now = Trace(), [], [], 0
    for gaps in gaps_of_steps:
        start.append(now)
        for name, gap in zip(names, gaps, strict=False):
            now += round(gap * US)
            trace.operator(f"aten::{name}", now, now + operator)
            now += operator
        end.append(now)
    events = read_events(trace.save(tmp_path / "trace.json"))
    assert events.start.min() == 0 or gaps_of_steps[0][0]
    shift = int(events.start.min()) - round(gaps_of_steps[0][0] * US)
    edges = (np.array(one, np.int64) + shift for one in (start, end))
    return HostSteps(events, *edges, np.ones(len(start), bool), start[:0])


def gaps_of(steps, clock):
    """The real time before each operator of the first step, and of the operator, in µs."""
    edges = np.sort(np.concatenate([steps.start[:1], steps.events.start, steps.events.end]))
    return (np.diff(np.interp(edges, *clock)) / US).tolist()


def test_a_gap_takes_what_it_takes_without_stacks(tmp_path):
    stacked = steps_of(tmp_path, (300, 50, 900))
    plain = steps_of(tmp_path, (100, 40, 200), (100, 40, 200), (100, 990, 200))  # one is held up
    clock = real_time(stacked, plain, step_ns=10_000 * US)
    assert gaps_of(stacked, clock) == pytest.approx([100, 10, 40, 10, 200, 10])


def test_what_recording_adds_is_taken_off(tmp_path):
    stacked, plain = steps_of(tmp_path, (300, 50, 900)), steps_of(tmp_path, (100, 40, 200))
    clock = real_time(stacked, plain, step_ns=367 * US)  # an operator costs a microsecond
    assert gaps_of(stacked, clock) == pytest.approx([99.5, 10, 39, 10, 199, 9.5], abs=0.6)
    assert sum(gaps_of(stacked, clock)) == pytest.approx(367, abs=0.01)


def test_what_is_too_long_beside_that_was_slowed_alike(tmp_path):
    stacked = steps_of(tmp_path, (300, 50, 900))
    clock = real_time(stacked, None, step_ns=128 * US)
    found = gaps_of(stacked, clock)
    assert sum(found) == pytest.approx(128, abs=0.01)
    assert found[4] / found[0] == pytest.approx(3, rel=0.05)


def test_steps_with_other_operators_agree_where_they_are_alike(tmp_path):
    stacked = steps_of(tmp_path, (300, 50, 60, 900), names="abcd")
    plain = steps_of(tmp_path, (100, 40, 200), names="abd")
    clock = real_time(stacked, plain, step_ns=10_000 * US)
    found = gaps_of(stacked, clock)
    assert found[:4] == pytest.approx([100, 10, 40, 10])
    assert sum(found[4:-1]) == pytest.approx(200)  # with the operator that only one has
    assert found[-1] == pytest.approx(10)
