"""The kernels by which a module takes longer on one rank."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from backspot.job.answer import answer
from backspot.job.kernels import KernelsOfRanks
from backspot.job.modules import PARTS
from backspot.job.reduce import summarize
from backspot.job.summary import KERNELS, Summary
from backspot.results.job import JobFinding
from backspot.trace.names import short_kernel_name, short_kernel_names
from support.summaries import many, with_kernels

SLOW = "model.layers.2.mlp.down_proj"
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
GEMM = {"nvjet_sm90_NNT": 200_000, "nvjet_sm90_NTN": 90_000}
GEMM_NAME = "nvjet_sm90<1>(int)"
MS = 1_000_000


def ranks(slow: dict[str, int], usual: dict[str, int] = GEMM) -> list[Summary]:
    """Four ranks, of which rank 1 has these kernels in one module."""
    even = many(4)
    return [with_kernels(one, {SLOW: slow if one.rank == 1 else usual}) for one in even]


def in_steps(summary: Summary, by_step: list[dict[str, int]]) -> Summary:
    """The summary with these kernels in the module, in each step others."""
    kernels = sorted({name for times in by_step for name in times})
    times = {name: tuple(step.get(name, 0) for step in by_step) for name in kernels}
    kernels.sort(key=lambda name: -sum(times[name]))
    changed = with_kernels(summary, {SLOW: dict.fromkeys(kernels, 1)})
    (of_module,) = changed.kernels
    modules = list(changed.modules)
    modules[of_module.module] = msgspec.structs.replace(
        modules[of_module.module], forward_gpu=tuple(map(sum, zip(*times.values(), strict=True)))
    )
    unnamed = [times[name] for name in kernels[KERNELS:]]
    of_module = msgspec.structs.replace(
        of_module,
        time=tuple(times[name] for name in kernels[:KERNELS]),
        unnamed=tuple(map(max, zip(*unnamed, strict=True))) or (0,) * summary.steps,
    )
    names = tuple(kernels[:KERNELS])
    return msgspec.structs.replace(
        changed, modules=tuple(modules), kernel_names=names, kernels=(of_module,)
    )


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
    at = {rank: range(summary.steps) for rank, summary in summaries.items()}
    found = KernelsOfRanks(summaries, at).difference(SLOW, False, 0, peers, longer_ns)
    if found is None or longer_ns <= 0:
        return
    explained_ns = 0
    for kernel in found.longer:
        usual_ns = median(times.get(kernel.name, 0) for times in others)
        assert kernel.taken_ns == here[kernel.name]
        assert kernel.usual_ns >= int(usual_ns)
        assert kernel.is_bound or kernel.usual_ns == int(usual_ns)
        elsewhere = any(kernel.name in times for times in others)
        assert kernel.is_alone in (None, not elsewhere)
        explained_ns += kernel.taken_ns - kernel.usual_ns
    assert 2 * explained_ns >= longer_ns
    assert not found.is_instead or not any(name in here for name in found.replaced)


def test_a_kernel_that_takes_long_in_one_step_alone_is_not_named() -> None:
    other = {"first": 2 * MS, "second": 2 * MS}
    of_steps = [other, {**other, "one_off_benchmark": 14 * MS}, other]
    summaries = dict(enumerate(ranks(GEMM)))
    summaries[1] = in_steps(summaries[1], of_steps)
    at = {rank: range(3) for rank in summaries}
    found = KernelsOfRanks(summaries, at).difference(SLOW, False, 1, (0, 2, 3), 3_700_000)
    assert found is not None
    assert [(one.name, one.taken_ns) for one in found.longer] == [("first", 2 * MS)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 10 * MS), min_size=1),
        min_size=3,
        max_size=3,
    )
)
def test_no_kernel_takes_longer_than_its_module(by_step: list[dict[str, int]]) -> None:
    even = many(3)
    summaries = {one.rank or 0: with_kernels(one, {SLOW: {"a": 1}}) for one in even}
    summaries[0] = in_steps(even[0], by_step)
    (module,) = (one for one in summaries[0].modules if one.path == SLOW)
    by_part = zip(*(getattr(module, part) for part in PARTS), strict=True)
    taken_ns = median(map(sum, by_part))
    at = {rank: range(3) for rank in summaries}
    found = KernelsOfRanks(summaries, at).difference(SLOW, False, 0, (1, 2), 1)
    assert found is None or sum(one.taken_ns for one in found.longer) <= taken_ns


def test_a_kernel_that_no_summary_of_the_others_names_is_said_to_take_at_most_what_it_can() -> None:
    usual = {f"gemm_{number}": 300_000 for number in range(5)}
    of_module = finding(ranks({**usual, "debug_check_kernel": 3 * MS}, usual))
    said = "debug_check_kernel takes 3.0 ms there, and at most 0.30 ms on the other ranks"
    assert f"{said}, if they run it." in of_module.seen
    assert "code that only this rank runs" in of_module.remedy
    assert "clock" not in of_module.remedy


def test_a_kernel_that_this_rank_may_run_too_is_not_said_to_be_missing_there() -> None:
    here = {f"slow_{number}": 2 * MS for number in range(5)}
    of_module = finding(ranks({**here, "slow_0": 9 * MS}, {"nvjet_sm90_big": 5 * MS}))
    assert "the other ranks run nvjet_sm90_big instead, or for longer." in of_module.seen


KERNEL2 = "void cutlass::Kernel2<cutlass_80_simt_sgemm_{}>(cutlass_80_simt_sgemm_{}::Params)"


def test_two_kernels_of_one_template_are_told_apart() -> None:
    wide, narrow = (KERNEL2.format(size, size) for size in ("128x32_8x5", "64x64_8x5"))
    of_module = finding(ranks({wide: 9 * MS}, {narrow: 290_000}))
    assert "cutlass::Kernel2<…cutlass_80_simt_sgemm_128x32_8x5…> takes 9.0 ms of" in of_module.seen
    assert "run cutlass::Kernel2<…cutlass_80_simt_sgemm_64x64_8x5…> instead" in of_module.seen


NATIVE = "void at::native::vectorized_elementwise_kernel<{}, at::native::{}<float> >(int)"
OF_ONE_TEMPLATE = [
    NATIVE.format(*arguments)
    for arguments in [(4, "AddFunctor"), (8, "AddFunctor"), (4, "MulFunctor"), (8, "MulFunctor")]
]


def test_a_template_that_has_no_argument_of_its_own_keeps_its_whole_name() -> None:
    names = [*OF_ONE_TEMPLATE, "a::copy_kernel(int)", "b::copy_kernel(int)", GEMM_NAME]
    short = short_kernel_names(names)
    assert short == {name: name for name in names} | {GEMM_NAME: "nvjet_sm90"}
    assert short_kernel_names(OF_ONE_TEMPLATE[1:3]) == {
        OF_ONE_TEMPLATE[1]: "vectorized_elementwise_kernel<…8…>",
        OF_ONE_TEMPLATE[2]: "vectorized_elementwise_kernel<…4…>",
    }


@settings(max_examples=60, deadline=None)
@given(st.sets(st.text("ab<>,(): 1", max_size=12)))
def test_no_two_kernels_are_called_alike(names: set[str]) -> None:
    short = short_kernel_names(names)
    assert set(short) == names
    assert len(set(short.values())) == len(names)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (SPIN, "spin_kernel"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_ker", "elementwise_kernel"),
        ("std::enable_if<!(false), void>::type gemvx::kernel<int, 8>(int)", "gemvx::kernel"),
        ("nvjet_sm90_tst_256x128_64x4_NNT", "nvjet_sm90_tst_256x128_64x4_NNT"),
        ("Memset (Device)", "Memset (Device)"),
        ("Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pageable)"),
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
