"""A job's step after a change, by replaying all ranks together."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from backspot.job.answer import answer
from backspot.job.replay import Graph
from backspot.results.job import JobReport
from support.summaries import recorded

EVEN, SLOW = ("ddp_even", "fsdp_even"), ("ddp_host", "fsdp_kernel")


@cache
def job_of(name: str) -> JobReport:
    return answer(recorded(name))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int]]:
    """Tasks, pairs of a task and an earlier one that it waits for, and what each task takes."""
    count = draw(st.integers(2, 12))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    edges = draw(st.lists(pairs.filter(lambda pair: pair[0] != pair[1])))
    takes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    names = draw(st.permutations(range(count)))
    return count, [(names[max(pair)], names[min(pair)]) for pair in edges], takes


def graph_of(count: int, edges: list[tuple[int, int]]) -> Graph:
    return Graph(count, *np.array(edges, np.int64).reshape(-1, 2).T)


@given(graphs())
def test_a_task_begins_when_all_that_it_waits_for_have_ended(
    drawn: tuple[int, list[tuple[int, int]], list[int]],
) -> None:
    count, edges, takes = drawn

    def end(task: int) -> int:
        return takes[task] + max([end(cause) for at, cause in edges if at == task], default=0)

    ends = graph_of(count, edges).ends(np.array(takes)[:, None])
    assert ends[:, 0].tolist() == [end(task) for task in range(count)]


@given(graphs(), st.integers(1, 9))
def test_variants_do_not_mix(
    drawn: tuple[int, list[tuple[int, int]], list[int]], factor: int
) -> None:
    count, edges, takes = drawn
    once = np.array(takes)
    both = graph_of(count, edges).ends(np.stack([once, once * factor], axis=1))
    assert (both[:, 1] == both[:, 0] * factor).all()


def test_tasks_in_a_circle_are_refused() -> None:
    with pytest.raises(ValueError, match="2 of 3 tasks wait for each other"):
        graph_of(3, [(0, 1), (1, 0)])


@pytest.mark.parametrize("name", [*EVEN, *SLOW])
def test_the_replay_repeats_the_recorded_step(name: str) -> None:
    job = job_of(name)
    assert job.replayed_step_ns == pytest.approx(job.step_ns, rel=0.01)


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_rank_costs_the_job_no_more_than_it_takes_longer(name: str) -> None:
    (slow,) = job_of(name).findings
    assert slow.saves_ns is not None
    assert 0.5 * slow.cost_ns < slow.saves_ns <= slow.cost_ns
    assert "all ranks replayed, the job's step takes" in " ".join(str(job_of(name)).split())


def test_where_a_rank_is_missing_nothing_is_replayed() -> None:
    first, other = recorded("ddp_host")
    first, other = (msgspec.structs.replace(one, world_size=3) for one in (first, other))
    job = answer([first, other])
    assert job.replayed_step_ns is None
    assert [one.saves_ns for one in job.findings] == [None] * len(job.findings)
