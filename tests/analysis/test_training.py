"""The account of all steps of a training: exact sums, rare work, what is no step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from backspot.analysis.training import Marks, StepTimes
from backspot.results import LoaderUse

MS = 1_000_000
times = st.integers(1, 10**11)


def added(steps, **columns):
    """Steps of these times; each column is a function of the step's index, or a number."""
    account = StepTimes()
    for index, total in enumerate(steps):
        row = {"data": 0, "backward": 0, "optimizer": 0, "thread": total, "marks": 0}
        for name, value in columns.items():
            row[name] = value(index) if callable(value) else value
        account.add(total, **row)
    return account


@given(st.lists(st.tuples(times, times, times, times), min_size=1, max_size=60))
def test_the_mean_is_that_of_all_steps_that_count_and_its_parts_sum_to_it(steps):
    totals = [sum(parts) for parts in steps]
    account = added(
        totals,
        data=lambda at: steps[at][0],
        backward=lambda at: steps[at][1],
        optimizer=lambda at: steps[at][2],
    )
    training = account.training()
    left_out = [apart for apart in training.apart if apart.name == "start"]
    count = len(steps) - sum(apart.steps for apart in left_out)
    assert training.steps == len(steps)
    assert training.counted == count
    assert training.step_ns == (sum(totals) - sum(apart.wall_ns for apart in left_out)) // count
    parts = training.data_ns, training.forward_ns, training.backward_ns, training.optimizer_ns
    assert sum(parts) == training.step_ns
    assert training.longest_ns == max(totals)


@given(st.lists(times, min_size=1, max_size=60), st.integers(0, 3))
def test_steps_that_are_passed_over_count_as_steps_and_add_no_time(steps, passed):
    account = StepTimes()
    for total in steps:
        for _ in range(passed):
            account.pass_over()
        account.add(total, 0, 0, 0, total, 0)
    training, plain = account.training(), added(steps).training()
    assert training.steps == len(steps) * (passed + 1)
    assert (training.step_ns, training.counted) == (plain.step_ns, plain.counted)


def test_without_a_step_nothing_is_known():
    assert StepTimes().training() is None


@pytest.mark.parametrize("period", [2, 3, 16, 100])
def test_work_that_recurs_has_its_period_its_time_and_its_share(period):
    random.seed(period)
    long = {at for at in range(2000) if at % period == period - 1}
    steps = [int(random.gauss(2 * MS, 0.1 * MS)) + 80 * MS * (at in long) for at in range(2000)]
    (rare,) = added(steps).training().rare
    assert rare.period == pytest.approx(2000 / len(long))
    assert rare.wall_ns == pytest.approx(80 * MS, rel=0.02)
    mean = sum(steps) / len(steps)
    assert rare.share == pytest.approx(80 * MS / period / mean, rel=0.02)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"data": lambda at: 49 * MS * (at % 10 == 0)}, "waiting for data"),
        ({"backward": lambda at: MS + 49 * MS * (at % 10 == 0)}, "backward"),
        ({"optimizer": lambda at: MS // 2 + 49 * MS * (at % 10 == 0)}, "optimizer"),
        ({"marks": lambda at: Marks.SAVED * (at % 10 == 0)}, "saving a checkpoint"),
        ({"marks": lambda at: Marks.OTHER_DATA * (at % 10 == 0)}, "evaluation"),
        (
            {"marks": lambda at: (Marks.OTHER_DATA | Marks.SAVED) * (at % 10 == 0)},
            "evaluation and saving a checkpoint",
        ),
        ({}, "work outside backward and optimizer"),
    ],
)
def test_rare_work_is_named_by_what_happened_or_by_the_part_that_is_longer(columns, name):
    steps = [2 * MS + 50 * MS * (at % 10 == 0) for at in range(1, 200)]
    shifted = {key: lambda at, value=value: value(at + 1) for key, value in columns.items()}
    (rare,) = added(steps, **shifted).training().rare
    assert rare.name == name


def test_a_step_that_the_machine_held_up_is_in_the_mean_and_is_no_rare_work():
    steps = [2 * MS + 50 * MS * (at in (70, 133)) for at in range(200)]
    training = added(steps, thread=2 * MS).training()
    assert training.rare == ()
    assert training.held_up == 2
    assert training.held_up_ns == pytest.approx(2 * 50 * MS / 200, rel=0.01)
    assert training.step_ns == sum(steps) // 200
    assert training.typical_ns == 2 * MS


@pytest.mark.parametrize("ran", [1.0, 0.5, 0.2])
def test_long_work_of_which_a_busy_machine_let_a_part_run_is_work(ran):
    steps = [MS + 200 * MS * (at % 8 == 7) for at in range(160)]
    training = added(steps, thread=lambda at: MS + int(ran * 200 * MS) * (at % 8 == 7)).training()
    assert training.held_up == 0
    (rare,) = training.rare
    assert rare.period == 8


def test_on_a_device_a_long_step_without_time_of_the_thread_is_work():
    steps = [2 * MS + 50 * MS * (at % 20 == 10) for at in range(200)]
    assert added(steps, thread=2 * MS).training(has_device=True).rare


def test_slow_first_steps_are_no_steps():
    training = added([900 * MS, 300 * MS, *[10 * MS] * 50]).training()
    assert training.step_ns == 10 * MS
    (apart,) = training.apart
    assert (apart.name, apart.steps, apart.wall_ns) == ("start", 2, 1200 * MS)


def test_a_slow_step_in_the_middle_is_a_step():
    training = added([10 * MS] * 20 + [300 * MS] + [10 * MS] * 20).training()
    assert training.step_ns == (400 * MS + 300 * MS) // 41


def test_steps_that_compile_code_come_once():
    marks = {0: Marks.COMPILED, 30: Marks.COMPILED}
    steps = [5000 * MS, *[10 * MS] * 29, 8000 * MS, *[10 * MS] * 50]
    training = added(steps, marks=lambda at: marks.get(at, 0)).training()
    assert training.step_ns == 10 * MS
    assert [(apart.name, apart.steps) for apart in training.apart] == [("compilation", 2)]


@given(st.floats(0.1, 2), st.integers(0, 2**32))
def test_steps_that_become_slower_are_told(slower, seed):
    random.seed(seed)
    steps = [int(random.gauss(10 * MS, 0.2 * MS) * (1 + slower * at / 3000)) for at in range(3000)]
    assert added(steps).training().change == pytest.approx(slower * 0.75, rel=0.35)


@given(st.integers(0, 2**32), st.booleans())
def test_steps_that_only_waver_did_not_become_slower(seed, faster):
    random.seed(seed)
    trend = -0.3 if faster else 0.0
    steps = [
        int(abs(random.gauss(10 * MS, 2 * MS)) * (1 + trend * at / 2000)) + 1 for at in range(2000)
    ]
    assert added(steps).training().change == 0


def test_the_pieces_of_a_training_have_all_its_steps():
    steps = [(1 + at // 1000) * MS for at in range(10_000)]
    training = added(steps).training()
    assert len(training.stretches) <= 64
    assert sum(piece.steps for piece in training.stretches) == 10_000
    means = [piece.step_ns for piece in training.stretches]
    assert means == sorted(means)
    assert training.stretches[0].first == 1


def test_memory_that_keeps_growing_is_told_and_other_memory_is_not():
    growing, level = StepTimes(), StepTimes()
    for at in range(2000):
        for account in (growing, level):
            account.add(10 * MS, 0, 0, 0, 10 * MS, 0)
        growing.add_memory(1_000_000_000 + at * 1_000_000)
        level.add_memory(1_000_000_000 + min(at, 50) * 20_000_000 + at % 7 * 1_000_000)
    assert growing.training().memory.per_step_bytes == pytest.approx(1_000_000, rel=0.05)
    assert level.training().memory.per_step_bytes == 0


def test_what_is_kept_does_not_grow_with_the_number_of_steps():
    import tracemalloc

    account = StepTimes()
    random.seed(1)
    totals = [int(random.gauss(10 * MS, MS)) for _ in range(10_000)]

    def take(count):
        for at in range(count):
            account.add(totals[at % 10_000], 0, MS, MS, MS, 0)
            if at % 100 == 0:
                account.add_memory(10**9)
        return account.training()

    take(20_000)
    tracemalloc.start()
    take(300_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000


def test_loaders_come_with_the_most_used_first():
    uses = [LoaderUse(2, 5, 0, 0), LoaderUse(4, 100, 3, MS)]
    assert [use.workers for use in added([MS] * 5).training(uses).loaders] == [4, 2]
