"""Which rank is slow, where, and what is not claimed."""

from __future__ import annotations

import random
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from backspot.errors import UsageError
from backspot.job.answer import answer
from backspot.job.scatter import Others
from backspot.job.summary import PhaseTimes, Summary
from backspot.render.job import render_job
from backspot.results.job import JobReport
from support.summaries import many, recorded, waiting_for

SLOW = "model.layers.2.mlp.down_proj"


def job_of(name: str) -> JobReport:
    return answer(recorded(name))


@pytest.mark.parametrize("name", ["ddp_even", "fsdp_even"])
def test_nothing_is_claimed_of_even_ranks(name: str) -> None:
    job = job_of(name)
    assert job.findings == ()
    assert not any(spread.clear for spread in job.modules)


@pytest.mark.parametrize(
    ("name", "kind", "part"),
    [("ddp_host", "host", "forward_host"), ("fsdp_kernel", "gpu", "forward_gpu")],
)
def test_rank_module_and_kind_of_a_planted_delay_are_named(name: str, kind: str, part: str) -> None:
    job = job_of(name)
    (finding,) = job.findings
    assert (finding.rank, finding.path, finding.kind) == (1, SLOW, kind)
    assert finding.cost_ns == pytest.approx(10_000_000, rel=0.1)
    assert (job.modules[0].path, job.modules[0].worst_rank, job.modules[0].part) == (SLOW, 1, part)


def test_the_slowest_rank_and_its_module_are_named_in_each_step() -> None:
    slowest = job_of("ddp_host").slowest
    assert [(one.step, one.rank, one.path) for one in slowest] == [
        (step, 1, SLOW) for step in (1, 2, 3)
    ]


@pytest.mark.parametrize("name", ["ddp_even", "ddp_host", "fsdp_even", "fsdp_kernel"])
def test_clocks_of_one_host_agree_within_the_stated_uncertainty(name: str) -> None:
    other = job_of(name).ranks[1]
    assert other.offset_ns is not None
    assert other.drift_ppm == 0
    assert 0 < other.uncertainty_ns < 20_000
    # Rings end a few microseconds apart, always in the same order.
    assert abs(other.offset_ns) < max(10_000, 3 * other.uncertainty_ns)


def test_the_rank_that_is_always_last_waits_for_no_other() -> None:
    first, last = job_of("ddp_host").ranks
    assert last.wait_ns < 100_000 < first.wait_ns
    assert first.late_ns == -last.late_ns < 0


def test_another_host_clock_changes_nothing_but_the_offset() -> None:
    first, other = recorded("ddp_host")
    moved = msgspec.structs.replace(other, origin_ns=other.origin_ns + 3_600_000_000_000)
    job, usual = answer([first, moved]), answer([first, other])
    assert usual.ranks[1].offset_ns is not None
    assert job.ranks[1].offset_ns == usual.ranks[1].offset_ns - 3_600_000_000_000
    assert (job.groups, job.slowest, job.findings) == (usual.groups, usual.slowest, usual.findings)


def test_the_order_of_the_ranks_changes_nothing() -> None:
    ranks = many(6)
    shuffled = random.Random(0).sample(ranks, len(ranks))
    assert answer(shuffled) == answer(ranks)


def test_a_slow_module_is_found_among_many_ranks() -> None:
    ranks = many(6)
    ranks[4] = _slower(ranks[4], SLOW, 8_000_000)
    (finding,) = answer(ranks).findings
    assert (finding.rank, finding.path, finding.kind) == (4, SLOW, "gpu")


def test_a_rank_that_waits_hides_the_same_work_of_its_host() -> None:
    """Of two even ranks that the host holds up, the later one does so in full view."""
    late, waits = many(2)
    work, rest = (2_400_000,) * late.steps, (100_000,) * late.steps
    for hides in (True, False):
        job = answer(
            [
                _replaced(late, "model.layers", forward_host=work),
                _replaced(
                    waits,
                    "model.layers",
                    forward_host=rest,
                    forward_hidden=(2_300_000,) * late.steps if hides else rest,
                ),
            ]
        )
        assert not (hides and job.findings)
        assert hides or {one.rank for one in job.findings} == {0}


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_what_a_host_does_beside_kernels_is_compared_too(way: str) -> None:
    """The device of one of two even ranks has kernels left to run, and that of the other has not.

    A host that works longer than the other, wherever that is hidden, holds up its rank.
    """
    late, ahead = many(2)
    work, rest = (2_400_000,) * late.steps, (100_000,) * late.steps
    ahead = _replaced(
        ahead, "model.layers", **{f"{way}_host": rest, f"{way}_beside": (2_300_000,) * late.steps}
    )
    for times, is_longer in ((work, False), ((9_000_000,) * late.steps, True)):
        job = answer([_replaced(late, "model.layers", **{f"{way}_host": times}), ahead])
        assert {one.rank for one in job.findings} == ({0} if is_longer else set())
        assert all(one.cost_ns == pytest.approx(6_600_000, rel=0.1) for one in job.findings)


def test_what_a_rank_hides_does_not_pass_for_noise() -> None:
    """A rank with a slow kernel has waited elsewhere, and hidden some of its host's work there."""
    slow, usual = many(2)
    chance = random.Random(0)
    for module in slow.modules:
        part = chance.choice([0, 0, 1])
        for way in ("forward", "backward"):
            times = np.array(getattr(module, f"{way}_host"))
            both = {f"{way}_host": part * times, f"{way}_hidden": (1 - part) * times}
            parts = {name: tuple(some.tolist()) for name, some in both.items()}
            slow = _replaced(slow, module.path, **parts)
    slow = _slower(slow, SLOW, 8_000_000)
    (finding,) = answer([slow, usual]).findings
    assert (finding.rank, finding.path, finding.kind) == (0, SLOW, "gpu")


def test_each_of_two_slow_ranks_is_named() -> None:
    ranks = many(6)
    for rank in (1, 4):
        ranks[rank] = _slower(ranks[rank], SLOW, 8_000_000)
    assert {(one.rank, one.path) for one in answer(ranks).findings} == {(1, SLOW), (4, SLOW)}


def test_transfers_that_hold_up_all_ranks_are_no_rank_s_fault() -> None:
    ranks = []
    for one in many(4):
        (group,) = one.groups
        start = tuple(end - 2_000_000 for end in group.end)
        group = msgspec.structs.replace(group, start=start)
        ranks.append(
            msgspec.structs.replace(
                one, groups=(group,), exposed=(30_000_000, 31_000_000, 30_500_000)
            )
        )
    (finding,) = (job := answer(ranks)).findings
    assert (finding.rule, finding.rank) == ("exposed-transfer", None)
    # What is left after the waits and the clock's uncertainty is certain to be lost.
    assert render_job(job, width=200).splitlines()[0].endswith(": at least 30.5 ms a step")
    assert finding.seen.startswith("In at least 30.5 ms of a step, ")
    assert "all_gather" in finding.title
    assert "prefetch" in finding.remedy
    assert finding.cost_ns == 30_500_000
    # With a rank missing, this may be waiting for that rank.
    assert not answer(ranks[1:]).findings


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=7))
def test_each_rank_is_compared_with_the_median_of_the_others(values: list[list[int]]) -> None:
    every = np.array(values)
    others_of = Others(every)
    for row in range(len(every)):
        others = np.delete(every, row, axis=0)
        assert others_of.of(every[row]).tolist() == np.floor(np.median(others, axis=0)).tolist()


@pytest.mark.parametrize("slow", [{3}, {1, 3}])
def test_a_gpu_whose_kernels_all_take_longer_is_found(slow: set[int]) -> None:
    """Of two that are alike, each hides the other."""
    ranks = [_with_longer_kernels(one) if one.rank in slow else one for one in many(6)]
    found = answer(waiting_for(slow, ranks, 2_000_000)).findings
    assert {(one.rule, one.rank) for one in found} == {("slow-gpu", rank) for rank in slow}


def test_kernels_that_take_longer_and_cost_the_job_nothing_are_no_slow_gpu() -> None:
    """As beside the collectives of a rank that waits."""
    first, *rest = many(6)
    assert answer([_with_longer_kernels(first), *rest]).findings == ()
    assert answer(waiting_for({4}, [_with_longer_kernels(first), *rest], 2_000_000)).findings == ()


def _with_longer_kernels(summary: Summary) -> Summary:
    modules = tuple(
        msgspec.structs.replace(
            module, forward_gpu=tuple(round(1.2 * time) for time in module.forward_gpu)
        )
        for module in summary.modules
    )
    return msgspec.structs.replace(summary, modules=modules)


@pytest.mark.parametrize(
    "times", [(9_000_000, 8_000_000, 9_500_000), (40_100_000, 9_200_000, 13_800_000)]
)
def test_a_rank_that_waits_for_its_data_is_found(times: tuple[int, ...]) -> None:
    ranks = many(6)
    late = PhaseTimes("data", times)
    ranks[5] = msgspec.structs.replace(ranks[5], phases=(late, *ranks[5].phases))
    (finding,) = answer(ranks).findings
    assert (finding.rule, finding.kind, finding.rank) == ("slow-data", "data", 5)


def test_recordings_of_other_steps_are_not_compared_by_their_waits() -> None:
    first, other = recorded("fsdp_even")
    (group,) = other.groups
    ends = tuple(
        end + random.Random(index).randrange(40_000_000) for index, end in enumerate(group.end)
    )
    group = msgspec.structs.replace(group, end=ends)
    job = answer([first, msgspec.structs.replace(other, groups=(group,))])
    assert "may be of different steps" in job.warnings[0]
    assert not job.groups
    assert not job.slowest


def test_ranks_that_are_missing_are_mentioned() -> None:
    ranks = [msgspec.structs.replace(one, world_size=8) for one in recorded("ddp_even")]
    assert "6 ranks of 8 are not part of the answer" in answer(ranks).warnings[0]


def test_ranks_that_cannot_be_told_apart_are_refused() -> None:
    first, other = recorded("ddp_even")
    with pytest.raises(UsageError, match="both of rank 0"):
        answer([first, msgspec.structs.replace(other, rank=0)])
    with pytest.raises(UsageError, match="no recorded step in common"):
        answer([first, msgspec.structs.replace(other, step_numbers=(7, 8, 9))])
    with pytest.raises(UsageError, match="1 rank can be read"):
        answer([first])


@pytest.mark.parametrize("name", ["ddp_host", "fsdp_even"])
def test_the_text_begins_with_the_answer_and_fits_a_terminal(name: str) -> None:
    text = render_job(job_of(name), width=80)
    assert max(map(len, text.splitlines())) <= 80
    expected = {
        "ddp_host": f"{SLOW} (Linear) is slow on rank 1: up to 10.4 ms a step",
        "fsdp_even": "No rank differs from the others beyond the noise.",
    }
    assert text.splitlines()[0] == expected[name]
    assert len(text.splitlines()) <= 24
    role = {"ddp_host": "data parallel", "fsdp_even": "fully sharded"}[name]
    assert text.splitlines()[1].startswith(f"2 ranks of 2 ({role}), ")
    assert f"default_pg, {role}: " in render_job(job_of(name), 100, width=80)


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("name", ["ddp_host", "fsdp_kernel", "many"])
def test_no_word_is_broken_in_a_terminal_of_any_width(name: str, width: int) -> None:
    ranks = many(12) if name == "many" else recorded(name)
    job = answer([msgspec.structs.replace(one, host=f"node{one.rank}") for one in ranks])
    lines = render_job(job, 10, width=width).splitlines()
    assert max(map(len, lines)) <= width
    heads = " ".join(" ".join(lines).split())
    for said in (
        "waits in collectives, most first (they can overlap with computing)",
        "the last rank to enter, step by step, and what takes longest there",
        "modules, by what the difference over the ranks costs (* beyond the noise)",
        "rank wait transfer",
        "step rank late by longer by module",
    ):
        assert said in heads
    if name != "many":
        assert "down_proj" in heads.split("longer by module")[1]


def test_a_rank_that_enters_collectives_before_the_others_enters_earlier() -> None:
    job = job_of("fsdp_kernel")
    for rank in job.ranks:
        (line,) = (
            one
            for one in render_job(job, width=80).splitlines()
            if re.match(rf" +{rank.rank} .* ms (later|earlier)", one)
        )
        assert ("earlier" in line) == (rank.late_ns < 0)
        assert "-" not in line


def test_where_a_class_does_not_fit_the_end_of_the_path_stands() -> None:
    job = job_of("fsdp_kernel")
    wide, narrow = (render_job(job, 3, width=width) for width in (100, 50))
    for one in job.modules[:3]:
        assert one.label in wide
        assert one.path[-9:] in narrow
    assert job.modules[0].label not in narrow.split("longer by")[1]


def test_python_and_notebooks_are_told_calls() -> None:
    job = job_of("ddp_host")
    for text in (str(job), job._repr_html_()):
        assert "Next: job.ranks, job.slowest, job.modules for all" in text
        assert "--top" not in text
        assert "-o job" not in text
    assert 'job.save("job.html")' in str(job)


def test_names_from_a_trace_cannot_control_the_terminal() -> None:
    first, other = recorded("ddp_host")
    slow = next(module for module in other.modules if module.path == SLOW)
    evil = msgspec.structs.replace(slow, path="\x1b[2Jlayer")
    modules = tuple(evil if module is slow else module for module in other.modules)
    other = msgspec.structs.replace(other, modules=modules, source="\x1b]0;", host="\x1b[1m")
    assert "\x1b" not in render_job(answer([first, other]))


def _slower(summary: Summary, path: str, by: int) -> Summary:
    (module,) = (module for module in summary.modules if module.path == path)
    return _replaced(summary, path, forward_gpu=tuple(one + by for one in module.forward_gpu))


def _replaced(summary: Summary, path: str, **parts: tuple[int, ...]) -> Summary:
    """Replace times of a module, or of the layers of a list of modules."""
    modules = tuple(
        msgspec.structs.replace(module, **parts)
        if module.path == path or module.path.rpartition(".")[0] == path
        else module
        for module in summary.modules
    )
    return msgspec.structs.replace(summary, modules=modules)


def alone(name: str, path: str, class_name: str, rank: int | None = None) -> Summary:
    """One process that trains a model of this class by itself."""
    first = recorded("ddp_even")[0]
    root = msgspec.structs.replace(first.modules[0], path="", class_name=class_name, is_module=True)
    layer = msgspec.structs.replace(root, path=path, class_name="Linear")
    return msgspec.structs.replace(
        first, source=name, rank=rank, world_size=1, groups=(), modules=(root, layer)
    )


def test_traces_that_nothing_makes_ranks_of_one_job_are_refused() -> None:
    with pytest.raises(UsageError, match=r"a\.json and b\.json are not of one job.*backspot diff"):
        answer([alone("a.json", "fc", "Net"), alone("b.json", "fc", "Net")])
    with pytest.raises(UsageError, match="the model is a NetA on rank 0 and a NetB on 1"):
        answer([alone("a", "fc", "NetA", 0), alone("b", "fc", "NetB", 1)])
    assert answer([alone("a", "fc", "Net", 0), alone("b", "fc", "Net", 1)]).steps


def test_ranks_of_one_job_that_train_different_models_are_warned_of() -> None:
    job = answer(
        msgspec.structs.replace(alone(str(rank), "fc", name, rank), world_size=2)
        for rank, name in enumerate(("NetA", "NetB"))
    )
    assert "The model is a NetA on rank 0 and a NetB on 1." in job.warnings


def test_a_late_rank_without_a_cause_is_never_said_to_be_like_the_others() -> None:
    job = job_of("ddp_even")
    assert job.late == (1,)
    assert job.ranks[1].late_ns > 0.1 * job.step_ns
    assert str(job).startswith("Rank 1 enters collectives 5.7 ms after the others, and nothing")
    # What takes a fraction of that longer is not named beside it.
    assert [one.path for one in job.slowest[1:]] == ["", ""]
