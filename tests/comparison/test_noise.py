"""Which differences are more than noise."""

import random
from math import exp, sqrt
from statistics import fmean

import pytest
from hypothesis import given, strategies as st

from backspot.comparison.distributions import prior_of, quantile
from backspot.comparison.noise import (
    Limits,
    Times,
    common_to,
    error_of_mean,
    interval,
    sum_of,
)

ALONE = Limits()
MODULE = Limits(is_module=True)


def times(*by_step):
    return [Times(fmean(by_step), by_step)]


def steady(mean, spread=0.007, steps=10, seed=0):
    chance = random.Random(f"{mean} {seed}")
    return times(*(round(mean * chance.gauss(1, spread)) for _ in range(steps)))


def runs(*means):
    """Recordings of ten steps each, whose steps hardly vary."""
    return [steady(mean, 1e-4, seed=at)[0] for at, mean in enumerate(means)]


# Student's distribution.


@pytest.mark.parametrize(
    ("chance", "freedom", "expected"),
    [
        (0.05, 1, 12.7062),
        (0.05, 2, 4.30265),
        (0.01, 4, 4.60409),
        (0.05, 9, 2.26216),
        (0.001, 30, 3.64596),
        (0.05, float("inf"), 1.95996),
    ],
)
def test_quantiles_are_those_of_the_tables(chance, freedom, expected):
    assert quantile(chance, freedom) == pytest.approx(expected, abs=1e-5)


@given(st.floats(0.5, 1e4), st.floats(1e-6, 0.9), st.floats(1e-6, 0.9))
def test_a_smaller_chance_takes_more_standard_errors(freedom, one, other):
    less, more = sorted((one, other))
    assert quantile(less, freedom) >= quantile(more, freedom) >= 0


# The mean over steps.


def test_the_error_of_independent_steps_is_that_of_a_mean():
    chance = random.Random(1)
    found = [error_of_mean([chance.gauss(100, 5) for _ in range(400)]) for _ in range(50)]
    assert fmean(sqrt(one.variance) for one in found) == pytest.approx(5 / 20, rel=0.1)


def test_steps_that_follow_each_other_and_are_alike_say_less():
    chance = random.Random(2)
    walk, steps = 0.0, []
    for _ in range(400):
        walk = 0.8 * walk + chance.gauss(0, 1)
        steps.append(100 + walk)
    shuffled = chance.sample(steps, len(steps))
    assert error_of_mean(steps).variance > 3 * error_of_mean(shuffled).variance


KINDS = {
    "normal": lambda chance, steps: [chance.gauss(100, 10) for _ in range(steps)],
    "skewed": lambda chance, steps: [chance.lognormvariate(0, 1) for _ in range(steps)],
    "two modes": lambda chance, steps: [chance.choice((100, 130)) for _ in range(steps)],
    "hiccups": lambda chance, steps: [
        chance.gauss(100, 1) + 900 * (chance.random() < 0.02) for _ in range(steps)
    ],
    "each fourth": lambda chance, steps: [
        chance.gauss(100 + 40 * (step % 4 == 0), 1) for step in range(steps)
    ],
}


def alike(chance, steps, likeness=0.5):
    value, made = chance.gauss(0, 1), []
    for _ in range(steps):
        value = likeness * value + sqrt(1 - likeness**2) * chance.gauss(0, 1)
        made.append(100 + 5 * value)
    return made


@pytest.mark.parametrize("steps", [10, 40, 200])
@pytest.mark.parametrize("kind", [*KINDS, "alike"])
def test_an_interval_holds_the_true_difference_about_as_often_as_it_says(kind, steps):
    chance = random.Random(f"{kind} {steps}")
    make = alike if kind == "alike" else KINDS[kind]
    trials, held = 300, 0
    for _ in range(trials):
        found = interval(times(*make(chance, steps)), times(*make(chance, steps)), None, ALONE)
        held += found.low <= 0 <= found.high
    assert held >= (0.93 if kind != "alike" else 0.86) * trials


@given(st.integers(2, 60), st.integers(0, 10**6))
def test_more_of_the_same_steps_narrow_the_interval(steps, seed):
    chance = random.Random(seed)
    few = [chance.randint(900, 1_100) for _ in range(steps)]
    many = [chance.choice(few) for _ in range(40 * steps)]
    wide, narrow = (interval(times(*some), times(*some), None, ALONE) for some in (few, many))
    assert narrow.high <= wide.high


@given(
    st.lists(st.integers(1, 10**9), min_size=2, max_size=40),
    st.lists(st.integers(1, 10**9), min_size=2, max_size=40),
    st.floats(1e-3, 1e3),
)
def test_times_of_another_unit_have_the_same_interval_in_it(before, after, unit):
    there = interval(times(*before), times(*after), None, ALONE)
    scaled = ([one * unit for one in some] for some in (before, after))
    other = interval(*(times(*some) for some in scaled), None, ALONE)
    bounds = (unit * there.low, unit * there.high)
    assert (other.low, other.high) == pytest.approx(bounds, rel=1e-6, abs=1e-6 * max(after) * unit)


def test_steps_that_something_held_up_do_not_count():
    by_step = [*steady(1e6)[0].by_step, 10**9]
    held_up = [Times(1e6, by_step, frozenset({10}))]
    assert interval(held_up, steady(1.2e6), None, ALONE).clear


def test_the_noise_of_a_recording_in_real_time_contains_that_of_the_real_steps():
    known = steady(1e6)[0]
    real = Times(known.typical, known.by_step, real_steps=[10, 11, 19, 12, 9, 13])
    assert interval([real], [real], None, ALONE).high > interval([known], [known], None, ALONE).high


def test_one_step_on_a_side_allows_no_interval():
    assert interval(times(100), times(1_000, 1_001), None, ALONE) is None
    assert interval(times(100, 101), times(1_000), None, MODULE) is None


def test_errors_that_are_added_are_known_as_well_as_the_larger():
    small, large = error_of_mean([1, 2, 3]), error_of_mean([10, 50, 90, 20, 70])
    both = sum_of([small, large])
    assert both.variance == small.variance + large.variance
    assert large.freedom <= both.freedom <= small.freedom + large.freedom


# Modules.


def common_of(*pairs):
    return common_to(pairs, (9_000, 10_000))


def test_the_common_shift_is_the_median_and_its_scatter_that_of_the_modules():
    ratios = [exp(0.1 + 0.01 * at) for at in range(-4, 5)]
    pairs = [([Times(1_000.0, ())], [Times(1_000.0 * ratio, ())]) for ratio in ratios]
    common = common_of(*pairs)
    assert common.shift == pytest.approx(0.1)
    assert common.scatter == pytest.approx(1.4826 * 0.02)


def test_few_modules_and_tiny_ones_have_nothing_in_common():
    def common(before, after, modules):
        pair = [Times(before, ())], [Times(after, ())]
        return common_to([pair] * modules, (7_000, 7_700))

    assert common(1_000.0, 1_100.0, 8) is not None
    assert common(1_000.0, 1_100.0, 7) is None
    assert common(1.0, 2.0, 100) is None
    assert common(0.0, 900.0, 100) is None


def test_what_varies_from_step_to_step_is_no_scatter_between_recordings():
    pairs = [(steady(1_000, 0.2, seed=at), steady(1_000, 0.2, seed=at + 50)) for at in range(15)]
    alone = [tuple([Times(side[0].typical, ())] for side in pair) for pair in pairs]
    wholes = (15_000.0, 15_000.0)
    assert common_to(pairs, wholes).scatter < 0.5 * common_to(alone, wholes).scatter


def test_what_all_modules_do_is_no_change_of_a_module():
    pairs = [(steady(1e6, seed=at), steady(1.3e6, seed=at + 50)) for at in range(12)]
    common = common_to(pairs, (12e6, 15.6e6))
    found = interval(steady(1e6), steady(1.3e6), common, MODULE)
    assert not found.clear
    assert found.doubtful
    assert interval(steady(1e6), steady(2e6), common, MODULE).clear


def test_small_shares_are_not_told():
    flat = [times(*[value] * 5) for value in (1_000, 1_019, 1_030)]
    limits = Limits(is_module=True, share=0.02)
    assert not interval(flat[0], flat[1], None, limits).clear
    assert interval(flat[0], flat[2], None, limits).clear
    assert not interval(flat[0], flat[2], None, Limits(is_module=True, least=40)).clear


# Several recordings.


def test_recordings_that_differ_more_than_the_sides_tell_nothing_of_the_code():
    assert not interval(runs(100e6, 130e6, 90e6), runs(110e6, 145e6, 100e6), None, ALONE).clear


def test_a_tenth_that_recordings_of_the_same_code_never_differ_by_is_the_code():
    before, after = runs(100e6, 100.5e6, 99.6e6), runs(110e6, 110.4e6, 109.5e6)
    found = interval(before, after, None, ALONE)
    assert found.clear
    assert found.low > 5e6


def test_three_recordings_that_are_alike_by_luck_claim_nothing_that_their_steps_leave_open():
    before = [steady(1e6, 0.2, seed=seed)[0] for seed in range(3)]
    lucky = [Times(1e6, one.by_step) for one in before]
    slower = [Times(1.02e6, one.by_step) for one in before]
    assert not interval(lucky, slower, None, ALONE).clear


def test_more_recordings_tell_smaller_changes():
    spread = (0.96, 1.01, 1.03)

    def side(mean, number):
        return runs(*(mean * spread[at % 3] for at in range(number)))

    few = interval(side(100e6, 3), side(108e6, 3), None, ALONE)
    many = interval(side(100e6, 12), side(108e6, 12), None, ALONE)
    assert not few.clear
    assert many.clear
    assert many.high - many.low < few.high - few.low


@pytest.mark.parametrize("spread", [0.01, 0.3])
def test_equal_code_is_hardly_ever_claimed_to_be_slower_however_recordings_vary(spread):
    chance = random.Random(5)
    kinds = (
        lambda: exp(chance.gauss(0, spread)),
        lambda: 1 + spread * (chance.random() < 1 / 6),
        lambda: exp(spread * chance.expovariate(1)),
    )
    for kind in kinds:
        claims = 0
        for _ in range(400):
            sides = ([Times(1e8 * kind(), [10**8] * 10) for _ in range(3)] for _ in range(2))
            claims += interval(*sides, None, ALONE).clear
        assert claims <= 8


def test_a_module_is_found_though_recordings_of_a_busy_machine_differ_by_half():
    chance = random.Random(6)
    loads = [exp(chance.gauss(0, 0.4)) for _ in range(6)]

    def module(scale=1.0):
        sides = []
        for side in (loads[:3], loads[3:]):
            part = scale if side is not loads[:3] and scale != 1 else 1.0
            means = [1e6 * load * exp(chance.gauss(0, 0.02)) for load in side]
            sides.append([steady(mean, 0.01, seed=mean)[0] for mean in means])
            if len(sides) == 2 and scale != 1:
                sides[1] = [
                    Times(one.typical * part, [round(ns * part) for ns in one.by_step])
                    for one in sides[1]
                ]
        return tuple(sides)

    pairs = [module() for _ in range(20)]
    common = common_to(pairs, (20e6, 20e6))
    assert common.prior is not None
    limits = Limits(20, is_module=True)
    assert interval(*module(2.5), common, limits).clear
    assert not any(interval(*pair, common, limits).clear for pair in pairs)


def test_many_variances_tell_how_well_one_is_known():
    chance = random.Random(7)

    def of_values(variance, freedom=4):
        return variance * sum(chance.gauss(0, 1) ** 2 for _ in range(freedom)) / freedom

    alike = prior_of([of_values(2.0) for _ in range(500)], 4)
    assert alike.variance == pytest.approx(2, rel=0.1)
    assert alike.freedom > 50
    unlike = prior_of([of_values(2.0 * exp(chance.gauss(0, 1.5))) for _ in range(500)], 4)
    assert unlike.freedom < 5
    moderated, freedom = unlike.moderated(100.0, 4)
    assert unlike.variance < moderated < 100
    assert freedom == unlike.freedom + 4
    assert prior_of([1.0] * 7 + [0.0] * 9, 4) is None


# Both sides.

_RUNS = st.lists(
    st.lists(st.integers(1, 10**13), min_size=2, max_size=12).map(lambda one: times(*one)[0]),
    min_size=1,
    max_size=4,
)


@given(_RUNS, _RUNS)
def test_the_interval_turns_around_with_the_sides(before, after):
    there, back = interval(before, after, None, ALONE), interval(after, before, None, ALONE)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert there.low <= there.high


@given(_RUNS)
def test_a_side_never_differs_from_itself(side):
    for limits in (ALONE, MODULE):
        found = interval(side, side, None, limits)
        assert not found.clear
        assert not found.doubtful
