"""What a step typically costs: a mean over whole steps that nothing held up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import backspot
from backspot import Report
from backspot.analysis.training import StepTimes
from backspot.analysis.typical import RareSteps, TypicalStep, every_step, rare_steps, typical_step
from support.sums import assert_adds_up
from support.synthetic import Trace

TICK = 1_000_000  # nanoseconds
MODULES = ("a", "b", "c")

# Each module runs in each step: without a node, a pass can look as if it was recorded in part.
COSTS = st.lists(st.integers(1, 40), min_size=3, max_size=3)
STEPS = st.lists(st.integers(0, 2**62), min_size=1, max_size=12)


# Means -------------------------------------------------------------------------------------------


@given(STEPS)
def test_the_typical_value_is_the_mean_over_the_steps_rounded_down(by_step: list[int]) -> None:
    assert every_step(len(by_step)).value(np.array(by_step)) == sum(by_step) // len(by_step)


@given(STEPS, st.data())
def test_steps_count_by_their_weight(by_step: list[int], data: st.DataObject) -> None:
    weight = data.draw(st.lists(st.integers(0, 9), min_size=len(by_step), max_size=len(by_step)))
    if any(weight):
        found = TypicalStep(np.array(weight)).value(np.array(by_step))
        exact = sum(one * by for one, by in zip(by_step, weight, strict=True)) // sum(weight)
        assert found == exact


def test_what_happens_in_some_steps_only_happens_once_in_a_typical_step() -> None:
    assert every_step(4).count(np.array([[0, 0, 1, 0], [2, 1, 1, 1], [0, 0, 0, 0]])).tolist() == [
        1,
        2,
        0,
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**15), st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)),
        max_size=30,
    ),
    st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any),
)
def test_what_pieces_have_of_a_typical_step_sums_to_the_mean_exactly(
    pieces: list[tuple[int, int, int, int]], weight: list[int]
) -> None:
    amount, step, owner, node = np.array(pieces, np.int64).reshape(-1, 4).T
    typical = TypicalStep(np.array(weight))
    part = typical.apportioned(amount, step, owner, node)

    def mean(mine: np.ndarray) -> tuple[int, int]:
        exact = int((amount * np.array(weight)[step])[mine].sum())
        return divmod(exact, sum(weight))

    assert part.min(initial=0) >= 0
    assert part.sum() == mean(step >= 0)[0]
    for number in range(3):
        whole, rest = mean(owner == number)
        of_owner = int(part[owner == number].sum())
        assert whole <= of_owner <= whole + (rest > 0)


# Which steps count -------------------------------------------------------------------------------


def left_out(length: list[int], *, work: list[int] | None = None, **places: list[int]) -> list[int]:
    """The steps that do not count, of a step with these parts."""
    found = typical_step(
        np.array(length),
        None if work is None else np.array(work),
        np.array([*places.values()]).reshape(len(places), len(length)),
        [*places],
    )
    return [hiccup.step for hiccup in found.hiccups]


def test_a_step_that_is_held_up_does_not_count() -> None:
    assert left_out([100] * 4 + [400] + [100] * 5) == [4]
    assert left_out([100, 101, 99, 100, 104, 98, 100]) == []


@pytest.mark.parametrize("steps", [1, 2])
def test_of_one_or_two_steps_all_count(steps: int) -> None:
    assert left_out([100, 900][:steps]) == []


def test_a_hiccup_of_one_module_is_seen_where_the_whole_step_hides_it() -> None:
    whole = [100, 140, 90, 120, 160, 110, 95, 150, 130, 105]
    module = [1] * 10
    assert left_out(whole, module=module) == []
    module[3] = 40
    assert left_out(whole, module=module) == [3]


def test_what_holds_up_each_fourth_step_is_what_the_training_does() -> None:
    data = [0, 0, 0, 80] * 3
    length = [100 + one for one in data]
    assert left_out(length, data=data) == []
    data = [0, 0, 0, 80, 0, 0, 0, 30]  # as often, and never as long
    assert left_out([100 + one for one in data], data=data) == []
    data = [0] * 11 + [80]
    assert left_out([100 + one for one in data], data=data) == [11]


def test_what_takes_as_long_in_several_steps_recurs_however_many_steps_are_recorded() -> None:
    idle = [10] * 60
    idle[7] = idle[27] = idle[47] = 90
    length = [100 + gap for gap in idle]
    assert left_out(length, idle=idle) == []
    idle[27] = 600
    length = [100 + gap for gap in idle]
    assert left_out(length, idle=idle) == [27, 7, 47]


def test_a_step_with_more_work_for_all_modules_counts() -> None:
    one, other, third = [20, 21, 20, 60, 20, 20, 22], [30, 30, 31, 90, 30, 29, 30], [10] * 7
    third[3] = 30
    length = [sum(parts) for parts in zip(one, other, third, strict=True)]
    assert left_out(length) == [3]
    assert left_out(length, one=one, other=other, third=third) == []


@pytest.mark.parametrize("length_ns", [250, 5_000, 10**12])
def test_a_step_with_work_of_its_own_counts_however_long_it_is(length_ns: int) -> None:
    length, work = [100] * 9 + [length_ns], [0] * 9 + [1]
    assert left_out(length) == [9]
    assert left_out(length, work=work) == []


def test_a_step_that_is_known_to_be_rare_counts_though_it_runs_the_same_operators() -> None:
    length = [100_000] * 9 + [800_000]
    rare = (RareSteps((9,), 0.05),)
    found = typical_step(np.array(length), rare=rare)
    assert found.hiccups == ()
    assert found.value(np.array(length)) == pytest.approx(135_000, rel=0.001)


def test_a_wait_for_a_batch_is_a_wait_of_the_training_in_one_of_many_steps() -> None:
    data = [0] * 11 + [80]
    length, places = np.array([100 + wait for wait in data]), np.array([data])
    assert len(typical_step(length, None, places, ["(data)"]).hiccups) == 1
    assert typical_step(length, None, places, ["(data)"], never=["(data)"]).hiccups == ()


def test_a_wait_for_a_batch_hides_no_hiccup_of_the_same_step() -> None:
    data, module = [0] * 11 + [80], [10] * 11 + [200]
    length = np.array([90 + sum(parts) for parts in zip(data, module, strict=True)])
    places = np.array([data, module])
    found = typical_step(length, None, places, ["(data)", "module"], never=["(data)"])
    assert [(hiccup.step, hiccup.where) for hiccup in found.hiccups] == [(11, "module")]


def test_a_step_without_its_like_has_no_hiccup_and_others_have() -> None:
    work = [0] * 6 + [1] + [0]
    assert left_out([100] * 6 + [900] + [400], work=work) == [7]


@pytest.mark.parametrize("steps", [3, 4, 5, 10])
def test_one_step_of_a_few_can_be_held_up(steps: int) -> None:
    assert left_out([100] * (steps - 1) + [400]) == [steps - 1]


def test_on_a_busy_machine_a_hiccup_stands_out_of_what_is_always_so() -> None:
    busy = [100, 180, 100, 230, 100, 200, 100, 190, 100, 210, 100, 170, 100]
    assert left_out(busy) == []
    assert left_out([*busy, 5_000]) == [13]


# How often the training has a kind of step -------------------------------------------------------

SHARES = st.floats(0.001, 0.999)


@given(st.integers(2, 70), st.data())
def test_steps_that_are_known_to_be_rare_count_together_for_their_share(
    steps: int, data: st.DataObject
) -> None:
    rare = data.draw(st.sets(st.integers(0, steps - 1), min_size=1, max_size=steps - 1))
    share = data.draw(SHARES)
    length = np.array(data.draw(st.lists(st.integers(1, 10**9), min_size=steps, max_size=steps)))
    found = typical_step(length, rare=(RareSteps(tuple(rare), share),))
    weight = found.weight
    assert weight[[*rare]].sum() / weight.sum() == pytest.approx(share, abs=0.002)
    parts = length // 3, length - length // 3
    whole = found.value(length)
    assert whole - 1 <= sum(map(found.value, parts)) <= whole


@given(st.integers(1, 40), st.lists(st.tuples(st.sets(st.integers(0, 60)), SHARES), max_size=3))
def test_whatever_is_said_to_be_rare_each_recording_has_a_mean(
    steps: int, kinds: list[tuple[set[int], float]]
) -> None:
    length = np.arange(1, steps + 1) * 1000
    rare = tuple(RareSteps(tuple(index), share) for index, share in kinds)
    found = typical_step(length, rare=rare)
    assert found.chosen.any()
    assert length.min() <= found.value(length) <= length.max()
    assert typical_step(length, rare=rare[:0]).weight.tolist() == [1] * steps


@given(st.integers(0, 9), st.sets(st.integers(0, 9)), SHARES)
def test_a_part_of_a_recording_keeps_what_is_known_of_its_steps(
    first: int, steps: set[int], share: float
) -> None:
    left = RareSteps(tuple(sorted(steps)), share).behind(first)
    assert {step + first for step in left.steps} == {step for step in steps if step >= first}
    assert left.share == share


def test_counts_of_a_rare_step_are_weighted_and_round_up() -> None:
    found = typical_step(np.full(10, 100), rare=(RareSteps((9,), 0.05),))
    assert found.count(np.array([[0] * 9 + [1500], [2] * 9 + [18]])).tolist() == [75, 3]


def test_a_kind_of_step_keeps_its_share_if_one_of_its_steps_is_held_up() -> None:
    length, work = [10, 50] * 4, [0, 1] * 4
    length[2] = 900
    found = typical_step(np.array(length), np.array(work))
    assert [hiccup.step for hiccup in found.hiccups] == [2]
    assert found.value(np.array(length)) == pytest.approx(30, abs=1)


@given(st.lists(st.integers(1, 2**62), min_size=1, max_size=20))
def test_a_quarter_of_the_steps_counts_whatever_happens(length: list[int]) -> None:
    found = typical_step(np.array(length))
    assert 4 * np.count_nonzero(found.chosen) >= len(length)
    assert np.count_nonzero(found.chosen) + len(found.hiccups) == len(length)
    count = np.array(length)[found.chosen]
    assert count.min() <= found.value(np.array(length)) <= count.max()


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
def test_the_rows_of_each_step_sum_to_it_and_those_of_the_typical_step_to_that(
    tmp_path_factory: pytest.TempPathFactory, costs: list[list[int]], gpu: bool
) -> None:
    report = recorded(costs, tmp_path_factory.mktemp("trace"), gpu=gpu)
    assert_adds_up(report)
    for path, ticks in zip(MODULES, zip(*costs, strict=True), strict=True):
        row = report[path].row
        assert row.wall_ns_by_step == tuple(TICK * each for each in ticks)
        assert row.cpu_ns_by_step == row.wall_ns_by_step
        count = [TICK * ticks[step] for step in report.typical_steps]
        assert abs(row.wall_ns - sum(count) / len(count)) < 1
    for finding in report.findings:
        assert report.steps < 2 * finding.steps <= 2 * report.steps


def test_nodes_and_rows_rest_on_the_same_steps_where_the_work_differs(tmp_path: Path) -> None:
    report = recorded([[2, 1, 30], [4, 1, 1], [9, 1, 1], [3, 40, 1], [5, 1, 1]], tmp_path)
    for row in report.modules:
        if row.is_module:
            assert sum(node.wall_ns for node in row.nodes) == row.wall_ns


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
    assert sum(held_up.wall_ns_by_step) == 309 * TICK
    for finding in report.findings:
        assert finding.path != "c"
        # An operator on the CPU counts with as much of the time behind it.
        assert all(place.wall_ns <= 2 * TICK for place in finding.places if place.path == "c")
    assert "Step 5 took 299 ms longer, in c" in str(report)
    (hiccup,) = report.hiccups
    assert (hiccup.step, hiccup.longer_ns, hiccup.where) == (4, 299 * TICK, "c")
    assert report.typical_steps == (0, 1, 2, 3, 5, 6, 7, 8, 9)


def test_a_cause_of_a_few_steps_is_none_and_of_most_says_in_how_many(tmp_path: Path) -> None:
    for slow in range(1, 8):
        costs = [[150, 1, 1]] * slow + [[5, 1, 1]] * (7 - slow)
        found = {one.rule: one for one in recorded(costs, tmp_path).findings}
        assert ("backward-ratio" in found) is (2 * slow > 7)
        if 2 * slow > 7:
            # One percent of a step is little: the cause counts in the other steps, too.
            assert slow <= found["backward-ratio"].steps <= 7
            assert f"in {slow} of 7 steps" in found["backward-ratio"].seen or slow == 7


# Which recorded steps have the rare work of a training -------------------------------------------


def trained(*rare):
    account = StepTimes()
    for at in range(1000):
        longer = sum(took for period, took in rare if at % period == period - 1)
        account.add(10**6 + longer, 0, 0, 0, 10**6 + longer, 0)
    return account.training()


@given(st.integers(2, 50), st.floats(1, 2), st.lists(st.booleans(), min_size=5, max_size=20))
def test_a_recorded_step_with_rare_work_counts_as_often_as_the_training_has_it(period, slow, has):
    training = trained((period, 80 * 10**6))
    has[0], has[1], has[2] = False, False, sum(has) > len(has) // 2 - 2 or has[2]
    has = [one and at % 3 == 0 for at, one in enumerate(has)]
    length = np.array([int(slow * (10**6 + 80 * 10**6 * one)) for one in has])
    found = rare_steps(length, training)
    assert [step for kind in found for step in kind.steps] == [
        at for at, one in enumerate(has) if one
    ]
    assert all(kind.share == pytest.approx(1 / period, rel=0.1) for kind in found)


def test_two_kinds_of_rare_work_are_told_apart_by_their_time():
    training = trained((10, 5 * 10**6), (100, 400 * 10**6))
    length = np.array([10**6] * 7 + [6 * 10**6, 401 * 10**6, 10**6])
    shares = {kind.steps: round(1 / kind.share) for kind in rare_steps(length, training)}
    assert set(shares) == {(7,), (8,)}
    assert shares[8,] > 5 * shares[7,]


@pytest.mark.parametrize("waits", [False, True])
def test_a_kind_of_steps_knows_whether_they_wait_for_data(waits: bool) -> None:
    account = StepTimes()
    for at in range(400):
        longer = 50 * 10**6 * (at % 20 == 19)
        account.add(10**6 + longer, waits * longer, 0, 0, 10**6 + longer, 0)
    length = np.array([10**6] * 9 + [51 * 10**6])
    (kind,) = rare_steps(length, account.training())
    assert (kind.steps, kind.waits) == ((9,), waits)
    waited = np.where(np.arange(10) == 9, 13 * 10**6, 0)
    assert kind.waiting(length, waited).steps == (9,)
    assert kind.waiting(length, waited // 2).steps == (() if waits else (9,))


def test_a_recording_of_equal_steps_has_no_rare_work():
    assert rare_steps(np.full(10, 10**6), trained((10, 5 * 10**6))) == ()


@pytest.mark.parametrize(
    ("steps", "share"), [((1, 7, 13), 1 / 6), ((1, 7), 1 / 5), ((1, 6, 13), 1 / 5)]
)
def test_a_regular_period_of_the_recording_mends_that_of_few_steps(
    steps: tuple[int, ...], share: float
) -> None:
    length = np.array([401 * 10**6 if at in steps else 10**6 for at in range(16)])
    (kind,) = rare_steps(length, trained((5, 400 * 10**6)))
    assert kind.steps == steps
    assert kind.share == pytest.approx(share, rel=0.01)
