"""The kernels by which a module takes longer on one rank."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from backspot.job.answer import answer
from backspot.job.kernels import difference
from backspot.job.reduce import summarize
from backspot.job.summary import Summary
from backspot.results.job import JobFinding
from backspot.trace.names import short_kernel_name
from support.summaries import many, with_kernels

SLOW = "model.layers.2.mlp.down_proj"
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
GEMM = {"nvjet_sm90_NNT": 200_000, "nvjet_sm90_NTN": 90_000}
MS = 1_000_000


def ranks(slow: dict[str, int], usual: dict[str, int] = GEMM) -> list[Summary]:
    """Four ranks, of which rank 1 has these kernels in one module."""
    even = many(4)
    return [with_kernels(one, {SLOW: slow if one.rank == 1 else usual}) for one in even]


def finding(summaries: list[Summary]) -> JobFinding:
    (of_module,) = (one for one in answer(summaries).findings if one.path == SLOW)
    return of_module


def test_a_kernel_that_one_rank_alone_runs_is_named_and_code_of_that_rank_is_looked_for() -> None:
    of_module = finding(ranks({SPIN: 10 * MS, **GEMM}))
    assert "spin_kernel takes 10.0 ms of it, on this rank alone." in of_module.seen
    assert "nvjet" not in of_module.seen
    assert "code that only this rank runs" in of_module.remedy
    assert "shapes" not in of_module.remedy


def test_a_kernel_that_takes_longer_on_one_rank_is_named_with_both_times() -> None:
    of_module = finding(ranks({**GEMM, "nvjet_sm90_NNT": 10 * MS}))
    assert "nvjet_sm90_NNT takes 10.0 ms there, and 0.20 ms on the other ranks." in of_module.seen
    assert "shapes" in of_module.remedy
    assert "code that only this rank runs" not in of_module.remedy


def test_a_kernel_in_place_of_that_of_the_other_ranks_is_no_code_of_that_rank_alone() -> None:
    of_module = finding(ranks({"nvjet_sm90_big": 10 * MS, "nvjet_sm90_NTN": 90_000}))
    assert "the other ranks run nvjet_sm90_NNT instead" in of_module.seen
    assert "shapes and types" in of_module.remedy
    assert "code that only this rank runs" not in of_module.remedy


def test_many_kernels_that_all_take_a_little_longer_are_not_named() -> None:
    slow = {f"kernel_{number}": 2 * MS for number in range(8)}
    of_module = finding(ranks(slow, dict.fromkeys(slow, 100_000)))
    assert "kernel_" not in of_module.seen
    assert "kernels of the module" in of_module.remedy


def test_even_ranks_have_no_finding_whatever_their_kernels() -> None:
    assert not [one for one in answer(ranks(GEMM)).findings if one.rule == "slow-module"]


def test_ranks_of_an_older_summary_have_their_finding_without_kernels() -> None:
    new = ranks({SPIN: 10 * MS, **GEMM})
    old = [msgspec.structs.replace(new[0], kernels=(), kernel_names=()), *new[1:]]
    assert "spin_kernel" not in finding(old).seen
    assert finding(old).cost_ns == finding(new).cost_ns


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([f"kernel_{letter}" for letter in "abcdefgh"]),
            st.integers(1, 10 * MS),
            min_size=1,
        ),
        min_size=3,
        max_size=4,
    )
)
def test_what_is_said_of_a_kernel_holds_also_for_kernels_that_summaries_leave_out(
    kernels: list[dict[str, int]],
) -> None:
    even = many(len(kernels))
    summaries = dict(
        enumerate(
            with_kernels(one, {SLOW: times}) for one, times in zip(even, kernels, strict=True)
        )
    )
    here, *others = kernels
    longer_ns = sum(here.values()) - int(median(sum(times.values()) for times in others))
    peers = range(1, len(kernels))
    found = difference(SLOW, False, 0, peers, summaries, longer_ns)
    if found is None or longer_ns <= 0:
        return
    explained_ns = 0
    for kernel in found.longer:
        usual_ns = median(times.get(kernel.name, 0) for times in others)
        assert kernel.taken_ns == here[kernel.name]
        assert kernel.usual_ns >= int(usual_ns)
        assert not kernel.is_alone or not any(kernel.name in times for times in others)
        explained_ns += kernel.taken_ns - kernel.usual_ns
    assert 2 * explained_ns >= longer_ns


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (SPIN, "spin_kernel"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_ker", "elementwise_kernel"),
        ("std::enable_if<!(false), void>::type gemvx::kernel<int, 8>(int)", "gemvx::kernel"),
        ("nvjet_sm90_tst_256x128_64x4_NNT", "nvjet_sm90_tst_256x128_64x4_NNT"),
        ("Memset (Device)", "Memset"),
        ("", ""),
    ],
)
def test_a_kernel_is_called_by_its_name_without_arguments(name: str, short: str) -> None:
    assert short_kernel_name(name) == short


def test_recorded_ranks_that_are_even_have_kernels_and_no_slow_module() -> None:
    folder = Path(__file__).parents[1] / "data" / "h200"
    recorded = [summarize(folder / f"ddp.rank{rank}.trace.json.gz") for rank in (0, 1)]
    assert all(one.kernels for one in recorded)
    assert not [one for one in answer(recorded).findings if one.rule == "slow-module"]
