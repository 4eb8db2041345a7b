"""Ranks are generated with clocks, entries and transfers that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from backspot.job.align import align
from backspot.job.matching import match_collectives
from backspot.job.summary import Call, Group, Summary
from backspot.job.waiting import find_waits

STEP = 50_000_000
EACH = 8


@dataclass(frozen=True)
class Job:
    """Ranks whose clocks and entries are known.

    ``entries[rank][k]`` is when the rank enters the k-th collective, in nanoseconds of true time.
    """

    offsets: Sequence[int]
    drifts: Sequence[float]
    entries: Sequence[Sequence[int]]
    transfer: int = 100_000
    numbers: tuple[int, ...] = (1, 2, 3)

    def clock(self, rank: int, time: int) -> int:
        return time + self.offsets[rank] + round(time * self.drifts[rank])

    def leaves(self, k: int) -> int:
        return max(entries[k] for entries in self.entries) + self.transfer

    def summary(self, rank: int, first: int = 0, kinds: Sequence[str] = ()) -> Summary:
        """One rank, whose recording begins with its collective ``first``."""
        every = range(first, len(self.entries[rank]))
        said = kinds or ["all_reduce"] * len(self.entries[rank])
        known = tuple(sorted(set(said)))
        start = [self.clock(rank, self.entries[rank][k]) for k in every]
        end = [self.clock(rank, self.leaves(k)) for k in every]
        return Summary(
            source=f"rank{rank}.json",
            rank=rank,
            world_size=len(self.entries),
            host="",
            origin_ns=10**15,
            step_unit="profiler step",
            step_numbers=self.numbers,
            begin=tuple(STEP * step for step in range(3)),
            end=tuple(STEP * (step + 1) for step in range(3)),
            exposed=(0, 0, 0),
            stalled=(0, 0, 0),
            phases=(),
            modules=(),
            groups=(
                Group(
                    name="data",
                    ranks=tuple(range(len(self.entries))),
                    calls=tuple(map(Call, known)),
                    call=tuple(known.index(said[k]) for k in every),
                    step=tuple(k // EACH for k in every),
                    launch=tuple(start),
                    start=tuple(start),
                    end=tuple(end),
                    exposed=(0,) * len(end),
                    launching=(0,) * len(end),
                ),
            ),
        )

    def summaries(self) -> dict[int, Summary]:
        return {rank: self.summary(rank) for rank in range(len(self.entries))}


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    ranks = draw(st.integers(2, 5))
    late = st.lists(st.integers(0, 3_000_000), min_size=3 * EACH, max_size=3 * EACH)
    return Job(
        offsets=draw(st.lists(st.integers(-(10**9), 10**9), min_size=ranks, max_size=ranks)),
        drifts=draw(
            st.lists(st.sampled_from([0.0, 1e-6, -4e-5, 2e-4]), min_size=ranks, max_size=ranks)
        ),
        entries=[
            [k * STEP // EACH + one for k, one in enumerate(draw(late))] for _ in range(ranks)
        ],
    )


few = settings(max_examples=30, deadline=None)


@few
@given(jobs())
def test_the_clocks_of_the_ranks_are_recovered(job: Job) -> None:
    summaries = job.summaries()
    clocks = align(match_collectives(summaries).groups, sorted(summaries))
    for rank, clock in clocks.items():
        assert clock.uncertainty_ns < 100
        for k in (0, 11, 23):
            moment = job.entries[rank][k]
            own = 10**15 + job.clock(rank, moment)
            job_time = clock.to_job(_array(own))[0]
            assert abs(job_time - (10**15 + job.clock(0, moment))) < 100


@few
@given(jobs())
def test_each_rank_waits_from_its_entry_to_the_last(job: Job) -> None:
    summaries = job.summaries()
    groups = match_collectives(summaries).groups
    (waits,) = find_waits(groups, align(groups, sorted(summaries)))
    assert (waits.wait >= 0).all()
    assert (waits.transfer >= 0).all()
    assert ((waits.wait == 0).sum(axis=0) >= 1).all()
    for k in range(3 * EACH):
        last = max(entries[k] for entries in job.entries)
        for rank, entries in enumerate(job.entries):
            assert waits.wait[rank, k] == pytest.approx(last - entries[k], abs=2_000)
            assert waits.transfer[rank, k] == pytest.approx(job.transfer, abs=2_000)
            if waits.last[k] == rank:
                assert waits.wait[rank, k] == 0


@few
@given(jobs(), st.randoms(use_true_random=False))
def test_the_order_of_the_ranks_changes_nothing(job: Job, random: st.Random) -> None:
    summaries = job.summaries()
    order = sorted(summaries)
    random.shuffle(order)
    shuffled = {rank: summaries[rank] for rank in order}
    assert _waits(shuffled) == _waits(summaries)


def test_a_recording_that_begins_late_is_matched_from_the_end_of_its_step() -> None:
    job = _even(3)
    kinds = ["broadcast", *["all_reduce"] * (EACH - 1)] * 3
    summaries = {rank: job.summary(rank, first=2 * (rank == 1), kinds=kinds) for rank in range(3)}
    matching = match_collectives(summaries)
    (group,) = matching.groups
    assert not matching.problems
    assert len(group.step) == 3 * EACH - 2
    ends = group.end - group.end[0]
    assert (ends == ends[:, :1]).all()


def test_a_step_in_which_ranks_launch_other_collectives_is_left_out_and_named() -> None:
    job = _even(2)
    usual = ["all_reduce"] * 3 * EACH
    other = [*usual[:EACH], "all_gather", *usual[EACH + 1 :]]
    summaries = {0: job.summary(0, kinds=usual), 1: job.summary(1, kinds=other)}
    matching = match_collectives(summaries)
    assert set(matching.groups[0].step.tolist()) == {0, 2}
    assert "1 step of process group data cannot be matched" in matching.problems[0]


def test_point_to_point_transfers_do_not_disturb_the_collectives() -> None:
    job = _even(2)
    usual = ["all_reduce"] * 3 * EACH
    sends = ["send_recv" if k % EACH == 3 else kind for k, kind in enumerate(usual)]
    matching = match_collectives({0: job.summary(0, kinds=sends), 1: job.summary(1, kinds=sends)})
    assert {call.kind for call in matching.groups[0].call} == {"all_reduce"}
    assert len(matching.groups[0].step) == 3 * (EACH - 1)
    alone = _replaced(job.summary(1), calls=(Call("send_recv"),))
    assert match_collectives({0: alone, 1: alone}).groups == ()


def test_a_process_group_whose_ranks_are_not_known_is_mentioned() -> None:
    job = _even(3)
    summaries = {rank: _replaced(job.summary(rank), ranks=()) for rank in range(3)}
    assert not match_collectives(summaries).problems
    for rank, one in summaries.items():
        (group,) = one.groups
        groups = (group, msgspec.structs.replace(group, name="tensor"))
        summaries[rank] = msgspec.structs.replace(one, groups=groups)
    matching = match_collectives(summaries)
    assert len(matching.groups) == 2
    assert "do not say which ranks process group data has" in matching.problems[0]


def test_only_the_steps_that_all_ranks_recorded_are_matched() -> None:
    job = _even(2)
    late = Job(job.offsets, job.drifts, job.entries, numbers=(2, 3, 4))
    matching = match_collectives({0: job.summary(0), 1: late.summary(1)})
    assert set(matching.groups[0].step.tolist()) == {0, 1}


def test_a_rank_that_shares_no_collective_has_no_clock() -> None:
    job = _even(2)
    alone = job.summary(1)
    summaries = {0: job.summary(0), 1: job.summary(1), 2: _without_groups(alone)}
    assert set(align(match_collectives(summaries).groups, sorted(summaries))) == {0, 1}


@pytest.mark.parametrize("broadcasts", [1, EACH - 1])
def test_whoever_leaves_a_broadcast_early_did_not_wait_for_the_last(broadcasts: int) -> None:
    job = _even(2)
    kinds = [*["broadcast"] * broadcasts, *["all_reduce"] * (EACH - broadcasts)] * 3
    root, other = job.summary(0, kinds=kinds), job.summary(1, kinds=kinds)
    (group,) = root.groups
    early = [
        start + 1_000 if group.calls[call].kind == "broadcast" else end
        for start, end, call in zip(group.start, group.end, group.call, strict=True)
    ]
    changed = _replaced(root, end=tuple(early))
    matched = match_collectives({0: changed, 1: other}).groups
    (waits,) = find_waits(matched, align(matched, [0, 1]))
    assert (waits.wait.reshape(2, 3, EACH)[:, :, :broadcasts] == 0).all()


def _even(ranks: int) -> Job:
    entries = [[k * STEP // EACH + 5_000 * rank for k in range(3 * EACH)] for rank in range(ranks)]
    return Job([0, 7_000_000, -3_000][:ranks], [0.0] * ranks, entries)


def _replaced(summary: Summary, **changed: tuple[object, ...]) -> Summary:
    (group,) = summary.groups
    group = msgspec.structs.replace(group, **changed)
    return msgspec.structs.replace(summary, groups=(group,))


def _without_groups(summary: Summary) -> Summary:
    return msgspec.structs.replace(summary, groups=())


def _waits(summaries: dict[int, Summary]) -> list[object]:
    groups = match_collectives(summaries).groups
    return [
        (one.ranks, one.wait.tolist(), one.transfer.tolist(), one.last.tolist())
        for one in find_waits(groups, align(groups, list(summaries)))
    ]


def _array(time: int) -> object:
    return np.array([time], np.int64)


@pytest.mark.parametrize(("kind", "problems"), [("all_reduce", 1), ("send_recv", 0)])
def test_collectives_of_unknown_groups_are_left_out_and_transfers_need_no_match(
    kind: str, problems: int
) -> None:
    job = Job((0, 0), (0.0, 0.0), [[k * STEP // EACH for k in range(3 * EACH)]] * 2)
    several = {
        rank: msgspec.structs.replace(
            one,
            groups=(
                *one.groups,
                msgspec.structs.replace(
                    one.groups[0], name="", ranks=(), calls=(Call(kind),), is_one=False
                ),
            ),
        )
        for rank, one in job.summaries().items()
    }
    matching = match_collectives(several)
    assert [one.name for one in matching.groups] == ["data"]
    assert len(matching.problems) == problems
