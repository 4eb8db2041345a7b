"""Which differences are more than noise."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backspot.comparison.noise import _t_probability, _t_quantile, interval, typical_spread

# Two-sided quantiles of Student's t, as tables print them, by degrees of freedom.
LEVELS_OF_TABLE = (0.1, 0.05, 0.01, 0.001)
TABLE = {
    1: (6.314, 12.706, 63.657, 636.619),
    2: (2.920, 4.303, 9.925, 31.599),
    3: (2.353, 3.182, 5.841, 12.924),
    4: (2.132, 2.776, 4.604, 8.610),
    5: (2.015, 2.571, 4.032, 6.869),
    6: (1.943, 2.447, 3.707, 5.959),
    7: (1.895, 2.365, 3.499, 5.408),
    8: (1.860, 2.306, 3.355, 5.041),
    9: (1.833, 2.262, 3.250, 4.781),
    10: (1.812, 2.228, 3.169, 4.587),
    15: (1.753, 2.131, 2.947, 4.073),
    20: (1.725, 2.086, 2.845, 3.850),
    30: (1.697, 2.042, 2.750, 3.646),
    60: (1.671, 2.000, 2.660, 3.460),
    120: (1.658, 1.980, 2.617, 3.373),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_students_quantiles_are_those_of_the_tables(freedom):
    found = [_t_quantile(level, freedom) for level in LEVELS_OF_TABLE]
    assert found == pytest.approx(TABLE[freedom], abs=6e-4)


FREEDOM = st.integers(1, 204)  # as many as ``interval`` asks for, those borrowed included
LEVELS = st.floats(1e-7, 0.9)


@given(LEVELS, FREEDOM)
def test_students_quantile_undoes_the_probability(level, freedom):
    angle = math.atan(_t_quantile(level, freedom) / math.sqrt(freedom))
    assert 1 - _t_probability(angle, freedom) == pytest.approx(level, rel=1e-6, abs=1e-12)


@given(st.floats(0.01, 1.5), FREEDOM)
def test_students_probability_is_the_integral_of_the_density(angle, freedom):
    """With t = tan(a) * sqrt(n), the density over a is proportional to cos(a) ** (n - 1)."""

    def density(at):
        return math.cos(at) ** (freedom - 1)

    def integral(end, steps=400):
        width = end / steps
        inner = sum((4 if k % 2 else 2) * density(k * width) for k in range(1, steps))
        return width / 3 * (density(0) + inner + density(end))

    share = integral(angle) / integral(math.pi / 2)
    assert _t_probability(angle, freedom) == pytest.approx(share, abs=1e-6)


@given(LEVELS, FREEDOM)
def test_students_quantile_falls_with_the_level_and_the_degrees_of_freedom(level, freedom):
    quantile = _t_quantile(level, freedom)
    assert quantile > _t_quantile(level * 1.1, freedom)
    assert quantile > _t_quantile(level, freedom + 1)


def test_one_step_on_a_side_allows_no_interval():
    assert interval([100], [1_000, 1_001]) is None
    assert interval([100, 101], [1_000]) is None


def test_steps_that_never_vary_still_leave_the_floor():
    assert not interval([1_000] * 5, [1_019] * 5).clear
    assert interval([1_000] * 5, [1_030] * 5).clear


def test_two_steps_show_only_what_is_large():
    assert not interval([100, 104], [115, 119]).clear
    assert interval([100, 104], [300, 304]).clear


def test_a_lucky_small_variance_counts_as_the_typical_one():
    before, after = [1_000, 1_001, 1_000], [1_100, 1_101, 1_100]
    assert interval(before, after, typical=0.0, among=50).clear
    assert not interval(before, after, typical=0.1, among=50).clear


def test_the_typical_spread_ignores_what_takes_no_time_or_one_step():
    assert typical_spread([(0, 0), (5,), (10, 10), (9, 11), (9, 11)]) == pytest.approx(0.1414, 1e-3)
    assert typical_spread([]) == 0


@pytest.mark.slow
def test_among_many_modules_of_the_same_noise_hardly_any_is_claimed():
    chance = random.Random(5)

    def recorded(steps):
        return [[max(1, round(chance.gauss(1e6, 1e5))) for _ in range(steps)] for _ in range(200)]

    for steps in (2, 3, 5):
        wrong = 0
        for _ in range(20):
            sides = recorded(steps), recorded(steps)
            typical = typical_spread([*sides[0], *sides[1]])
            pairs = zip(*sides, strict=True)
            wrong += sum(interval(*p, typical=typical, among=200).clear for p in pairs)
        assert wrong <= 3, f"{wrong} wrong claims in 20 comparisons of {steps} steps"


def steps_of(chance, mean, spread, count):
    return [max(1, round(chance.gauss(mean, spread * mean))) for _ in range(count)]


def recorded_with_tiny_modules(chance, count, large=1e6):
    """A steady module of half the backward's time, and twenty tiny ones that vary a lot."""
    return [
        steps_of(chance, large, 0.007, count),
        *(steps_of(chance, 2e4, 0.25, count) for _ in range(20)),
    ]


def claims(sides):
    """Which modules of two recordings are told apart."""
    typical = typical_spread([*sides[0], *sides[1]])
    pairs = list(zip(*sides, strict=True))
    reach = 0.005 * max(sum(map(sum, side)) / len(side[0]) for side in sides)
    found = [interval(*p, typical=typical, among=len(pairs), reach=reach).clear for p in pairs]
    return [index for index, clear in enumerate(found) if clear]


@pytest.mark.parametrize("steps", [8, 10, 20])
def test_a_clear_change_of_a_steady_module_is_seen_among_tiny_ones_that_vary(steps):
    chance = random.Random(steps)
    for _ in range(20):
        sides = [recorded_with_tiny_modules(chance, steps, large) for large in (1e6, 1.2e6)]
        assert claims(sides) == [0]
        assert claims([*reversed(sides)]) == [0]


def test_a_change_within_what_recordings_differ_by_is_not_claimed_however_steady_the_module():
    chance = random.Random(7)
    sides = [recorded_with_tiny_modules(chance, 10, large) for large in (1e6, 1.06e6)]
    assert claims(sides) == []


def two_speeds(chance, mean, count):
    return [round(mean * chance.choice((1.0, 1.3)) * chance.gauss(1, 0.005)) for _ in range(count)]


def now_and_then_slow(chance, mean, count):
    return [round(mean * (10 if chance.random() < 0.1 else 1)) for _ in range(count)]


def skewed(chance, mean, count):
    return [round(mean * chance.lognormvariate(0, 0.5)) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [8, 10, 20])
@pytest.mark.parametrize("kind", [None, two_speeds, now_and_then_slow, skewed])
def test_equal_recordings_are_told_apart_in_few_comparisons_whatever_varies(steps, kind):
    chance = random.Random(11)

    def recorded():
        tiny = recorded_with_tiny_modules(chance, steps)
        return tiny if kind is None else [*(kind(chance, 1e6, steps) for _ in range(8)), *tiny]

    wrong = sum(bool(claims([recorded(), recorded()])) for _ in range(60))
    assert wrong <= 3, f"{wrong} of 60 comparisons of the same thing claim something"


_SAMPLES = st.lists(st.integers(0, 10**13), min_size=2, max_size=6)


@given(_SAMPLES, _SAMPLES, st.floats(0, 3, allow_subnormal=False), st.integers(1, 999))
def test_the_interval_turns_around_with_the_sides(before, after, typical, among):
    there = interval(before, after, typical=typical, among=among)
    back = interval(after, before, typical=typical, among=among)
    assert (there.low, there.high, there.clear) == (-back.high, -back.low, back.clear)
    assert there.low <= there.high
