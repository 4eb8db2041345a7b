"""Communication between ranks has owners of its own, on devices and on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

import backspot
from backspot.results.report import Report
from backspot.trace.labels import parse_label
from support.synthetic import Trace

US = 1000
ENGINE = 2
GLOO = 9
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GENERIC = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
ACCUMULATE = "torch::autograd::AccumulateGrad"


def step() -> Trace:
    """A module's forward, its node (200 to 300) and the accumulation of its gradient (to 400)."""
    trace = Trace()
    trace.forward("", "Net", 0, 100 * US)
    trace.forward("layer", "Linear", 10 * US, 90 * US)
    trace.operator("aten::addmm", 20 * US, 30 * US, seq=1)
    trace.node("AddmmBackward0", 200 * US, 300 * US, seq=1, thread=ENGINE)
    trace.node(ACCUMULATE, 300 * US, 400 * US, thread=ENGINE)
    return trace


def report_of(trace: Trace, folder: Path) -> Report:
    return backspot.locate(trace.save(folder / "trace.json"))


def wall(report: Report) -> dict[str, int]:
    return {row.path: row.wall_ns // US for row in report.modules if row.wall_ns}


def test_what_a_hook_of_the_gradient_reduces_is_an_exchange_of_gradients(tmp_path: Path) -> None:
    trace = step()
    trace.kernel(350 * US, 900 * US, launch=350 * US, name=ALL_REDUCE)
    report = report_of(trace, tmp_path)
    assert wall(report) == {"(gradient exchange)": 550, "layer": 150}
    row = report["(gradient exchange)"].row
    assert [(node.name, node.count, node.gpu_ns // US) for node in row.nodes] == [
        ("(all_reduce)", 1, 550)
    ]
    assert [kernel.name for kernel in row.kernels] == [ALL_REDUCE]
    assert row.is_exchange
    assert not report["layer"].row.gpu_ns


@pytest.mark.parametrize("groups", [("dp", "dp"), ("dp", "tp"), ("dp", None)])
def test_collectives_of_several_process_groups_are_listed_by_group(groups, tmp_path: Path) -> None:
    trace = step()
    for number, group in enumerate(groups):
        at = (310 + 40 * number) * US
        described = {} if group is None else {"Process Group Description": group}
        trace.event("cpu_op", "record_param_comms", at, at + 20 * US, ENGINE, **described)
        begin = (400 + 100 * number) * US
        trace.kernel(begin, begin + 100 * US, launch=at + US, launch_thread=ENGINE, name=ALL_REDUCE)
    report = report_of(trace, tmp_path)
    row = report["(gradient exchange)"].row
    assert {node.name: node.gpu_ns // US for node in row.nodes} == {
        ("dp", "dp"): {"(all_reduce)": 200},
        ("dp", "tp"): {"(all_reduce [dp])": 100, "(all_reduce [tp])": 100},
        ("dp", None): {"(all_reduce)": 200},
    }[groups]


def test_hidden_communication_costs_nothing(tmp_path: Path) -> None:
    trace = step()
    trace.kernel(350 * US, 500 * US, launch=350 * US, name=ALL_REDUCE, stream=8)
    trace.kernel(300 * US, 600 * US, launch=299 * US)
    report = report_of(trace, tmp_path)
    exchange = report["(gradient exchange)"].row
    assert (exchange.wall_ns, exchange.gpu_ns) == (0, 150 * US)
    assert wall(report) == {"layer": 400}


@pytest.mark.parametrize(
    ("launch", "mark", "kernel", "owner"),
    [
        (250, "", ALL_REDUCE, "(communication)"),
        (250, "", ALL_GATHER, "(communication)"),
        (250, "FSDP::all_gather (layer)", ALL_GATHER, "(parameter gather)"),
        (250, "FSDP::post_backward_reduce (layer)", REDUCE_SCATTER, "(gradient exchange)"),
        (350, "FullyShardedDataParallel._pre_backward_prefetch", ALL_GATHER, "(parameter gather)"),
        (350, "", "ncclDevKernel_Broadcast_RING_LL", "(communication)"),
        (350, "", "ncclDevKernel_SendRecv", "(communication)"),
        (None, "", ALL_REDUCE, "(communication)"),
    ],
)
def test_the_launch_says_what_communication_is_for(
    launch: int | None, mark: str, kernel: str, owner: str, tmp_path: Path
) -> None:
    trace = step()
    if launch is not None and mark:
        trace.annotation(mark, (launch - 5) * US, (launch + 5) * US, thread=ENGINE)
    trace.kernel(360 * US, 390 * US, launch=None if launch is None else launch * US, name=kernel)
    report = report_of(trace, tmp_path)
    assert [row.path for row in report.modules if row.gpu_ns] == [owner]
    assert sum(wall(report).values()) == 200


def test_the_operator_names_the_collective_of_a_kernel_for_all(tmp_path: Path) -> None:
    trace = step()
    trace.operator("c10d::allreduce_", 340 * US, 360 * US, thread=ENGINE)
    trace.kernel(355 * US, 900 * US, launch=350 * US, name=GENERIC)
    row = report_of(trace, tmp_path)["(gradient exchange)"].row
    assert [node.name for node in row.nodes] == ["(all_reduce)"]


def gloo(until: int, start: int = 355) -> Trace:
    """All of it on the host: an all-reduce, launched at 350, which another thread executes."""
    trace = step()
    trace.operator("c10d::allreduce_", 350 * US, 360 * US, thread=ENGINE)
    trace.annotation("gloo:all_reduce", start * US, until * US, thread=GLOO)
    return trace


def test_a_rank_that_waits_on_the_host_waits_for_the_exchange(tmp_path: Path) -> None:
    report = report_of(gloo(2400), tmp_path)
    assert wall(report) == {"(gradient exchange)": 2000, "layer": 200}
    assert report.passes[0].duration_ns == 2200 * US, "the pass lasts until the exchange ends"
    assert (report.gpu_ns, report.has_gpu, report.devices) == (0, False, ())
    assert not report["(gradient exchange)"].row.kernels
    (phase,) = (phase for phase in report.phases if phase.name == "backward")
    assert phase.wall_ns == report.wall_ns
    finding = next(one for one in report.findings if one.rule == "exposed-communication")
    assert finding.wall_ns == 2000 * US
    assert [place.path for place in finding.places] == ["layer"]
    assert "2.0 ms in (gradient exchange)" in finding.seen


def test_an_exchange_may_start_after_its_operator_has_returned(tmp_path: Path) -> None:
    report = report_of(gloo(2400, start=500), tmp_path)
    assert wall(report) == {"(gradient exchange)": 1900, "layer": 200, "(autograd engine)": 100}


def test_an_exchange_that_is_said_to_end_late_takes_nothing_from_the_next_pass(
    tmp_path: Path,
) -> None:
    trace = gloo(2290)
    trace.forward("layer", "Linear", 2010 * US, 2090 * US)
    trace.operator("aten::addmm", 2020 * US, 2030 * US, seq=2)
    trace.node("AddmmBackward0", 2200 * US, 2300 * US, seq=2, thread=ENGINE)
    trace.node(ACCUMULATE, 2300 * US, 2400 * US, thread=ENGINE)
    report = report_of(trace, tmp_path)
    assert [one.duration_ns // US for one in report.passes] == [2000, 200]
    engine = 40  # the second forward, while the first pass waits
    whole = {"(gradient exchange)": 860, "layer": 200, "(autograd engine)": engine}
    assert wall(report) == whole, "per pass"


def test_an_exchange_that_no_pass_starts_is_not_the_backwards(tmp_path: Path) -> None:
    trace = step()
    trace.operator("c10d::allreduce_", 500 * US, 520 * US)
    trace.annotation("gloo:all_reduce", 510 * US, 900 * US, thread=GLOO)
    assert wall(report_of(trace, tmp_path)) == {"layer": 200}


def test_an_exchange_beside_the_hosts_work_costs_nothing(tmp_path: Path) -> None:
    report = report_of(gloo(390), tmp_path)
    assert wall(report) == {"layer": 200}
    assert not report.findings


def test_the_answer_says_that_the_backward_waits_for_other_ranks(tmp_path: Path) -> None:
    first = " ".join(str(report_of(gloo(2400), tmp_path)).split("\n")[:2])
    assert first.startswith("Waiting for other ranks: (gradient exchange) takes 91%")
    assert "of the backward: 2.0 ms, mostly all_reduce; no module takes more than 9.1%" in first


def test_without_modules_the_answer_names_the_collective(tmp_path: Path) -> None:
    trace = gloo(2400)
    trace.events = [event for event in trace.events if not parse_label(event["name"])]
    first = " ".join(str(report_of(trace, tmp_path)).split("\n")[:4])
    assert "communication between ranks (all_reduce) takes 91% of the backward: 2.0 ms" in first
    assert "idle" not in first
