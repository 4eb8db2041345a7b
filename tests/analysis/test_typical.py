"""What a step typically costs: medians of any steps, and steps of which one is held up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backspot
from backspot import Report
from backspot.analysis.typical import typical, typical_count, typical_value
from backspot.results.costs import UNSTEADY
from backspot.results.unusual import unusual_steps
from support.sums import TIMES, assert_adds_up, middle, middle_count
from support.synthetic import Trace

TICK = 1_000_000  # nanoseconds
MODULES = ("a", "b", "c")

# Each module runs in each step: without a node, a pass can look as if it was recorded in part.
COSTS = st.lists(st.integers(1, 40), min_size=3, max_size=3)
STEPS = st.lists(st.integers(1, 2**63 - 1), min_size=1, max_size=12)
SOME = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=12)


# Medians -----------------------------------------------------------------------------------------


@given(STEPS)
def test_the_typical_value_is_the_median_rounded_down(by_step: list[int]) -> None:
    assert typical_value(np.array(by_step)) == middle(by_step)
    assert min(by_step) <= middle(by_step) <= max(by_step)


@given(SOME)
def test_what_is_there_in_some_steps_is_shared_over_all(by_step: list[int]) -> None:
    assert typical_value(np.array(by_step)) == middle(by_step)
    counts = [one % 100 for one in by_step]
    assert int(typical_count(np.array(counts))) == middle_count(counts)


@pytest.mark.parametrize(
    ("by_step", "cost"),
    [
        ([0, 0, 0, 8, 0, 0, 0, 8], 2),  # an optimizer's step after four passes
        ([9, 0, 9, 0, 9], 5),  # one of the two passes of a GAN
        ([6, 0, 0], 2),  # one of three losses
        ([0, 0, 0, 0, 300, 0, 0, 0, 0, 0], 0),  # held up once
        ([0, 9, 0, 0, 0, 0, 0, 0, 0, 9], 0),
    ],
)
def test_what_happens_seldom_is_no_part_of_a_typical_step(by_step, cost) -> None:
    assert typical_value(np.array(by_step)) == cost


def test_the_typical_value_of_no_steps_is_zero() -> None:
    assert typical_value(np.empty(0, np.int64)) == 0


@given(STEPS, st.randoms(use_true_random=False))
def test_the_order_of_the_steps_does_not_matter(by_step, shuffle) -> None:
    before = typical_value(np.array(by_step))
    shuffle.shuffle(by_step)
    assert typical_value(np.array(by_step)) == before


@given(st.lists(st.tuples(st.integers(1, 2**62), st.integers(0, 2**62)), min_size=1, max_size=12))
def test_a_part_never_exceeds_its_whole(steps: list[tuple[int, int]]) -> None:
    part = np.array([one for one, _ in steps])
    whole = np.array([one + rest for one, rest in steps])
    assert typical_value(part) <= typical_value(whole)


@given(STEPS, st.data())
def test_one_step_moves_the_median_at_most_to_a_neighbour(by_step, data) -> None:
    ordered = sorted(by_step)
    middle_at, count = (len(ordered) - 1) / 2, len(ordered)
    low, high = ordered[max(0, int(middle_at - 1))], ordered[min(count - 1, int(middle_at + 1.5))]
    changed = list(by_step)
    changed[data.draw(st.integers(0, count - 1))] = data.draw(st.integers(1, 2**63 - 1))
    if count >= 3:
        assert low <= typical_value(np.array(changed)) <= high


@given(st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=1, max_size=5))
def test_each_series_has_its_own_median(table: list[list[int]]) -> None:
    assert typical(np.array(table)).tolist() == [middle(series) for series in table]


# Steps -------------------------------------------------------------------------------------------


def recorded(costs: list[list[int]], folder: Path, *, gpu: bool = False) -> Report:
    """Steps whose backward takes so many ticks in each module, one list a step."""
    trace, at = Trace(), 0
    for step, ticks in enumerate(costs):
        begin = at
        for number, path in enumerate(MODULES):
            trace.forward(path, "Linear", at, at + 10 * TICK)
            trace.operator("aten::mul", at + TICK, at + 2 * TICK, seq=3 * step + number)
            at += 10 * TICK
        at += TICK
        for number, length in reversed([*enumerate(ticks)]):
            trace.node("MulBackward0", at, at + length * TICK, seq=3 * step + number)
            if gpu:
                half = at + length * TICK // 2
                trace.kernel(half, at + length * TICK, launch=at + 1, name=f"kernel {number}")
            at += length * TICK
        at += TICK
        trace.annotation(f"ProfilerStep#{step}", begin, at)
    return backspot.locate(trace.save(folder / "trace.json"))


@given(
    st.lists(COSTS, min_size=1, max_size=7),
    st.booleans(),
)
def test_the_rows_of_each_step_sum_to_it_and_the_typical_ones_to_the_typical_whole(
    tmp_path_factory: pytest.TempPathFactory, costs: list[list[int]], gpu: bool
) -> None:
    report = recorded(costs, tmp_path_factory.mktemp("trace"), gpu=gpu)
    assert_adds_up(report)
    spent = {path: [step[number] for step in costs] for number, path in enumerate(MODULES)}
    rows = {row.path: row for row in report.modules}
    for path, ticks in spent.items():
        assert rows[path].wall_ns_by_step == tuple(TICK * each for each in ticks)
        assert rows[path].cpu_ns_by_step == rows[path].wall_ns_by_step
    left = middle([TICK * sum(step) for step in costs]) - sum(
        middle([TICK * each for each in ticks]) for ticks in spent.values()
    )
    assert report.unsteady_ns == left
    assert (UNSTEADY in rows) == any(
        getattr(report, time) != sum(getattr(rows[path], time) for path in rows if path != UNSTEADY)
        for time in TIMES
    )
    for finding in report.findings:
        assert report.steps < 2 * finding.steps <= 2 * report.steps


@given(
    st.lists(COSTS, min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_which_step_is_slow_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, costs: list[list[int]], shuffle
) -> None:
    folder = tmp_path_factory.mktemp("trace")

    def costs_of(report: Report) -> dict[str, tuple[int, ...]]:
        return {row.path: (row.wall_ns, row.gpu_ns, row.cpu_ns) for row in report.modules}

    before = costs_of(recorded(costs, folder))
    shuffle.shuffle(costs)
    assert costs_of(recorded(costs, folder)) == before


def test_what_the_medians_of_the_rows_leave_over_can_be_less_than_nothing(tmp_path: Path) -> None:
    report = recorded([[10, 10, 1], [10, 1, 10], [1, 10, 10]], tmp_path)
    assert report.wall_ns == 21 * TICK
    assert {row.path: row.wall_ns // TICK for row in report.modules} == {
        "a": 10,
        "b": 10,
        "c": 10,
        UNSTEADY: -9,
    }
    assert not next(row for row in report.modules if row.path == UNSTEADY).is_module


@pytest.mark.parametrize("gpu", [True, False])
def test_a_module_that_is_held_up_in_one_step_is_ranked_by_the_others(
    tmp_path: Path, gpu: bool
) -> None:
    costs = [[5, 4, 1] for _ in range(10)]
    costs[4][2] = 300
    report = recorded(costs, tmp_path, gpu=gpu)
    assert [row.path for row in report.modules if row.is_module] == ["a", "b", "c"]
    held_up = report["c"].row
    assert held_up.wall_ns == TICK
    assert held_up.recorded_wall_ns == 309 * TICK
    for finding in report.findings:
        assert finding.path != "c"
        assert all(place.wall_ns <= TICK for place in finding.places if place.path == "c")
    assert "Step 5 took 299 ms longer, in c" in str(report)
    (unusual,) = unusual_steps(report)
    assert (unusual.step, unusual.longer_ns, unusual.where) == (5, 299 * TICK, "c")


def test_a_cause_of_a_few_steps_is_none_and_of_most_says_in_how_many(tmp_path: Path) -> None:
    for slow in range(1, 8):
        costs = [[150, 1, 1]] * slow + [[5, 1, 1]] * (7 - slow)
        found = {one.rule: one for one in recorded(costs, tmp_path).findings}
        assert ("backward-ratio" in found) is (2 * slow > 7)
        if 2 * slow > 7:
            # One percent of a step is little: the cause counts in the other steps, too.
            assert slow <= found["backward-ratio"].steps <= 7
            assert f"in {slow} of 7 steps" in found["backward-ratio"].seen or slow == 7
