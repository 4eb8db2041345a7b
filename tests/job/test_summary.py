"""One rank's trace, reduced to a summary."""

from __future__ import annotations

import json
import random
from operator import le, sub
from pathlib import Path

import msgspec
import numpy as np
import pytest

from backspot.errors import NotATraceError
from backspot.job.answer import answer
from backspot.job.identity import identify
from backspot.job.reduce import summarize
from backspot.job.summary import (
    KERNELS,
    LONGEST_NAME,
    Call,
    Group,
    KernelTimes,
    ModuleTimes,
    PhaseTimes,
    Summary,
    from_bytes,
    from_json,
    to_bytes,
    to_json,
)
from backspot.pipeline import locate
from support.summaries import many

TRACES = Path(__file__).parents[1] / "data" / "h200"


@pytest.fixture(scope="module", params=["ddp.rank0", "ddp.rank1", "fsdp2.rank1"])
def trace(request: pytest.FixtureRequest) -> Path:
    return TRACES / f"{request.param}.trace.json.gz"


def test_a_summary_says_which_rank_it_is_of(trace: Path) -> None:
    summary = summarize(trace)
    assert (summary.rank, summary.world_size) == (int(trace.name[-len("0.trace.json.gz")]), 2)
    assert [group.ranks for group in summary.groups if group.name] == [(0, 1)]


def test_a_summary_survives_both_forms_unchanged(trace: Path) -> None:
    summary = summarize(trace)
    assert from_bytes(to_bytes(summary)) == summary
    assert from_json(to_json(summary)) == summary


def test_a_summary_has_the_steps_of_the_report(trace: Path) -> None:
    summary, report = summarize(trace), locate(trace)
    lengths = [end - begin for begin, end in zip(summary.begin, summary.end, strict=True)]
    assert tuple(lengths) == report.step_ns_by_step
    named = {phase.name: phase.by_step for phase in summary.phases}
    assert named == {phase.name: phase.wall_ns_by_step for phase in report.phases}


def test_modules_and_collectives_take_no_more_than_the_step(trace: Path) -> None:
    summary = summarize(trace)
    for step in range(summary.steps):
        owned = sum(
            part[step]
            for module in summary.modules
            for part in (
                module.forward_gpu,
                module.forward_host,
                module.backward_gpu,
                module.backward_host,
            )
        )
        length = summary.end[step] - summary.begin[step]
        assert 0 < owned + summary.exposed[step] <= length
        held = [
            exposed + launching
            for group in summary.groups
            for of, exposed, launching in zip(
                group.step, group.exposed, group.launching, strict=True
            )
            if of == step
        ]
        assert 0 < sum(held) <= length


def test_a_host_executes_no_more_than_the_step_whatever_hides_it(trace: Path) -> None:
    summary = summarize(trace)
    modules = [one for one in summary.modules if one.is_module]
    parts = {
        part: sum(
            np.array(getattr(one, f"{way}_{part}"))
            for one in modules
            for way in ("forward", "backward")
        )
        + sum(np.array(getattr(one, part)) for one in summary.outside)
        for part in ("host", "hidden", "beside")
    }
    assert (sum(parts.values()) <= np.subtract(summary.end, summary.begin)).all()
    assert all(
        any(times)
        for times in zip(
            *(one.forward_beside + one.backward_beside for one in modules), strict=True
        )
    )
    kernels = [np.add(one.forward_gpu, one.backward_gpu) for one in summary.modules]
    assert (parts["beside"] <= sum(kernels)).all()


def test_a_summary_of_an_earlier_version_is_read(trace: Path) -> None:
    """It does not say what the host executes beside kernels."""
    document = json.loads(to_json(summarize(trace)))
    document["modules"] = [module[:9] for module in document["modules"]]
    document["outside"] = [outside[:5] for outside in document["outside"]]
    first = from_json(json.dumps(document).encode())
    other = msgspec.structs.replace(first, rank=1 - (first.rank or 0), source="other")
    assert len(answer([first, other]).ranks) == 2


def test_the_kernels_of_modules_are_named_once_the_longest_first(trace: Path) -> None:
    summary = summarize(trace)
    assert len(set(summary.kernel_names)) == len(summary.kernel_names) > 0
    assert {number for kernels in summary.kernels for number in kernels.kernel} == set(
        range(len(summary.kernel_names))
    )
    assert max(map(len, summary.kernel_names)) <= LONGEST_NAME
    for kernels in summary.kernels:
        module = summary.modules[kernels.module]
        assert module.is_module
        assert 0 < len(kernels.time) <= KERNELS
        in_all = list(map(sum, kernels.time))
        assert in_all == sorted(in_all, reverse=True)
        assert min(in_all) > 0
        named = list(map(sum, zip(*kernels.time, strict=True)))
        unnamed = map(sub, module.on_gpu(kernels.backward), named)
        if any(kernels.unnamed):
            assert len(kernels.time) == KERNELS
            assert all(map(le, kernels.unnamed, unnamed))
        else:
            assert not any(unnamed)


def test_the_kernels_of_two_hundred_modules_take_less_than_90_kilobytes() -> None:
    chance, summary = random.Random(0), many(2)[0]

    def times() -> tuple[int, ...]:
        return tuple(chance.randrange(10_000_000) for _ in range(10))

    names = tuple(f"{chance.getrandbits(4 * LONGEST_NAME):x}" for _ in range(40))
    kernels = tuple(
        KernelTimes(
            module,
            backward,
            tuple(chance.sample(range(len(names)), KERNELS)),
            tuple(times() for _ in range(KERNELS)),
            times(),
        )
        for module in range(200)
        for backward in (False, True)
    )
    with_kernels = msgspec.structs.replace(summary, kernel_names=names, kernels=kernels)
    assert len(to_bytes(with_kernels)) - len(to_bytes(summary)) < 90_000


def test_modules_inside_compiled_code_have_their_shares() -> None:
    trace = TRACES.parent / "compiled" / "llama.json.gz"
    summary, report = summarize(trace), locate(trace)
    assert {module.path for module in summary.modules} >= {"lm_head", "model.layers.3.mlp.up_proj"}
    for module in summary.modules:
        if module.is_module:
            parts = zip(module.backward_gpu, module.backward_host, strict=True)
            by_step = tuple(map(sum, parts))
            assert by_step == report[module.path].row.wall_ns_by_step, module.path


def test_every_step_has_its_collectives_in_the_order_of_their_launch(trace: Path) -> None:
    summary = summarize(trace)
    (group,) = (group for group in summary.groups if group.name)
    assert set(group.step) == set(range(summary.steps))
    assert list(group.launch) == sorted(group.launch)
    assert list(group.step) == sorted(group.step)
    assert all(start <= end for start, end in zip(group.start, group.end, strict=True))


def test_a_step_exchanges_the_bytes_of_the_gradients_of_its_layers(trace: Path) -> None:
    summary = summarize(trace)
    (group,) = (group for group in summary.groups if group.name)
    exchanged = [0] * summary.steps
    for step, number in zip(group.step, group.call, strict=True):
        call = group.calls[number]
        exchanged[step] += call.bytes if call.purpose == "gradients" else 0
    assert set(exchanged) == {4 * 4 * (4096 * 4096 + 4096)}  # four layers in fp32


def test_a_summary_of_a_thousand_modules_has_less_than_400_kilobytes() -> None:
    steps, count = 10, 400
    chance = random.Random(0)

    def times() -> tuple[int, ...]:
        return tuple(chance.randrange(10_000_000) for _ in range(steps))

    modules = tuple(
        ModuleTimes(
            f"model.layers.{i}.mlp.projection", "Linear", True, *(times() for _ in range(8))
        )
        for i in range(1000)
    )
    many = tuple(sorted(chance.randrange(10**10) for _ in range(steps * count)))
    summary = Summary(
        source="rank0.json.gz",
        rank=0,
        world_size=1024,
        host="node",
        origin_ns=10**18,
        step_unit="profiler step",
        step_numbers=tuple(range(steps)),
        begin=times(),
        end=times(),
        exposed=times(),
        stalled=times(),
        phases=(PhaseTimes("forward", times()),),
        modules=modules,
        groups=(
            Group(
                name="data",
                ranks=(),
                calls=(Call("all_reduce", "gradients", "", 1 << 25),),
                call=(0,) * len(many),
                step=(1,) * len(many),
                launch=many,
                start=many,
                end=many,
                exposed=tuple(chance.randrange(1_000_000) for _ in many),
                launching=tuple(chance.randrange(1_000_000) for _ in many),
            ),
        ),
    )
    assert len(to_bytes(summary)) <= 400_000


@pytest.mark.parametrize("data", [b"", b"{}", b'{"schema": "backspot.rank/2"}', b"\xff"])
def test_what_is_no_summary_is_refused(data: bytes) -> None:
    for read in (from_bytes, from_json):
        with pytest.raises(NotATraceError, match=r"backspot\.rank/4"):
            read(data)


def test_a_trace_that_does_not_say_its_rank_has_that_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "rank12.json"
    path.write_text('{"traceEvents": []}')
    assert identify(path).rank == 12


def test_the_host_is_in_the_name_that_tensorboard_gives(tmp_path: Path) -> None:
    path = tmp_path / "node_7_581.1790857026.pt.trace.json"
    path.write_text('{"distributedInfo": {"rank": 3, "world_size": 8}, "traceEvents": []}')
    known = identify(path)
    assert (known.rank, known.world_size, known.host) == (3, 8, "node_7")
