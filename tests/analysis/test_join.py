"""A node that no recorded operator made is not given to the nearest one."""

from __future__ import annotations

from pathlib import Path

import pytest

import backspot
from backspot.analysis.attribution.join import _unambiguous
from support.synthetic import Trace

TICK = 10_000


@pytest.fixture
def owner_of(tmp_path: Path):
    def run(trace: Trace, node: str) -> list[str]:
        report = backspot.locate(trace.save(tmp_path / "trace.json"))
        return [row.path for row in report.modules if any(n.name == node for n in row.nodes)]

    return run


def forward(*, next_in: str) -> Trace:
    """``a`` makes number 5; number 6 is taken by nobody knows whom; the next operator makes 7."""
    trace = Trace()
    trace.forward("", "Model", 0, 50 * TICK)
    trace.forward("a", "A", 1 * TICK, 10 * TICK)
    trace.forward("b", "B", 11 * TICK, 20 * TICK)
    trace.operator("aten::mul", 2 * TICK, 3 * TICK, seq=5)
    at = {"a": 8, "b": 12}[next_in] * TICK
    trace.operator("aten::exp", at, at + TICK, seq=7)
    return trace


def backward(trace: Trace, name: str) -> None:
    trace.node("ExpBackward0", 60 * TICK, 61 * TICK, seq=7)
    trace.node(name, 62 * TICK, 66 * TICK, seq=6)
    trace.node("MulBackward0", 67 * TICK, 68 * TICK, seq=5)


def test_a_node_made_between_two_modules_has_no_owner(owner_of) -> None:
    trace = forward(next_in="b")
    backward(trace, "DifferentiableGraphBackward")
    assert owner_of(trace, "DifferentiableGraphBackward") == ["(forward not recorded)"]


def test_a_marker_in_it_names_its_owner(owner_of) -> None:
    trace = forward(next_in="b")
    backward(trace, "DifferentiableGraphBackward")
    trace.event("cpu_op", "backward: (Model)", 62 * TICK + 10, 62 * TICK + 20, 2)
    assert owner_of(trace, "DifferentiableGraphBackward") == [""]


def test_a_node_made_between_two_operators_of_one_call_is_that_calls(owner_of) -> None:
    trace = forward(next_in="a")
    backward(trace, "DifferentiableGraphBackward")
    assert owner_of(trace, "DifferentiableGraphBackward") == ["a"]


@pytest.mark.parametrize("name", ["CopySlices", "torch::autograd::CopySlices", "MulBackward0"])
def test_a_node_that_the_operator_below_makes_beside_its_own_is_its(owner_of, name) -> None:
    trace = forward(next_in="b")
    backward(trace, name)
    assert "a" in owner_of(trace, name)
    assert "(forward not recorded)" not in owner_of(trace, name)


# A node that shares its number with an operator of the module before -----------------------------


def shared(name: str, operator: str = "aten::gt") -> Trace:
    """``a`` makes number 5 and then compares, at number 6; so does whoever makes 6; ``b`` makes 7.

    In ``b`` an operator without a number runs before, as in the forward of a C++ function.
    """
    trace = Trace()
    trace.forward("", "Model", 0, 50 * TICK)
    trace.forward("a", "A", 1 * TICK, 10 * TICK)
    trace.forward("b", "B", 11 * TICK, 20 * TICK)
    trace.operator("aten::mul", 2 * TICK, 3 * TICK, seq=5)
    trace.operator(operator, 6 * TICK, 7 * TICK, seq=6)
    trace.operator("aten::exp", 17 * TICK, 18 * TICK, seq=7)
    backward(trace, name)
    return trace


CPP = "torch::autograd::CppNode<RoiAlign>"


def test_a_marker_counts_more_than_an_operator_of_another_name(owner_of) -> None:
    trace = shared(CPP)
    trace.event("cpu_op", "backward: b (B)", 62 * TICK + 10, 62 * TICK + 20, 2)
    assert owner_of(trace, CPP) == ["b"]


@pytest.mark.parametrize("path", ["b", ""])
def test_without_a_marker_it_belongs_where_alone_operators_ran_without_numbers(
    owner_of, path
) -> None:
    trace = shared(CPP)
    trace.operator("aten::clone", *((12 * TICK, 13 * TICK) if path else (10_100 * 10, 10_500 * 10)))
    assert owner_of(trace, CPP) == [path]


def test_device_work_launched_outside_of_operators_counts_like_an_operator(owner_of) -> None:
    trace = shared(CPP)
    trace.kernel(14 * TICK, 15 * TICK, launch=13 * TICK, launch_thread=1)
    assert owner_of(trace, CPP) == ["b"]


def test_where_several_modules_ran_such_operators_nobody_owns_it(owner_of) -> None:
    trace = shared(CPP)
    trace.operator("aten::clone", 12 * TICK, 13 * TICK)
    trace.operator("aten::arange", 8 * TICK, 9 * TICK)
    assert owner_of(trace, CPP) == ["(forward not recorded)"]


def test_what_nobody_owns_is_said_to_have_no_recorded_maker(tmp_path: Path) -> None:
    trace = shared(CPP)
    (warning,) = backspot.locate(trace.save(tmp_path / "trace.json")).warnings
    assert "1 of 3 backward nodes were made by no recorded operator" in warning


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        (CPP, "torchvision::roi_align"),
        (CPP, "fbgemm::lookup"),
        ("GatedBackward", "Gated"),
        ("GtBackward0", "aten::gt"),
        ("UnsafeViewBackward0", "aten::reshape"),
        ("torch::autograd::CopyBackwards", "aten::copy_"),
    ],
)
def test_an_operator_that_can_have_made_the_node_keeps_it(owner_of, name, operator) -> None:
    assert owner_of(shared(name, operator), name) == ["a"]


def test_an_extensions_operator_loses_it_where_something_else_ran_unnumbered(owner_of) -> None:
    trace = shared(CPP, "torchvision::nms")
    trace.operator("aten::clone", 12 * TICK, 13 * TICK)
    assert owner_of(trace, CPP) == ["(forward not recorded)"]


def test_a_scripted_graph_belongs_where_its_operators_run(owner_of) -> None:
    name = "torch::jit::(anonymous namespace)::DifferentiableGraphBackward"
    trace = shared(name)
    trace.operator("aten::arange", 8 * TICK, 9 * TICK)
    trace.operator("gated", 12 * TICK, 16 * TICK)
    trace.operator("aten::detach", 13 * TICK, 14 * TICK, seq=7)
    assert owner_of(trace, name) == ["b"]


def test_a_label_of_the_users_around_modules_tells_nothing(owner_of) -> None:
    trace = shared(CPP)
    trace.operator("my code", 10 * TICK + 10, 30 * TICK)
    assert owner_of(trace, CPP) == ["(forward not recorded)"]


def test_before_torch_1_10_names_without_digits_are_pytorchs_own(owner_of) -> None:
    trace = Trace()
    trace.forward("a", "A", 1 * TICK, 10 * TICK)
    trace.forward("b", "B", 11 * TICK, 20 * TICK)
    trace.operator("aten::reshape", 2 * TICK, 3 * TICK, seq=5)
    trace.operator("aten::exp", 12 * TICK, 13 * TICK, seq=6)
    trace.node("ExpBackward", 60 * TICK, 61 * TICK, seq=6)
    trace.node("UnsafeViewBackward", 62 * TICK, 66 * TICK, seq=5)
    assert owner_of(trace, "UnsafeViewBackward") == ["a"]


def test_threads_are_matched_from_the_clearest_to_the_last() -> None:
    # Logical thread 1 fits two recorded threads, until 2 has taken the one that fits it better.
    scores = {1: {10: (5, 5), 20: (5, 5)}, 2: {20: (6, 6)}}
    assert _unambiguous(scores) == (2, 20)


@pytest.mark.parametrize(
    "scores",
    [
        {},
        {1: {}},
        {1: {10: (5, 5), 20: (5, 5)}},  # a tie
        {1: {10: (5, 5)}, 2: {10: (5, 5)}},  # rivals
        {1: {10: (5, 5)}, 2: {10: (6, 1), 20: (6, 1)}},  # a rival that is better, but tied
    ],
)
def test_threads_that_suit_several_alike_are_not_matched(scores: dict) -> None:
    assert _unambiguous(scores) is None
