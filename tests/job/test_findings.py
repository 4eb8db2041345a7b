"""Each rule over ranks finds its planted cause, and is silent where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from backspot.job.answer import answer
from backspot.job.findings import all_rules
from backspot.job.summary import (
    COLLECTING,
    WAITING,
    Call,
    Group,
    ModuleTimes,
    OutsideTimes,
    Summary,
)
from backspot.results.job import JobFinding
from support.summaries import many

DOCS = Path(__file__).parents[2] / "docs" / "ranks.md"
SLOW = "model.layers.2.mlp.down_proj"
STEP = 55_000_000


def test_every_rule_is_named_on_the_page_of_ranks() -> None:
    names = {rule.name for rule in all_rules()}
    assert len(names) >= 9
    page = DOCS.read_text().partition("## Findings")[2]
    assert {name for name in names if f"`{name}`" in page} == names


def exchanges(
    count: int, size: int, exposed: int, *, launching: int = 0, late: int = 300_000
) -> Group:
    """A process group whose steps have reductions of gradients at regular intervals."""
    call = Call("all_reduce", "gradients", "", size)
    start = [step * STEP + 5_000_000 + late * k for step in range(3) for k in range(count)]
    return group_of([call], [0] * len(start), start, 60_000, exposed, launching)


def gathers(*, back_to_back: bool) -> Group:
    """A process group whose steps gather the parameters of ten modules, 600 µs each."""
    calls = [Call("all_gather", "parameters", f"layers.{k}", 1 << 24) for k in range(10)]
    every = 600_000 if back_to_back else 2_000_000
    start = [step * STEP + 5_000_000 + every * k for step in range(3) for k in range(10)]
    return group_of(calls, list(range(10)) * 3, start, 600_000, 500_000)


def group_of(
    calls: Sequence[Call],
    call: Sequence[int],
    start: Sequence[int],
    length: int,
    exposed: int,
    launching: int = 0,
) -> Group:
    return Group(
        name="default_pg",
        ranks=(0, 1, 2, 3),
        calls=tuple(calls),
        call=tuple(call),
        step=tuple(one // STEP for one in start),
        launch=tuple(start),
        start=tuple(start),
        end=tuple(one + length for one in start),
        exposed=(exposed,) * len(start),
        launching=(launching,) * len(start),
    )


def findings(group: Group) -> tuple[JobFinding, ...]:
    return answer([msgspec.structs.replace(one, groups=(group,)) for one in many(4)]).findings


def test_small_buckets_that_nothing_hides_are_found() -> None:
    (finding,) = findings(exchanges(100, 100_000, 30_000))
    assert (finding.rule, finding.rank, finding.cost_ns) == ("small-buckets", None, 3_000_000)
    assert "100 exchanges" in finding.seen
    assert "bucket_cap_mb" in finding.remedy


def test_small_buckets_that_the_host_launches_too_slowly_are_found() -> None:
    (finding,) = findings(exchanges(100, 100_000, 0, launching=40_000))
    assert (finding.rule, finding.rank, finding.cost_ns) == ("small-buckets", None, 4_000_000)
    assert "4.0 ms of that are launches" in finding.seen
    assert finding.bound == "at least"


@pytest.mark.parametrize(
    "group",
    [
        exchanges(100, 100_000, 0),
        exchanges(100, 25_000_000, 30_000),
        exchanges(100, -1, 30_000),
        exchanges(5, 100_000, 400_000),
    ],
    ids=["hidden", "large", "of unknown size", "few"],
)
def test_no_other_exchange_is_taken_for_a_small_bucket(group: Group) -> None:
    assert not findings(group)


def test_a_gather_that_could_have_begun_earlier_is_found_with_its_module() -> None:
    (finding,) = findings(gathers(back_to_back=False))
    # All but the first one of each step.
    assert (finding.rule, finding.rank, finding.cost_ns) == ("late-gather", None, 9 * 500_000)
    assert finding.path == "layers.1"
    assert "9 modules" in finding.seen
    assert "prefetch" in finding.remedy


def test_gathers_that_follow_each_other_are_not_late() -> None:
    assert not findings(gathers(back_to_back=True))


def stages(stalled: Sequence[int]) -> list[Summary]:
    """One rank for each time that a stage stalls; no module is on two of them."""
    return [
        msgspec.structs.replace(
            one,
            groups=(),
            stalled=(time,) * 3,
            modules=tuple(
                msgspec.structs.replace(module, path=f"stages.{rank}.{module.path}")
                for module in one.modules
            ),
        )
        for rank, (one, time) in enumerate(zip(many(len(stalled)), stalled, strict=True))
    ]


def test_bubbles_of_a_pipeline_with_equal_stages_are_found() -> None:
    (finding,) = answer(stages([15_000_000, 14_000_000, 15_000_000])).findings
    assert (finding.rule, finding.kind, finding.rank) == ("pipeline-bubble", "pipeline", None)
    assert finding.cost_ns == 15_000_000
    assert "microbatches" in finding.remedy


def kernels(one: Summary, factor: float) -> Summary:
    """The same rank with longer or shorter kernels."""

    def scaled(module: ModuleTimes) -> ModuleTimes:
        parts = ("forward_gpu", "backward_gpu")
        times = {part: tuple(round(t * factor) for t in getattr(module, part)) for part in parts}
        return msgspec.structs.replace(module, **times)

    return msgspec.structs.replace(one, modules=tuple(map(scaled, one.modules)))


def test_the_longest_stage_of_a_pipeline_is_named() -> None:
    first, longest, last = stages([25_000_000, 4_000_000, 24_000_000])
    (finding,) = answer([first, kernels(longest, 1.4), last]).findings
    assert (finding.rule, finding.rank) == ("pipeline-bubble", 1)
    assert "Move layers" in finding.remedy


def test_a_stage_with_a_slow_host_has_no_more_work_than_the_others() -> None:
    ranks = stages([25_000_000, 4_000_000, 24_000_000])
    (finding,) = answer([kernels(one, 0.2) for one in ranks]).findings
    assert (finding.rule, finding.rank) == ("pipeline-bubble", None)
    assert "the host limits the stages" in finding.seen
    assert "fewer, larger microbatches" in finding.remedy


def test_a_pipeline_with_short_bubbles_is_fine_and_its_stages_are_not_compared(
    tmp_path: Path,
) -> None:
    job = answer(stages([3_000_000, 2_000_000, 3_000_000]))
    assert not job.findings
    assert {module.cost_ns for module in job.modules} == {0}
    assert "stalls between the stages of a pipeline: rank 0 3.0 ms (4.0%)" in str(job)
    page = job.save(tmp_path / "job.html").read_text("utf-8")
    assert "stalls between the stages of a pipeline: rank 0 3.0 ms" in page


def test_stages_with_equal_paths_are_compared_only_if_they_exchange_gradients() -> None:
    ranks = [msgspec.structs.replace(one, stalled=(1_000_000,) * 3) for one in many(4)]
    ranks = more(ranks, lambda rank: (10_000_000 * (rank == 1),) * 3)
    assert {one.rule for one in answer(ranks).findings} == {"slow-module"}
    stages = [
        msgspec.structs.replace(
            one,
            groups=tuple(
                msgspec.structs.replace(group, name=f"stage {rank}", ranks=(rank,))
                for group in one.groups
            ),
        )
        for rank, one in enumerate(ranks)
    ]
    assert not answer(stages).findings


def test_a_stage_that_waits_for_another_one_does_not_wait_for_its_data() -> None:
    ranks = stages([0, 4_000_000])
    phases = msgspec.structs.replace(ranks[1].phases[0], name="data", by_step=(3_500_000,) * 3)
    assert not answer([ranks[0], msgspec.structs.replace(ranks[1], phases=(phases,))]).findings


def more(ranks: list[Summary], by: Callable[[int], Sequence[int]]) -> list[Summary]:
    """Add nanoseconds by step to the forward kernels of one module, on each rank."""

    def changed(module: ModuleTimes, rank: int) -> ModuleTimes:
        if module.path != SLOW:
            return module
        times = zip(module.forward_gpu, by(rank), strict=True)
        return msgspec.structs.replace(module, forward_gpu=tuple(map(sum, times)))

    return [
        msgspec.structs.replace(one, modules=tuple(changed(module, rank) for module in one.modules))
        for rank, one in enumerate(ranks)
    ]


def test_of_many_ranks_their_scatter_decides_and_not_a_share_of_the_step() -> None:
    def one_of(count: int) -> tuple[JobFinding, ...]:
        return answer(more(many(count), lambda rank: (700_000 * (rank == 3),) * 3)).findings

    assert not one_of(4)  # 0.95% of the step
    (finding,) = one_of(16)
    assert (finding.rule, finding.rank, finding.path) == ("slow-module", 3, SLOW)


def test_unequal_work_on_many_ranks_is_no_single_rank_s_fault() -> None:
    (finding,) = answer(more(many(16), lambda rank: (400_000 * rank,) * 3)).findings
    assert (finding.rule, finding.rank, finding.path) == ("unequal-work", None, SLOW)
    assert finding.cost_ns == pytest.approx(7.5 * 400_000, rel=0.1)


def test_an_expert_that_is_busy_on_another_rank_in_each_step_is_found() -> None:
    def busy(rank: int) -> tuple[int, ...]:
        return tuple(5_000_000 * (rank == 3 * step + 1) for step in range(3))

    (finding,) = answer(more(many(16), busy)).findings
    assert (finding.rule, finding.rank, finding.path) == ("unequal-work", None, SLOW)


def loops(ranks: list[Summary], doing: str, slow: int) -> list[Summary]:
    """Ranks whose hosts work outside of modules, one of them for 9 ms more."""
    place, none = "(between forward and backward)", (0, 0, 0)

    def of(rank: int) -> tuple[OutsideTimes, ...]:
        usual, longer = (500_000, 510_000, 490_000), (9_500_000, 9_400_000, 9_600_000)
        other = OutsideTimes(place, "aten::mean", usual, none)
        return other, OutsideTimes(place, doing, longer if rank == slow else usual, none)

    return [
        msgspec.structs.replace(one, outside=of(rank), groups=()) for rank, one in enumerate(ranks)
    ]


@pytest.mark.parametrize(("doing", "said"), [("", "are Python"), ("aten::sort", "in aten::sort")])
def test_the_host_of_a_rank_that_is_slow_in_no_module_is_found_with_its_place(
    doing: str, said: str
) -> None:
    job = answer(loops(many(4), doing, slow=2))
    (finding,) = job.findings
    assert (finding.rule, finding.kind, finding.rank, finding.path) == ("slow-loop", "host", 2, "")
    assert finding.title == "Rank 2 takes longer between forward and backward"
    assert said in finding.seen
    assert finding.cost_ns == pytest.approx(9_000_000, rel=0.05)
    assert job.modules[0].path == "(between forward and backward)"


def test_a_late_rank_is_named_with_the_line_that_only_it_runs() -> None:
    ranks = [
        msgspec.structs.replace(
            one,
            outside=tuple(
                msgspec.structs.replace(part, line="train.py:8" if part.doing == "" else "")
                for part in one.outside
            ),
        )
        for one in loops(many(4), "", slow=2)
    ]
    (finding,) = answer(ranks).findings
    place = "in no module, between forward and backward"
    assert finding.title == f"Rank 2 takes longer in train.py:8, {place}"
    assert "9.0 ms of the difference are in train.py:8." in finding.seen
    assert "Python" not in finding.seen


@pytest.mark.parametrize(
    ("place", "line", "said", "remedy"),
    [
        (WAITING, "train.py:9", "in train.py:9, waiting for the GPU", "Read values of the GPU"),
        (COLLECTING, "", "in Python's garbage collector", "gc.freeze()"),
    ],
)
def test_waits_and_pauses_that_make_a_rank_late_are_named(
    place: str, line: str, said: str, remedy: str
) -> None:
    def of(rank: int) -> tuple[OutsideTimes, ...]:
        longer = (9_000_000, 9_100_000, 9_050_000)
        mine = (OutsideTimes(place, "aten::item", longer, (0, 0, 0), line),)
        return (OutsideTimes("(in backward)", "", (1, 1, 1), (0, 0, 0)), *mine * (rank == 2))

    ranks = (
        msgspec.structs.replace(one, outside=of(rank), groups=())
        for rank, one in enumerate(many(4))
    )
    (finding,) = answer(ranks).findings
    assert finding.title == f"Rank 2 takes longer {said}"
    assert remedy in finding.remedy
    assert finding.cost_ns == pytest.approx(9_050_000, rel=0.02)


def test_what_a_host_does_in_one_step_alone_is_not_what_takes_longer() -> None:
    ranks = loops(many(4), "aten::sort", slow=2)
    once = OutsideTimes(
        "(between forward and backward)", "aten::save", (0, 0, 32 * 10**6), (0,) * 3
    )
    ranks[2] = msgspec.structs.replace(ranks[2], outside=(*ranks[2].outside, once))
    findings = [one for one in answer(ranks).findings if one.rule == "slow-loop"]
    assert all("aten::save" not in one.seen for one in findings)
    assert any("9.0 ms of the difference are in aten::sort" in one.seen for one in findings)


def test_hosts_that_are_alike_outside_of_modules_are_not_claimed() -> None:
    assert not answer(loops(many(4), "", slow=99)).findings


def test_ranks_of_an_older_summary_are_not_compared_outside_of_modules() -> None:
    old, *rest = loops(many(4), "", slow=2)
    assert not answer([msgspec.structs.replace(old, outside=()), *rest]).findings
