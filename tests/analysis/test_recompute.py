"""Code that checkpointing runs again around modules belongs to whoever checkpointed it."""

from __future__ import annotations

from pathlib import Path

import pytest

import backspot
from backspot import Report
from support.synthetic import Trace

TICK = 10_000


@pytest.fixture
def locate(tmp_path: Path):
    def run(trace: Trace) -> Report:
        return backspot.locate(trace.save(tmp_path / "trace.json"))

    return run


def checkpointed(*, labelled: bool = True) -> Trace:
    """``block`` checkpoints a function: its own exp, then the module ``block.fc``."""
    trace = Trace()
    trace.forward("", "Model", 0, 50 * TICK)
    trace.forward("block", "Block", 1 * TICK, 40 * TICK)
    trace.operator("aten::exp", 2 * TICK, 3 * TICK, seq=1)
    if labelled:
        trace.forward("block.fc", "Linear", 4 * TICK, 8 * TICK)
    trace.operator("aten::addmm", 5 * TICK, 6 * TICK, seq=2)
    trace.operator("aten::sum", 41 * TICK, 42 * TICK, seq=3)
    trace.node("SumBackward0", 60 * TICK, 61 * TICK, seq=3, thread=1)
    trace.operator("aten::expand", 60 * TICK + 10, 60 * TICK + 20)
    return trace


def run_again(trace: Trace, *, labelled: bool = True) -> None:
    trace.node("AddmmBackward0", 62 * TICK, 90 * TICK, seq=2, thread=1)
    trace.operator("aten::exp", 63 * TICK, 73 * TICK, seq=4)
    if labelled:
        trace.forward("block.fc", "Linear", 74 * TICK, 78 * TICK)
    trace.operator("aten::addmm", 75 * TICK, 76 * TICK, seq=5)
    trace.operator("aten::mm", 85 * TICK, 89 * TICK)  # the node's own work
    trace.node("ExpBackward0", 91 * TICK, 92 * TICK, seq=1, thread=1)
    trace.operator("aten::mul", 91 * TICK + 10, 91 * TICK + 20)


def recomputed(report: Report) -> dict[str, int]:
    return {row.path: row.recompute_ns // TICK for row in report.modules if row.recompute_ns}


def test_it_belongs_to_the_caller_of_the_modules_that_run_again_in_it(locate) -> None:
    trace = checkpointed()
    run_again(trace)
    report = locate(trace)
    assert recomputed(report) == {"block": 11, "block.fc": 4}
    assert report["block.fc"].row.wall_ns == (28 - 11) * TICK


def test_what_the_checkpoint_does_around_it_is_of_its_price(locate) -> None:
    """Until the node's own work; in the forward, until the inputs are kept."""
    costs = []
    for saves in (False, True):
        trace = checkpointed()
        if saves:
            trace.operator("_NoopSaveInputs", 3 * TICK + 5_000, 4 * TICK)
        run_again(trace)
        (found,) = (one for one in locate(trace).findings if one.rule == "recompute")
        costs.append(found.wall_ns)
    assert costs == [(85 - 62) * TICK, (85 - 62 + 1) * TICK]


def test_of_the_callers_of_a_shared_module_it_belongs_to_the_last(locate) -> None:
    trace = checkpointed()
    trace.forward("other", "Block", -9 * TICK, -1 * TICK)
    trace.forward("block.fc", "Linear", -8 * TICK, -2 * TICK)
    run_again(trace)
    assert recomputed(locate(trace)) == {"block": 11, "block.fc": 4}


def test_without_modules_in_it_it_belongs_to_the_node(locate) -> None:
    trace = checkpointed(labelled=False)
    run_again(trace, labelled=False)
    report = locate(trace)
    assert recomputed(report) == {"block": 13}
    assert report["block"].row.wall_ns == 29 * TICK


def test_outside_of_every_module_it_belongs_to_none(locate) -> None:
    trace = Trace()
    trace.operator("aten::exp", 2 * TICK, 3 * TICK, seq=1)
    trace.forward("fc", "Linear", 4 * TICK, 8 * TICK)
    trace.operator("aten::addmm", 5 * TICK, 6 * TICK, seq=2)
    trace.node("SumBackward0", 60 * TICK, 61 * TICK, seq=3, thread=1)
    trace.operator("aten::expand", 60 * TICK + 10, 60 * TICK + 20)
    trace.node("AddmmBackward0", 62 * TICK, 90 * TICK, seq=2, thread=1)
    trace.operator("aten::exp", 63 * TICK, 73 * TICK, seq=4)
    trace.forward("fc", "Linear", 74 * TICK, 78 * TICK)
    trace.node("ExpBackward0", 91 * TICK, 92 * TICK, seq=1, thread=1)
    trace.operator("aten::mul", 91 * TICK + 10, 91 * TICK + 20)
    assert recomputed(locate(trace)) == {"(outside model)": 11, "fc": 4}


def test_operators_of_a_backward_with_create_graph_are_no_recomputation(locate) -> None:
    trace = checkpointed(labelled=False)
    trace.operator("aten::expand", 60 * TICK + 30, 60 * TICK + 40, seq=4)
    for position, seq in enumerate((2, 1)):
        at = (62 + 10 * position) * TICK
        trace.node("MulBackward0", at, at + 5 * TICK, seq=seq, thread=1)
        trace.operator("aten::mul", at + TICK, at + 2 * TICK, seq=10 + position)
    assert recomputed(locate(trace)) == {}


def own_function(*, calls: bool = False, differentiates: bool = False) -> Trace:
    """The backward of a Function of the program's own works with gradients, then without."""
    trace = Trace()
    trace.forward("block", "Block", 1 * TICK, 40 * TICK)
    trace.operator("aten::exp", 2 * TICK, 3 * TICK, seq=1)
    if calls:
        trace.forward("block.fc", "Linear", 4 * TICK, 8 * TICK)
    trace.operator("aten::sum", 41 * TICK, 42 * TICK, seq=3)
    trace.node("SumBackward0", 60 * TICK, 61 * TICK, seq=3, thread=1)
    trace.operator("aten::expand", 60 * TICK + 10, 60 * TICK + 20)
    trace.node("SolveBackward", 62 * TICK, 90 * TICK, seq=1, thread=1)
    trace.operator("aten::exp", 63 * TICK, 73 * TICK, seq=4)
    if calls:
        trace.forward("block.fc", "Linear", 74 * TICK, 78 * TICK)
    if differentiates:
        trace.node("ExpBackward0", 80 * TICK, 84 * TICK, seq=4, thread=1)
        trace.operator("aten::mul", 81 * TICK, 83 * TICK)
    trace.operator("aten::mm", 85 * TICK, 89 * TICK)
    return trace


def test_what_a_function_differentiates_in_its_backward_is_its_own_work(locate) -> None:
    assert recomputed(locate(own_function(differentiates=True))) == {}


def test_what_runs_again_in_a_function_without_a_node_is_recomputation(locate) -> None:
    """It asks first for what a checkpoint has not kept."""
    assert sum(recomputed(locate(own_function())).values()) == 10


def test_a_function_in_a_checkpointed_module_is_run_again_with_it(locate) -> None:
    assert recomputed(locate(own_function(calls=True))) == {"block": 11, "block.fc": 4}
