"""What counts as more than noise."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backspot.comparison.noise import _quantile, interval, typical_spread


@pytest.mark.parametrize(
    ("level", "freedom", "known"),
    [
        (0.05, 1, 12.7062),
        (0.05, 2, 4.3027),
        (0.05, 3, 3.1824),
        (0.05, 4, 2.7764),
        (0.01, 5, 4.0321),
        (0.001, 10, 4.5869),
        (0.05, 120, 1.9799),
    ],
)
def test_students_quantiles_are_those_of_the_tables(level, freedom, known):
    assert _quantile(level, freedom) == pytest.approx(known, abs=1e-3)


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
