"""What settings save beside a loader: a step takes no less than its next batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from backspot.live.plan.loader import numbers_of
from backspot.live.plan.pace import IF_READY, BesideLoader, LoaderPace, WorkersTrial, limit_of
from backspot.results.plan import Rung

MS = 1_000_000
AS_IT_IS = 40 * MS


def rung(setting: str, before: float, after: float, *on: str) -> Rung:
    return Rung(
        setting, "precision", on, before_ns=round(before * MS), step_ns=round(after * MS),
        low_ns=round((after - 0.1) * MS), high_ns=round((after + 0.1) * MS),
        verdict="helps", kept=True,
    )  # fmt: skip


def times(rungs: list[Rung]) -> list[tuple[str, float, float]]:
    return [(one.setting, one.before_ns / MS, one.step_ns / MS) for one in rungs]


LADDER = [rung("bf16", 40, 30), rung("channels_last", 30, 15, "bf16")]
FASTER = replace(rung("num_workers=8", 40, 20), axis="loader")


def beside(waits_ms: float, pace: LoaderPace | None) -> BesideLoader:
    return BesideLoader(AS_IT_IS, waits_ms * MS, pace)


def test_a_step_that_never_waits_keeps_its_ladder():
    found, others = beside(0, None).rungs(LADDER, [], None, None)
    assert (found, others) == (LADDER, [])


def test_no_setting_of_the_model_makes_a_step_shorter_than_its_next_batch():
    late = LoaderPace("num_workers=2", AS_IT_IS)
    found, others = beside(10, late).rungs(LADDER, [], None, late)
    assert not found
    assert times(others) == [("bf16", 40, 40), ("channels_last", 40, 40)]
    assert all(one.verdict == "does not help" for one in others)
    assert others[0].note == f"30.0 → 20.0 ms {IF_READY}"


def test_more_workers_come_first_where_the_loader_is_late_already():
    late, faster = LoaderPace("num_workers=2", AS_IT_IS), LoaderPace("num_workers=8", 12 * MS)
    found, others = beside(10, late).rungs(LADDER, [], FASTER, faster)
    assert times(found) == [
        ("num_workers=8", 40, 20),
        ("bf16", 30, 20),
        ("channels_last", 20, 12),
    ]
    assert found[2].on == ("num_workers=8", "bf16")
    assert not others


def test_more_workers_come_once_faster_settings_wait_for_the_loader():
    slow, faster = LoaderPace("num_workers=2", 25 * MS), LoaderPace("num_workers=8", 5 * MS)
    found, _ = beside(0, slow).rungs(LADDER, [], FASTER, faster)
    assert [one.setting for one in found] == ["bf16", "channels_last", "num_workers=8"]
    assert found[1].step_ns == 25 * MS
    assert found[2].on == ("bf16", "channels_last")


def test_loading_in_the_process_itself_adds_to_each_step():
    alone = LoaderPace.of_wait(0, 10 * MS, 30 * MS, 10 * MS, 8)
    found, others = beside(10, alone).rungs(LADDER, [], None, alone)
    assert times(found) == times(LADDER)
    assert not others


def test_handing_a_batch_over_is_no_limit_of_the_loader():
    late = LoaderPace.of_wait(2, 5 * MS, 30 * MS, 80 * MS, 8)
    handover = LoaderPace.of_wait(2, 5 * MS, 30 * MS, 8 * MS, 8)
    assert late.is_late(30 * MS)
    assert not handover.is_late(30 * MS)
    assert (late.step(15 * MS), handover.step(15 * MS)) == (35 * MS, 20 * MS)
    found, _ = beside(5, handover).rungs(LADDER, [], None, handover)
    assert times(found) == times(LADDER)


def test_what_is_known_of_a_setting_stays_beside_that_it_waits_for_a_loader():
    late, noted = (
        LoaderPace("num_workers=2", AS_IT_IS),
        replace(LADDER[0], note="the loss was not tried"),
    )
    _, others = beside(10, late).rungs([noted], [], None, late)
    assert others[0].note == f"the loss was not tried; 30.0 → 20.0 ms {IF_READY}"


def test_a_setting_that_is_too_close_to_tell_stays_so_beside_a_loader():
    late, open_ = LoaderPace("num_workers=2", AS_IT_IS), replace(LADDER[0], verdict="undecided")
    _, others = beside(10, late).rungs([], [replace(open_, kept=False)], None, late)
    assert others[0].verdict == "undecided"


def test_so_many_workers_are_tried_as_keep_up_half_and_twice_as_many():
    assert numbers_of(0, 40 * MS, 10 * MS, 16) == [0, 2, 5, 10]
    assert numbers_of(5, 40 * MS, 10 * MS, 16) == [5, 2, 10]
    assert numbers_of(0, 400 * MS, 10 * MS, 16) == [0, 8, 16]
    assert numbers_of(0, 1 * MS, 10 * MS, 16) == [0, 1, 2]
    assert numbers_of(0, 40 * MS, 10 * MS, 1) == [0, 1]


# What was tried beside what real steps wait for ---------------------------------------------------

A_TIME = st.floats(0, 200 * MS)
SOME_WAITS = st.dictionaries(st.integers(0, 16), A_TIME, min_size=1, max_size=4)


def paces_of(waits, now, fastest, slower, waits_ms, loads, cores):
    """The trial ran beside the fastest step; the real one computes as long, or longer."""
    trial, real_waits = WorkersTrial(waits, fastest, loads, cores), waits_ms * MS
    step = fastest + slower + real_waits
    if trial.misses(now, step, real_waits):
        return {}, LoaderPace.of_step(now, step, real_waits, trial)
    found = trial.paces(now, step, real_waits)
    return found, found[f"num_workers={now}"]


REAL = {
    "fastest": st.floats(MS, 200 * MS),
    "slower": A_TIME,
    "waits_ms": st.floats(0, 200),
    "loads": A_TIME,
    "cores": st.integers(1, 16),
    "computes": st.floats(0, 400 * MS),
}


@given(numbers=st.sets(st.integers(0, 16), min_size=2, max_size=4), wait=A_TIME, **REAL)
def test_equal_waits_in_a_trial_make_no_number_of_workers_faster(numbers, wait, computes, **real):
    now, *others = numbers
    found, pace = paces_of(dict.fromkeys(numbers, wait), now, **real)
    for number in others if found else ():
        assert found[f"num_workers={number}"].step(computes) >= pace.step(computes) - 1


@given(waits=SOME_WAITS, **REAL)
def test_no_number_of_workers_saves_more_of_a_step_than_in_its_trial(waits, computes, **real):
    now = next(iter(waits))
    found, pace = paces_of(waits, now, **real)
    for number in waits if found else ():
        saves = pace.step(computes) - found[f"num_workers={number}"].step(computes)
        assert saves <= max(0.0, waits[now] - waits[number]) + 1


@pytest.mark.parametrize("now", [0, 2, 8])
def test_a_wait_that_a_trial_does_not_show_is_not_judged_by_it(now):
    cached = WorkersTrial({now: 1 * MS, 4: 0.5 * MS}, 70 * MS, 10 * MS, 16)
    assert cached.misses(now, 100 * MS, 30 * MS).endswith("1.0 ms of 30.0 ms")
    assert cached.misses(now, 100 * MS, 1 * MS) == ""
    like_it = replace(cached, waits={now: 28 * MS, 4: 0.5 * MS})
    assert like_it.misses(now, 100 * MS, 30 * MS) == ""


def test_workers_that_a_trial_shows_to_keep_up_make_a_late_step_shorter():
    trial = WorkersTrial({2: 10 * MS, 8: 0.5 * MS}, 30 * MS, 80 * MS, 16)
    found = trial.paces(2, 40 * MS, 10 * MS)
    assert found["num_workers=2"].step(30 * MS) == 40 * MS
    assert found["num_workers=8"].step(30 * MS) == 30.5 * MS


# What only a faster step waits for ----------------------------------------------------------------


def test_a_faster_step_shows_what_one_process_alone_cannot():
    """A disk that ends before the workers do: each loads fast by itself."""
    limit = limit_of({11 * MS: 0.2 * MS, 6 * MS: 3.2 * MS})
    assert limit == 9.2 * MS
    trial = WorkersTrial({4: 0.2 * MS}, 11 * MS, 8 * MS, 16, limit)
    pace = LoaderPace.of_step(4, 11 * MS, 0, trial)
    assert pace is not None
    assert (pace.step(6 * MS), pace.step(11 * MS)) == (9.2 * MS, 11 * MS)
    batch = replace(rung("batch 64", 11, 6), kept=False)
    _, others = BesideLoader(11 * MS, 0, pace).rungs([], [batch], None, pace)
    assert times(others) == [("batch 64", 11, 9.2)]


@pytest.mark.parametrize(
    "waits",
    [
        {11 * MS: 2 * MS, 6 * MS: 2 * MS},  # a handover
        {11 * MS: 4 * MS, 6 * MS: 2 * MS},  # cores that computing and workers share
        {11 * MS: 0, 6 * MS: 0.2 * MS},
        {11 * MS: 3 * MS},
    ],
)
def test_a_wait_that_is_as_long_beside_a_slower_step_is_no_limit(waits):
    assert not limit_of(waits)


@given(st.dictionaries(st.integers(MS, 200 * MS), A_TIME, min_size=1, max_size=3))
def test_a_limit_is_between_the_fastest_and_the_slowest_step(waits):
    assert limit_of(waits) == 0 or min(waits) <= limit_of(waits) <= max(waits)
