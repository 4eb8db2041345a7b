"""Transfers between two ranks: which receive waits for which send, and what a stage is worth."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import msgspec
import pytest

from backspot.job.align import RankClock
from backspot.job.answer import answer
from backspot.job.reduce import summarize
from backspot.job.summary import Call, Group, Summary
from backspot.job.transfers import aligned_by, match_transfers
from backspot.results.job import JobReport

RANKS = Path(__file__).parents[1] / "data" / "ranks"
TRACES = sorted((RANKS / "pipeline").glob("*.json.gz"))
"""Three stages with gloo, four microbatches, and a second stage that takes three times as long."""


@cache
def stages() -> dict[int, Summary]:
    return {rank: summarize(path) for rank, path in enumerate(TRACES)}


def calls(summary: Summary) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(call.to, call.of) for group in summary.groups for call in group.calls}


def changed(summary: Summary, **values: object) -> Summary:
    group = msgspec.structs.replace(summary.groups[0], **values)
    return msgspec.structs.replace(summary, groups=(group,))


def job_without_a_transfer(at: int) -> JobReport:
    """The job, if the first rank had lost one of its transfers."""
    first, *others = stages().values()
    group = first.groups[0]
    fewer = {
        name: (*getattr(group, name)[:at], *getattr(group, name)[at + 1 :])
        for name in ("call", "step", "launch", "start", "end", "exposed", "launching")
    }
    return answer([changed(first, **fewer), *others])


def test_a_trace_says_to_and_from_which_ranks_it_transfers() -> None:
    first, second, third = map(calls, stages().values())
    assert first == {((1,), ()), ((), (1,))}
    assert second == {((0,), ()), ((), (0,)), ((2,), ()), ((), (2,))}
    assert third == {((1,), ()), ((), (1,))}


def test_of_two_ranks_the_other_one_is_meant_also_by_transfers_that_are_launched_together() -> None:
    with_nccl = summarize(RANKS / "parallel" / "pp.rank0.trace.json.gz")
    assert calls(with_nccl) == {((1,), ()), ((1,), (1,)), ((), (1,))}


def test_nccl_says_the_rank_of_the_job_and_not_the_place_in_the_group(tmp_path: Path) -> None:
    trace = json.loads(
        gzip.decompress((RANKS / "parallel" / "pp.rank0.trace.json.gz").read_bytes())
    )
    trace["distributedInfo"]["world_size"] = 8
    events = trace["traceEvents"]
    around = [event for event in events if event["name"] in ("c10d::send", "c10d::recv_")]
    for event in events:
        for one in around:
            inside = one["ts"] <= event["ts"] <= one["ts"] + one["dur"]
            if inside and event["name"] == "record_param_comms":
                sends = one["name"] == "c10d::send"
                event["args"]["Dst Rank" if sends else "Src Rank"] = 5 if sends else 3
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(trace))
    assert calls(summarize(path)) == {((5,), ()), ((5,), (3,)), ((), (3,))}


def test_the_kth_send_is_the_kth_receive_and_begins_before_that_ends() -> None:
    ranks = stages()
    found = match_transfers(ranks, ranks[0].step_numbers)
    assert found is not None
    assert set(found.links) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    for (sender, receiver), link in found.links.items():
        assert len(link) == 4 * len(ranks[0].step_numbers)
        sent, received = link.T
        # All ranks ran on one host, with one clock.
        assert (found.of[sender].start[sent] <= found.of[receiver].end[received]).all()
        assert (received[1:] > received[:-1]).all()


@pytest.mark.parametrize("apart_ns", [0, 10**12])
def test_transfers_in_both_directions_align_clocks(apart_ns: int) -> None:
    ranks = dict(stages())
    ranks[2] = msgspec.structs.replace(ranks[2], origin_ns=ranks[2].origin_ns + apart_ns)
    moved = match_transfers(ranks, ranks[0].step_numbers)
    assert moved is not None
    clocks = aligned_by(moved, {0: RankClock(0, 0.0, 0, 0.0)})
    for rank, real in ((1, 0), (2, -apart_ns)):
        assert abs(clocks[rank].offset_ns - real) <= clocks[rank].uncertainty_ns < 1_000_000


def test_the_replay_repeats_the_step_and_prices_the_slow_stage() -> None:
    job = answer(stages().values())
    assert job.replayed_step_ns == pytest.approx(job.step_ns, rel=0.01)
    (found,) = job.findings
    assert (found.rule, found.rank) == ("pipeline-bubble", 1)
    # With the same work on all stages, real steps took 345 ms in place of 448.
    assert found.saves_ns == pytest.approx(103_000_000, rel=0.2)
    said = " ".join(str(job).split())
    assert "With equal work on all stages, all ranks replayed, the job's step takes" in said


def test_a_clock_that_is_wrong_by_hours_changes_no_price() -> None:
    first, second, third = stages().values()
    moved = msgspec.structs.replace(second, origin_ns=second.origin_ns + 10**13)
    job, same = answer([first, moved, third]), answer([first, second, third])
    assert job.replayed_step_ns == pytest.approx(same.replayed_step_ns, rel=1e-3)


def test_a_transfer_that_one_rank_lacks_is_not_matched_within_the_recording() -> None:
    first = stages()[0].groups[0]
    middle = first.step.index(1)
    assert job_without_a_transfer(middle).replayed_step_ns is None
    job = answer(stages().values())
    # A recording can begin or end within a step.
    for at in (0, len(first.step) - 1):
        assert job_without_a_transfer(at).replayed_step_ns == pytest.approx(
            job.replayed_step_ns, rel=0.2
        )


def test_where_a_trace_does_not_say_between_which_ranks_nothing_is_replayed() -> None:
    first, *others = stages().values()
    unknown = tuple(Call(call.kind, call.purpose, call.module) for call in first.groups[0].calls)
    job = answer([changed(first, calls=unknown), *others])
    assert job.replayed_step_ns is None
    assert [one.saves_ns for one in job.findings] == [None]


def test_ranks_that_transfer_in_one_direction_have_no_common_clock() -> None:
    def rank(number: int, **peers: tuple[int, ...]) -> Summary:
        call = (Call("send_recv", **peers),)
        times = {"launch": (1,), "start": (1,), "end": (5,), "exposed": (0,), "launching": (0,)}
        group = Group("", (0, 1), call, (0,), (0,), **times)
        return msgspec.structs.replace(
            stages()[number], step_numbers=(0,), begin=(0,), end=(9,), groups=(group,)
        )

    moved = match_transfers({0: rank(0, to=(1,)), 1: rank(1, of=(0,))}, (0,))
    assert moved is not None
    assert set(aligned_by(moved, {0: RankClock(0, 0.0, 0, 0.0)})) == {0}


def test_transfers_of_devices_take_as_long_as_their_kernels() -> None:
    first = summarize(RANKS / "parallel" / "pp.rank0.trace.json.gz")
    (group,) = first.groups

    def back(call: Call) -> Call:
        return Call(call.kind, to=(0,) * len(call.of), of=(0,) * len(call.to))

    other = changed(first, calls=tuple(map(back, group.calls)))
    job = answer([first, msgspec.structs.replace(other, source="other", rank=1)])
    assert max(one.stalled_ns for one in job.ranks) > 0.4 * job.step_ns
    assert job.replayed_step_ns == pytest.approx(job.step_ns, rel=0.001)
