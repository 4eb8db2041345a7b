"""A node that no recorded operator made is not given to the nearest one."""

from __future__ import annotations

from pathlib import Path

import pytest

import backspot
from synthetic import Trace

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
