"""Which differences are more than noise."""

import random
from math import exp, log

import pytest
from hypothesis import given, strategies as st

from backspot.comparison.noise import Limits, Shift, Times, common_shift, interval

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
    pairs = [(Times(1_000.0, ()), Times(1_000.0 * ratio, ())) for ratio in ratios]
    shift = common_shift(pairs, (9_000, 10_000))
    assert shift.common == pytest.approx(0.1)
    assert shift.scatter == pytest.approx(1.4826 * 0.02)


def test_few_modules_and_tiny_ones_have_no_common_shift():
    def shift(before, after, modules):
        return common_shift([(Times(before, ()), Times(after, ()))] * modules, (7_000, 7_700))

    assert shift(1_000.0, 1_100.0, 8) is not None
    assert shift(1_000.0, 1_100.0, 7) is None
    assert shift(1.0, 2.0, 100) is None
    assert shift(0.0, 900.0, 100) is None


def test_what_varies_from_step_to_step_is_no_scatter_between_recordings():
    times = [(steady(1_000, 0.2, seed=at), steady(1_000, 0.2, seed=at + 50)) for at in range(15)]
    alone = [(Times(was.typical, ()), Times(now.typical, ())) for was, now in times]
    wholes = (15_000.0, 15_000.0)
    assert common_shift(times, wholes).scatter < 0.5 * common_shift(alone, wholes).scatter


def test_one_step_on_a_side_allows_no_interval():
    assert interval(times(100), times(1_000, 1_001), QUIET, MODULE) is None
    assert interval(times(100, 101), times(1_000), QUIET, WHOLE) is None


def test_a_steady_module_that_gets_a_fifth_slower_is_found():
    for seed in range(100):
        found = interval(steady(1e6, seed=seed), steady(1.2e6, seed=seed), QUIET, MODULE)
        assert found.clear


def test_a_module_that_appears_out_of_nothing_is_found_even_where_modules_scatter():
    nothing, something = times(*[0] * 30), steady(1.65e6, 0.05, 30)
    for shift in (None, QUIET, Shift(0.3, 0.4)):
        assert interval(nothing, something, shift, MODULE).clear
        assert interval(something, nothing, shift, MODULE).clear


def test_what_all_modules_do_is_no_change_of_a_module():
    common = Shift(log(1.3), 0.02)
    found = interval(steady(1e6), steady(1.3e6), common, MODULE)
    assert not found.clear
    assert found.doubtful
    assert interval(steady(1e6), steady(2e6), common, MODULE).clear


def test_a_module_that_got_slower_by_less_than_all_others_is_not_claimed():
    found = interval(steady(1e6), steady(1.3e6), Shift(log(2), 0.02), MODULE)
    assert not found.clear
    assert found.doubtful


def test_one_step_that_hiccups_hides_no_change():
    before = times(*[1_000_000, 1_003_000] * 4, 1_001_000, 300_000_000)
    assert interval(before, steady(1.2e6), QUIET, MODULE).clear


@pytest.mark.parametrize("limits", [MODULE, WHOLE])
def test_one_step_that_hiccups_hardly_widens_the_noise(limits):
    chance = random.Random(5)
    for _ in range(100):
        before, after = ([round(chance.gauss(22e6, 2e5)) for _ in range(10)] for _ in range(2))
        calm = interval(times(*before), times(*after), QUIET, limits)
        before[chance.randrange(10)] = 10**9
        hit = interval(times(*before), times(*after), QUIET, limits)
        assert hit.high - hit.low < 3 * (calm.high - calm.low)


def test_modules_that_scatter_hide_a_change_within_their_scatter():
    assert not interval(steady(1e6), steady(1.3e6), Shift(0.0, 0.1), MODULE).clear


def test_the_whole_is_claimed_alone_only_if_the_steps_hardly_vary():
    alike = Shift(log(1.2), 0.01)
    assert interval(steady(1e6, 0.002), steady(1.2e6, 0.002), alike, WHOLE).clear
    busy = interval(steady(1e6, 0.05), steady(1.2e6, 0.05), alike, WHOLE)
    assert not busy.clear
    assert not interval(steady(1e6, 0.05), steady(1.2e6, 0.05), None, WHOLE).clear


def test_a_whole_of_which_all_steps_are_several_times_slower_is_claimed_though_they_vary():
    before = times(80, 100, 90, 130, 180, 95, 100, 120, 140, 100)
    after = times(*(10 * value for value in before.by_step))
    twice = times(*(2 * value for value in before.by_step))
    assert not interval(before, twice, None, WHOLE).clear
    for one, other, sign in ((before, after, 1), (after, before, -1)):
        found = interval(one, other, None, WHOLE)
        assert found.clear
        assert found.low * sign > 0
        assert found.high * sign > 0
    # A phase this small says nothing of the step.
    assert not interval(before, after, None, Limits.of_whole(least=10_000)).clear


def test_two_steps_show_only_what_is_large():
    assert not interval(times(100, 104), times(115, 119), None, MODULE).clear
    assert interval(times(100, 104), times(300, 304), None, MODULE).clear


def test_small_shares_are_not_claimed():
    flat = [times(*[value] * 5) for value in (1_000, 1_019, 1_030)]
    assert not interval(flat[0], flat[1], Shift(0.0, 0.0), MODULE).clear
    assert interval(flat[0], flat[2], Shift(0.0, 0.0), MODULE).clear
    assert not interval(flat[0], flat[2], Shift(0.0, 0.0), Limits(least=40)).clear


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
        assert sum(interval(*pair, QUIET, MODULE).clear for pair in pairs) <= 10


_SAMPLES = st.lists(st.integers(0, 10**13), min_size=2, max_size=12).map(lambda one: times(*one))
_SHIFTS = st.one_of(st.none(), st.builds(Shift, st.floats(-2, 2), st.floats(0, 1)))


@given(_SAMPLES, _SAMPLES, _SHIFTS, st.sampled_from((MODULE, WHOLE)))
def test_the_interval_turns_around_with_the_sides(before, after, shift, limits):
    there = interval(before, after, shift, limits)
    turned = Shift(-shift.common, shift.scatter) if shift else None
    back = interval(after, before, turned, limits)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert there.clear == back.clear
    assert there.low <= there.high
