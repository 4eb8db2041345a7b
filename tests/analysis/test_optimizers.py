"""What runs in an optimizer's step is the optimizer's, compiled or not; a closure in it is not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import backspot
from backspot.trace.compiled import KEY, Compilation, format_compiled
from support.phased import HOST, STEP, TICK, busy, report_of, step, ticks
from support.sums import assert_adds_up
from support.synthetic import Trace

DATA = Path(__file__).parents[1] / "data" / "optimizers"
REGION = "Torch-Compiled Region: 1/0"


@pytest.fixture(scope="module")
def recorded():
    return {
        name: backspot.locate(DATA / f"{name}.trace.json.gz")
        for name in (path.name.partition(".")[0] for path in sorted(DATA.iterdir()))
    }


def lasting(name, begins):
    """How long the outermost events of a recording last whose names begin so, in nanoseconds."""
    with gzip.open(DATA / f"{name}.trace.json.gz") as file:
        events = [one for one in json.load(file)["traceEvents"] if one.get("ph") == "X"]
    found = sorted((one for one in events if one["name"].startswith(begins)), key=lambda e: e["ts"])
    spent, until = 0.0, 0.0
    for one in found:
        if one["ts"] >= until:
            spent, until = spent + one["dur"], one["ts"] + one["dur"]
    return 1000 * spent


def phase(report, name):
    return sum(ns for one in report.phases if one.name == name for ns in one.wall_ns_by_step)


# Recordings on a CPU ------------------------------------------------------------------------------


def test_compiled_functions_that_an_optimizer_calls_are_the_optimizers(recorded):
    report = recorded["muon"]
    spent = lasting("muon", "Optimizer.step#")
    assert phase(report, "optimizer") > 0.95 * spent
    assert phase(report, "optimizer") > 0.8 * sum(report.step_ns_by_step)


def test_a_compiled_step_is_the_optimizers_with_all_regions_inside(recorded):
    for name, region in (("compiled_step", "0/0"), ("compiled_step_in_one_graph", "1/0")):
        spent = lasting(name, f"Torch-Compiled Region: {region}")
        assert phase(recorded[name], "optimizer") > 0.95 * spent > 0, name


def test_a_closure_in_a_step_stays_forward_and_backward(recorded):
    report = recorded["closure"]
    assert len(report.passes) == 6
    assert phase(report, "forward") >= 0.95 * lasting("closure", "Torch-Compiled Region: 0/0")
    assert 0 < phase(report, "backward") < phase(report, "forward")
    rest = sum(report.step_ns_by_step) - phase(report, "forward") - phase(report, "backward")
    assert phase(report, "optimizer") + phase(report, "zero_grad") > 0.5 * rest


def test_an_update_in_a_compiled_function_is_no_forward_and_has_its_name(recorded):
    report = recorded["update_by_hand"]
    spent = lasting("update_by_hand", "Torch-Compiled Region: ")
    assert phase(report, "other") > 0.95 * spent
    assert phase(report, "forward") < 0.2 * spent


@pytest.mark.parametrize(
    "name",
    ["muon", "compiled_step", "compiled_step_in_one_graph", "update_by_hand", "closure"],
)
def test_no_hook_is_missed_of_what_is_no_module(name, recorded):
    assert not [line for line in recorded[name].warnings if "no module's label" in line]
    assert not [line for line in recorded[name].warnings if "inside compiled code" in line]
    assert_adds_up(recorded[name])


def test_a_compiled_loss_has_the_name_of_its_function(recorded):
    report = recorded["compiled_step_in_one_graph"]
    assert "compiled function mse_loss()" in [module.path for module in report.modules]
    assert phase(report, "loss") > phase(report, "forward")


# Made by hand, also with a device -----------------------------------------------------------------


def compiled(trace, *regions, optimizer=(), function="update"):
    """A table in which Dynamo met an optimizer in some regions."""
    table = [Compilation(one, function, "train.py", 3, "", one in optimizer) for one in regions]
    trace.metadata = {KEY: json.loads(format_compiled((), compilations=table))}


def region(trace, start, end, name=REGION, kernel=True):
    trace.operator(name, int(start * TICK), int(end * TICK))
    if kernel:
        trace.kernel(
            int((start + 1) * TICK), int(end * TICK), launch=int((start + 0.5) * TICK),
            launch_thread=HOST, name="triton_poi_fused_add_0",
        )  # fmt: skip


def test_kernels_of_a_compiled_function_in_a_step_are_the_optimizers_on_a_device():
    trace = Trace()
    step(trace)
    region(trace, 71, 79)
    found = report_of(trace)
    assert busy(found)["optimizer"] == 7
    assert "forward" not in busy(found)
    assert not [module for module in found.modules if module.path.startswith("Torch-Compiled")]
    assert not [line for line in found.warnings if "hooks were compiled away" in line]
    assert_adds_up(found)


def test_a_region_outside_of_all_marks_is_a_module_without_a_label_as_ever():
    trace = Trace()
    step(trace)
    region(trace, 25, 35, name="Torch-Compiled Region: 0/0", kernel=False)  # in the model
    region(trace, 12, 18, kernel=False)
    assert [line for line in report_of(trace).warnings if "1 compiled region has" in line]


@pytest.mark.parametrize("met", [True, False])
def test_a_compiled_step_without_a_mark_is_told_by_the_table(met):
    trace = Trace()
    step(trace)
    region(trace, 82, 89)
    compiled(trace, "1/0", optimizer=["1/0"] if met else ())
    found = busy(report_of(trace))
    # Without the table's word for it, it is the work of a function, and still no forward.
    assert found == ({"optimizer": 6} if met else {"other": 6})


def test_a_region_that_makes_nodes_is_no_step_although_dynamo_met_an_optimizer_there():
    trace = Trace()
    step(trace)
    region(trace, 12, 18, kernel=False)  # zeroes gradients: the next number is that of the forward
    step(trace, at=100)
    trace.operator("aten::mul", 113 * TICK, 114 * TICK, seq=198)
    region(trace, 112, 118, kernel=False)  # and the beginning of the forward
    compiled(trace, "1/0", optimizer=["1/0"], function="train")
    found = ticks(report_of(trace))
    assert found["optimizer"] == 2 * STEP["optimizer"] + 6
    assert found["forward"] == 2 * STEP["forward"] + 6 + 2


def test_a_closures_model_is_forward_and_what_follows_its_backward_the_optimizers():
    trace = Trace()
    trace.annotation("ProfilerStep#0", 0, 100 * TICK)
    trace.annotation("Optimizer.step#LBFGS.step", 10 * TICK, 90 * TICK)
    region(trace, 20, 40, kernel=False)
    trace.operator("CompiledFunction", 21 * TICK, 39 * TICK, seq=7)
    trace.node("CompiledFunctionBackward", 50 * TICK, 60 * TICK, seq=7, thread=HOST)
    region(trace, 70, 80, name="Torch-Compiled Region: 2/0", kernel=False)
    found = ticks(report_of(trace))
    assert (found["forward"], found["backward"], found["optimizer"]) == (20, 10, 30)
