"""Which differences between ranks are more than noise."""

import random
from math import exp, log

import pytest
from hypothesis import given, strategies as st

from backspot.job.noise import Limits, Shift, Times, common_shift, is_apart

QUIET = Shift(0.0, 0.01)
MODULE = Limits()
WHOLE = Limits.of_whole()


def times(*by_step):
    return Times(sorted(by_step)[len(by_step) // 2], by_step)


def steady(mean, spread=0.007, steps=10, seed=0):
    chance = random.Random(f"{mean} {seed}")
    return times(*(round(mean * chance.gauss(1, spread)) for _ in range(steps)))


def test_the_common_shift_is_the_median_and_its_scatter_that_of_the_modules():
    ratios = [exp(0.1 + 0.01 * at) for at in range(-4, 5)]
    pairs = [(1_000.0, 1_000.0 * ratio) for ratio in ratios]
    shift = common_shift(pairs, (9_000, 10_000))
    assert shift.common == pytest.approx(0.1)
    assert shift.scatter == pytest.approx(1.4826 * 0.02)


def test_few_modules_and_tiny_ones_have_no_common_shift():
    def shift(before, after, modules):
        return common_shift([(before, after)] * modules, (7_000, 7_700))

    assert shift(1_000.0, 1_100.0, 8) is not None
    assert shift(1_000.0, 1_100.0, 7) is None
    assert shift(1.0, 2.0, 100) is None
    assert shift(0.0, 900.0, 100) is None


def test_one_step_on_a_side_tells_nothing():
    assert not is_apart(times(100), times(1_000, 1_001), QUIET, MODULE)
    assert not is_apart(times(100, 101), times(1_000), QUIET, WHOLE)


def test_a_steady_module_that_gets_a_fifth_slower_is_found():
    for seed in range(100):
        assert is_apart(steady(1e6, seed=seed), steady(1.2e6, seed=seed), QUIET, MODULE)


def test_a_module_that_appears_out_of_nothing_is_found_even_where_modules_scatter():
    nothing, something = times(*[0] * 30), steady(1.65e6, 0.05, 30)
    for shift in (None, QUIET, Shift(0.3, 0.4)):
        assert is_apart(nothing, something, shift, MODULE)
        assert is_apart(something, nothing, shift, MODULE)


def test_on_a_busy_machine_a_module_that_waits_in_each_step_is_found_and_a_slow_rank_is_none():
    others, waiting = times(390_000, 250_000, 900_000, 410_000, 360_000), steady(1.6e8, 0.1, 5)
    assert is_apart(others, waiting, Shift(0.4, 1.6), MODULE)
    assert not is_apart(others, waiting, Shift(log(300), 1.6), MODULE)
    once = times(390_000, 380_000, 160_000_000, 400_000, 370_000)
    assert not is_apart(others, once, Shift(0.4, 1.6), MODULE)


def test_what_all_modules_do_is_no_change_of_a_module():
    common = Shift(log(1.3), 0.02)
    assert not is_apart(steady(1e6), steady(1.3e6), common, MODULE)
    assert is_apart(steady(1e6), steady(2e6), common, MODULE)


def test_a_module_that_got_slower_by_less_than_all_others_is_not_claimed():
    assert not is_apart(steady(1e6), steady(1.3e6), Shift(log(2), 0.02), MODULE)


def test_one_step_that_hiccups_hides_no_change():
    before = times(*[1_000_000, 1_003_000] * 4, 1_001_000, 300_000_000)
    assert is_apart(before, steady(1.2e6), QUIET, MODULE)


def test_modules_that_scatter_hide_a_change_within_their_scatter():
    assert not is_apart(steady(1e6), steady(1.3e6), Shift(0.0, 0.1), MODULE)


def test_the_whole_is_claimed_alone_only_if_the_steps_hardly_vary():
    alike = Shift(log(1.2), 0.01)
    assert is_apart(steady(1e6, 0.002), steady(1.2e6, 0.002), alike, WHOLE)
    busy = is_apart(steady(1e6, 0.05), steady(1.2e6, 0.05), alike, WHOLE)
    assert not busy
    assert not is_apart(steady(1e6, 0.05), steady(1.2e6, 0.05), None, WHOLE)


def test_a_whole_of_which_all_steps_are_several_times_slower_is_claimed_though_they_vary():
    before = times(80, 100, 90, 130, 180, 95, 100, 120, 140, 100)
    after = times(*(10 * value for value in before.by_step))
    twice = times(*(2 * value for value in before.by_step))
    assert not is_apart(before, twice, None, WHOLE)
    for one, other in ((before, after), (after, before)):
        assert is_apart(one, other, None, WHOLE)
    # A phase this small says nothing of the step.
    assert not is_apart(before, after, None, Limits.of_whole(least=10_000))


def test_two_steps_show_only_what_is_large():
    assert not is_apart(times(100, 104), times(115, 119), None, MODULE)
    assert is_apart(times(100, 104), times(300, 304), None, MODULE)


def test_small_shares_are_not_claimed():
    flat = [times(*[value] * 5) for value in (1_000, 1_019, 1_030)]
    assert not is_apart(flat[0], flat[1], Shift(0.0, 0.0), MODULE)
    assert is_apart(flat[0], flat[2], Shift(0.0, 0.0), MODULE)
    assert not is_apart(flat[0], flat[2], Shift(0.0, 0.0), Limits(least=40))


def test_equal_modules_that_vary_in_any_way_are_hardly_ever_told_apart():
    chance = random.Random(3)
    kinds = (
        lambda: chance.gauss(1e6, 1e5),
        lambda: 1e6 * chance.choice((1.0, 1.3)),
        lambda: 1e6 * (10 if chance.random() < 0.1 else 1),
        lambda: 1e6 * chance.lognormvariate(0, 0.5),
    )
    for kind in kinds:
        pairs = [[times(*(round(kind()) for _ in range(10))) for _ in range(2)] for _ in range(500)]
        assert sum(is_apart(*pair, QUIET, MODULE) for pair in pairs) <= 10


_SAMPLES = st.lists(st.integers(0, 10**13), min_size=2, max_size=12).map(lambda one: times(*one))
_SHIFTS = st.one_of(st.none(), st.builds(Shift, st.floats(-2, 2), st.floats(0, 1)))


@given(_SAMPLES, _SAMPLES, _SHIFTS, st.sampled_from((MODULE, WHOLE)))
def test_what_is_apart_is_apart_from_both_sides(before, after, shift, limits):
    turned = Shift(-shift.common, shift.scatter) if shift else None
    assert is_apart(before, after, shift, limits) == is_apart(after, before, turned, limits)
