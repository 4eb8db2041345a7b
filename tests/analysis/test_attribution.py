"""Who owns a node: sequence numbers, threads, and what only feeds another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import backspot
from backspot import Report
from support.synthetic import Trace

TICK = 10_000


@pytest.fixture
def locate(tmp_path: Path):
    def run(trace: Trace) -> Report:
        return backspot.locate(trace.save(tmp_path / "trace.json"))

    return run


def owners(report: Report) -> dict[str, dict[str, int]]:
    """Path to node name to count."""
    return {r.path: {n.name: n.count for n in r.nodes} for r in report.modules if r.nodes}


def two_modules() -> Trace:
    trace = Trace()
    trace.forward("", "Model", 0, 50 * TICK)
    trace.forward("a", "A", 1 * TICK, 10 * TICK)
    trace.forward("b", "B", 11 * TICK, 20 * TICK)
    return trace


def test_the_latest_operator_with_the_number_made_the_node(locate) -> None:
    trace = two_modules()
    # An operator that builds no node bears the next one's number, in another module here.
    trace.operator("aten::empty", 2 * TICK, 3 * TICK, seq=5)
    trace.operator("aten::mul", 12 * TICK, 13 * TICK, seq=5)
    trace.node("MulBackward0", 60 * TICK, 61 * TICK, seq=5)
    assert owners(locate(trace)) == {"b": {"MulBackward0": 1}}


def test_an_operator_after_the_node_did_not_make_it(locate) -> None:
    trace = two_modules()
    trace.operator("aten::mul", 2 * TICK, 3 * TICK, seq=5)
    trace.node("MulBackward0", 60 * TICK, 61 * TICK, seq=5)
    trace.forward("b", "B", 70 * TICK, 80 * TICK)
    trace.operator("aten::mul", 71 * TICK, 72 * TICK, seq=5)
    assert owners(locate(trace)) == {"a": {"MulBackward0": 1}}


def test_a_node_without_a_number_of_its_own_belongs_to_the_greatest_below(locate) -> None:
    trace = two_modules()
    trace.operator("aten::copy_", 2 * TICK, 3 * TICK, seq=5)  # builds 5 and 6
    trace.operator("aten::mul", 12 * TICK, 13 * TICK, seq=7)
    trace.node("MulBackward0", 60 * TICK, 61 * TICK, seq=7)
    trace.node("CopySlices", 62 * TICK, 63 * TICK, seq=6)
    assert owners(locate(trace)) == {"a": {"CopySlices": 1}, "b": {"MulBackward0": 1}}


def test_a_forward_outside_the_trace_is_not_mistaken_for_an_earlier_one(locate) -> None:
    trace = two_modules()
    trace.operator("aten::mul", 2 * TICK, 3 * TICK, seq=5)
    trace.node("MulBackward0", 60 * TICK, 61 * TICK, seq=5)
    trace.operator("aten::zero_", 62 * TICK, 63 * TICK)
    # The next step's forward ran while the profiler was off.
    trace.node("AddBackward0", 70 * TICK, 71 * TICK, seq=40)
    trace.node("MulBackward0", 72 * TICK, 73 * TICK, seq=6)
    report = locate(trace)
    assert owners(report) == {
        "a": {"MulBackward0": 1},
        "(forward not recorded)": {"AddBackward0": 1, "MulBackward0": 1},
    }
    assert any("no forward operator in the trace" in w for w in report.warnings)


def test_a_profile_that_starts_after_the_forward_says_so_and_asks_for_no_labels(locate) -> None:
    trace = Trace()
    trace.operator("aten::ones_like", 50 * TICK, 51 * TICK)
    trace.node("MulBackward0", 60 * TICK, 61 * TICK, seq=40)
    (warning,) = locate(trace).warnings
    assert "start the profiler before the forward" in warning


def test_accumulate_grad_belongs_to_the_node_that_fed_it(locate) -> None:
    trace = two_modules()
    trace.operator("aten::mul", 2 * TICK, 3 * TICK, seq=5)
    trace.operator("aten::mul", 12 * TICK, 13 * TICK, seq=6)
    accumulate = "torch::autograd::AccumulateGrad"
    trace.node("MulBackward0", 60 * TICK, 61 * TICK, seq=6)
    trace.node(accumulate, 61 * TICK, 62 * TICK)
    trace.node("MulBackward0", 62 * TICK, 63 * TICK, seq=5)
    trace.node(accumulate, 63 * TICK, 64 * TICK)
    trace.node(accumulate, 64 * TICK, 65 * TICK, thread=3)  # a parameter on the CPU
    assert owners(locate(trace)) == {
        "a": {"MulBackward0": 1, accumulate: 2},
        "b": {"MulBackward0": 1, accumulate: 1},
    }


def test_accumulate_grad_is_fed_by_no_node_of_another_pass(locate) -> None:
    trace = two_modules()
    accumulate = "torch::autograd::AccumulateGrad"
    trace.operator("aten::mul", 2 * TICK, 3 * TICK, seq=5)
    trace.node("MulBackward0", 60 * TICK, 61 * TICK, seq=5)
    trace.operator("aten::ones_like", 70 * TICK, 71 * TICK)  # parameter.backward()
    trace.node(accumulate, 80 * TICK, 81 * TICK)
    report = locate(trace)
    assert len(report.passes) == 2
    assert owners(report)["a"] == {"MulBackward0": 1}


def test_a_node_of_a_double_backward_belongs_where_its_first_backward_does(locate) -> None:
    trace = two_modules()
    trace.operator("aten::mul", 2 * TICK, 3 * TICK, seq=5)
    trace.node("MulBackward0", 60 * TICK, 64 * TICK, seq=5, thread=1)
    trace.operator("aten::mul", 61 * TICK, 62 * TICK, seq=6)  # create_graph=True
    trace.operator("aten::sum", 70 * TICK, 71 * TICK, seq=7)
    trace.node("SumBackward0", 80 * TICK, 81 * TICK, seq=7, thread=1)
    trace.node("MulBackward0", 81 * TICK, 82 * TICK, seq=6, thread=1)
    report = locate(trace)
    assert owners(report) == {
        "a": {"MulBackward0": 1},
        "(outside model)": {"SumBackward0": 1},
    }
    assert [run.nodes for run in report.passes] == [1, 2]
    assert report["a"].row.cpu_ns_by_step == (4 * TICK, TICK)


def test_a_functional_loss_stands_outside_the_model(locate) -> None:
    trace = two_modules()
    trace.operator("aten::mul", 2 * TICK, 3 * TICK, seq=5)
    trace.operator("aten::nll_loss", 55 * TICK, 56 * TICK, seq=6)
    trace.node("NllLossBackward0", 60 * TICK, 61 * TICK, seq=6)
    trace.node("MulBackward0", 61 * TICK, 62 * TICK, seq=5)
    report = locate(trace)
    assert owners(report) == {
        "a": {"MulBackward0": 1},
        "(outside model)": {"NllLossBackward0": 1},
    }
    assert report.coverage.cpu == 0.5


def test_two_losses_make_two_passes_and_two_optimizer_steps_two_steps(locate) -> None:
    trace = two_modules()
    for step in range(2):
        at = 100 * step * TICK
        for number in (0, 1):
            seq = 10 * step + number
            trace.forward("a", "A", at, at + 9 * TICK)
            trace.operator("aten::mul", at + (2 + number) * TICK, at + 4 * TICK, seq=seq)
            start = at + (60 + 10 * number) * TICK
            trace.operator("aten::ones_like", start - TICK, start)
            trace.node("MulBackward0", start, start + TICK, seq=seq)
        trace.annotation("Optimizer.step#SGD.step", at + 80 * TICK, at + 90 * TICK)
    report = locate(trace)
    assert len(report.passes) == 4
    assert [p.step for p in report.passes] == [0, 0, 1, 1]
    assert report.step_unit == "optimizer step"


def test_steps_are_what_the_profiler_marks(locate) -> None:
    trace = two_modules()
    for step in range(3):
        at = 100 * step * TICK
        trace.annotation(f"ProfilerStep#{step + 7}", at, at + 99 * TICK)
        trace.operator("aten::mul", at + 2 * TICK, at + 3 * TICK, seq=step)
        if step != 1:
            trace.node("MulBackward0", at + 60 * TICK, at + (61 + step) * TICK, seq=step)
    report = locate(trace)
    assert report.step_unit == "profiler step"
    assert report.step_ns_by_step == (99 * TICK, 99 * TICK)
    assert [p.step for p in report.passes] == [0, 1]


def test_labels_of_lightning_serve_too(locate) -> None:
    trace = Trace()
    trace.annotation("[pl][module]torch.nn.modules.linear.Linear: layer_1", 0, 9 * TICK)
    trace.operator("aten::addmm", TICK, 2 * TICK, seq=0)
    trace.node("AddmmBackward0", 20 * TICK, 21 * TICK, seq=0)
    report = locate(trace)
    assert report.source == "lightning"
    assert [(r.path, r.class_name) for r in report.modules] == [("layer_1", "Linear")]


def test_module_events_of_with_stack_serve_too(locate) -> None:
    trace = Trace()
    for name, start, end in (("Net_0", 0, 20), ("Block_1", 1, 15), ("Linear_0", 2, 5)):
        trace.event("python_function", f"nn.Module: {name}", start * TICK, end * TICK)
    trace.operator("aten::addmm", 3 * TICK, 4 * TICK, seq=0)
    trace.operator("aten::relu", 7 * TICK, 8 * TICK, seq=1)
    trace.node("ReluBackward0", 30 * TICK, 31 * TICK, seq=1)
    trace.node("AddmmBackward0", 31 * TICK, 32 * TICK, seq=0)
    report = locate(trace)
    assert report.source == "python"
    assert owners(report) == {
        "Net_0.Block_1": {"ReluBackward0": 1},
        "Net_0.Block_1.Linear_0": {"AddmmBackward0": 1},
    }
    assert len(report.top(depth=1)) < len(report.top(depth=2)) == len(report.top())


def test_without_labels_the_report_says_so_and_ranks_nodes(locate) -> None:
    trace = Trace()
    trace.operator("aten::addmm", TICK, 2 * TICK, seq=0)
    trace.node("AddmmBackward0", 20 * TICK, 21 * TICK, seq=0)
    report = locate(trace)
    assert report.source == "none"
    assert [o.name for o in report.operators] == ["AddmmBackward0"]
    assert any("names no modules" in w for w in report.warnings)


KINDS = ("mul", "add", "relu", "gather", "cumsum")


def test_two_threads_never_built_nodes_as_one(locate) -> None:
    trace = Trace()
    trace.forward("m", "M", 0, 20 * TICK)
    for seq in range(6):
        trace.operator("aten::mul", (seq + 1) * TICK, (seq + 1) * TICK + 100, seq=seq)
    numbers = [*((7, seq) for seq in range(6)), *((8, seq) for seq in range(3))]
    for at, (logical, seq) in enumerate(sorted(numbers, key=lambda one: -one[1])):
        begin = (40 + 2 * at) * TICK
        trace.node("MulBackward0", begin, begin + TICK, seq=seq, logical=logical)
    assert owners(locate(trace))["m"] == {"MulBackward0": 6}


@st.composite
def threaded(draw: st.DrawFn) -> tuple[list[list[str]], bool, int]:
    forwards = draw(
        st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8), min_size=1, max_size=4)
    )
    return forwards, draw(st.booleans()), draw(st.integers(0, 2**16))


@given(threaded())
def test_forwards_on_several_threads_with_equal_numbers_are_told_apart(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[list[list[str]], bool, int]
) -> None:
    forwards, with_flows, seed = case
    trace = Trace()
    nodes = []
    for number, kinds in enumerate(forwards):
        thread = 10 + number
        trace.forward(f"m{number}", "M", number, 20 * TICK, thread=thread)
        for seq, kind in enumerate(kinds):
            time = (seq + 1) * TICK + number
            trace.operator(f"aten::{kind}", time, time + 100, seq=seq, thread=thread)
            nodes.append((seq, number, kind, (thread, time)))
    random.Random(seed).shuffle(nodes)  # several engines' work on one device thread
    nodes.sort(key=lambda node: -node[0])
    for position, (seq, number, kind, origin) in enumerate(nodes):
        at = (40 + 2 * position) * TICK
        trace.node(
            f"{kind.capitalize()}Backward0",
            at,
            at + TICK,
            seq=seq,
            logical=7 + number,
            flow_from=origin if with_flows and seq % 2 == 0 else None,
        )
    report = backspot.locate(trace.save(tmp_path_factory.mktemp("t") / "trace.json"))
    found = owners(report)
    expected = {
        f"m{number}": {
            f"{kind.capitalize()}Backward0": kinds.count(kind) for kind in sorted(set(kinds))
        }
        for number, kinds in enumerate(forwards)
    }
    ambiguous = found.pop("(ambiguous thread)", {})
    for path, counts in found.items():
        assert counts == expected[path], "a wrong owner is worse than none"
    if with_flows:
        assert found == expected
    elif len({tuple(kinds) for kinds in forwards}) == len(forwards) == 1:
        assert not ambiguous
    if ambiguous:
        assert any("more than one thread" in w for w in report.warnings)
