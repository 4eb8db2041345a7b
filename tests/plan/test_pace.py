"""What settings save beside a loader: a step takes no less than its next batch."""

from __future__ import annotations

from dataclasses import replace

from backspot.live.plan.loader import numbers_of
from backspot.live.plan.pace import IF_READY, BesideLoader, Pace
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


def beside(waits_ms: float, pace: Pace | None) -> BesideLoader:
    return BesideLoader(AS_IT_IS, waits_ms * MS, pace)


def test_a_step_that_never_waits_keeps_its_ladder():
    found, others = beside(0, None).rungs(LADDER, [], None, None)
    assert (found, others) == (LADDER, [])


def test_no_setting_of_the_model_makes_a_step_shorter_than_its_next_batch():
    late = Pace("num_workers=2", AS_IT_IS)
    found, others = beside(10, late).rungs(LADDER, [], None, late)
    assert not found
    assert times(others) == [("bf16", 40, 40), ("channels_last", 40, 40)]
    assert all(one.verdict == "does not help" for one in others)
    assert others[0].note == f"30.0 → 20.0 ms {IF_READY}"


def test_more_workers_come_first_where_the_loader_is_late_already():
    late, faster = Pace("num_workers=2", AS_IT_IS), Pace("num_workers=8", 12 * MS)
    found, others = beside(10, late).rungs(LADDER, [], FASTER, faster)
    assert times(found) == [
        ("num_workers=8", 40, 20),
        ("bf16", 30, 20),
        ("channels_last", 20, 12),
    ]
    assert found[2].on == ("num_workers=8", "bf16")
    assert not others


def test_more_workers_come_once_faster_settings_wait_for_the_loader():
    slow, faster = Pace("num_workers=2", 25 * MS), Pace("num_workers=8", 5 * MS)
    found, _ = beside(0, slow).rungs(LADDER, [], FASTER, faster)
    assert [one.setting for one in found] == ["bf16", "channels_last", "num_workers=8"]
    assert found[1].step_ns == 25 * MS
    assert found[2].on == ("bf16", "channels_last")


def test_loading_in_the_process_itself_adds_to_each_step():
    alone = Pace.of_wait(0, 10 * MS, 30 * MS, 10 * MS, 8)
    found, others = beside(10, alone).rungs(LADDER, [], None, alone)
    assert times(found) == times(LADDER)
    assert not others


def test_handing_a_batch_over_is_no_limit_of_the_loader():
    late = Pace.of_wait(2, 5 * MS, 30 * MS, 80 * MS, 8)
    handover = Pace.of_wait(2, 5 * MS, 30 * MS, 8 * MS, 8)
    assert late.is_late(30 * MS)
    assert not handover.is_late(30 * MS)
    assert (late.step(15 * MS), handover.step(15 * MS)) == (35 * MS, 20 * MS)
    found, _ = beside(5, handover).rungs(LADDER, [], None, handover)
    assert times(found) == times(LADDER)


def test_a_setting_that_is_too_close_to_tell_stays_so_beside_a_loader():
    late, open_ = Pace("num_workers=2", AS_IT_IS), replace(LADDER[0], verdict="undecided")
    _, others = beside(10, late).rungs([], [replace(open_, kept=False)], None, late)
    assert others[0].verdict == "undecided"


def test_so_many_workers_are_tried_as_keep_up_half_and_twice_as_many():
    assert numbers_of(0, 40 * MS, 10 * MS, 16) == [0, 2, 5, 10]
    assert numbers_of(5, 40 * MS, 10 * MS, 16) == [5, 2, 10]
    assert numbers_of(0, 400 * MS, 10 * MS, 16) == [0, 8, 16]
    assert numbers_of(0, 1 * MS, 10 * MS, 16) == [0, 1, 2]
    assert numbers_of(0, 40 * MS, 10 * MS, 1) == [0, 1]
