"""Where a step's clock time goes, on traces made by hand and generated ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from backspot import Report
from backspot.render.text import render_text
from backspot.results.findings import ReplayedStep
from support.phased import ENGINE, HOST, STEP, TICK, busy, operator, report_of, step, ticks
from support.sums import assert_adds_up
from support.synthetic import Trace


def test_each_moment_of_a_marked_step_goes_to_one_phase() -> None:
    trace = Trace()
    step(trace)
    report = report_of(trace)
    assert ticks(report) == STEP
    assert [phase.name for phase in report.phases] == list(STEP)
    assert report.step_ns_by_step == (100 * TICK,)
    assert busy(report) == {}
    assert report.utilisation == 0.0


def test_what_still_runs_when_the_next_phase_begins_counts_for_what_launched_it() -> None:
    trace = Trace()
    step(trace)
    trace.kernel(30 * TICK, 55 * TICK, launch=25 * TICK, launch_thread=HOST)
    trace.kernel(55 * TICK, 66 * TICK, launch=53 * TICK, launch_thread=HOST)
    report = report_of(trace)
    assert busy(report) == {"forward": 25, "backward": 11}
    assert ticks(report)["forward"] == 35
    assert ticks(report)["backward"] * TICK == 11 * TICK == report.wall_ns
    assert "loss" not in ticks(report)


def test_what_a_loader_launches_is_other_work_and_no_waiting_for_data() -> None:
    trace = Trace()
    step(trace)
    trace.kernel(8 * TICK, 15 * TICK, launch=6 * TICK, launch_thread=HOST)
    found = ticks(report_of(trace))
    assert (found["data"], found["other"]) == (STEP["data"] - 4, 2 + 7)


def test_copies_to_the_device_are_the_copys_wherever_they_are_launched_but_in_backward() -> None:
    trace = Trace()
    step(trace)
    for start, end, name in (
        (12, 15, "Memcpy HtoD (Pinned -> Device)"),
        (25, 28, "Memcpy HtoD (Pageable -> Device)"),
        (32, 33, "Memcpy DtoD (Device -> Device)"),
        (53, 58, "Memcpy HtoD (Pinned -> Device)"),
    ):
        trace.kernel(
            start * TICK,
            end * TICK,
            launch=start * TICK,
            launch_thread=HOST,
            name=name,
            cat="gpu_memcpy",
        )
    assert busy(report_of(trace)) == {"copy": 6, "forward": 1, "backward": 5}


def test_a_copy_behind_a_kernel_costs_nothing() -> None:
    trace = Trace()
    step(trace)
    trace.kernel(22 * TICK, 35 * TICK, launch=22 * TICK, launch_thread=HOST)
    trace.kernel(
        24 * TICK,
        30 * TICK,
        launch=23 * TICK,
        launch_thread=HOST,
        name="Memcpy HtoD (Pinned -> Device)",
        cat="gpu_memcpy",
        stream=9,
    )
    assert "copy" not in ticks(report_of(trace))


def test_an_optimizer_that_runs_its_own_passes_owns_what_follows_them() -> None:
    trace = Trace()
    trace.annotation("ProfilerStep#1", 0, 100 * TICK)
    trace.annotation("Optimizer.step#LBFGS.step", 5 * TICK, 90 * TICK)
    trace.forward("", "Model", 20 * TICK, 40 * TICK)
    operator(trace, "aten::mul", 22, 24, seq=0)
    operator(trace, "aten::sum", 42, 44, seq=1)
    trace.node("MulBackward0", 50 * TICK, 60 * TICK, seq=0, thread=HOST)
    operator(trace, "aten::add_", 70, 75)
    trace.kernel(30 * TICK, 38 * TICK, launch=25 * TICK, launch_thread=HOST)
    trace.kernel(53 * TICK, 58 * TICK, launch=52 * TICK, launch_thread=HOST)
    report = report_of(trace)
    assert ticks(report) == {
        "forward": 20,
        "loss": 2,
        "backward": 10,
        "optimizer": 30,
        "idle": 38,
    }
    assert busy(report) == {"forward": 8, "backward": 5}


def test_lightnings_actions_are_told_by_their_names() -> None:
    trace = Trace()
    trace.annotation("ProfilerStep#1", 0, 100 * TICK)
    for name, start, end in (
        ("[pl][profile][_TrainingEpochLoop].train_dataloader_next", 1, 8),
        ("[pl][profile][Strategy]SingleDeviceStrategy.batch_to_device", 10, 13),
        ("[pl][profile]run_training_batch", 14, 95),
        ("[pl][profile][LightningModule]Net.optimizer_step", 15, 94),
        ("Optimizer.step#AdamW.step", 16, 93),
        ("[pl][profile][Strategy]SingleDeviceStrategy.training_step", 20, 50),
        ("[pl][module]torch.nn.modules.linear.Linear: encoder", 22, 30),
        ("[pl][module]torch.nn.modules.linear.Linear: head", 33, 40),
        ("[pl][module]torch.nn.modules.loss.CrossEntropyLoss: loss_fn", 42, 46),
        ("[pl][profile][LightningModule]Net.optimizer_zero_grad", 52, 54),
        ("[pl][profile][Strategy]SingleDeviceStrategy.backward", 58, 76),
        ("[pl][profile][LightningModule]Net.configure_gradient_clipping", 78, 80),
    ):
        trace.annotation(name, start * TICK, end * TICK)
    operator(trace, "aten::addmm", 23, 24, seq=0)
    trace.node("AddmmBackward0", 60 * TICK, 75 * TICK, seq=0, thread=HOST)
    assert ticks(report_of(trace)) == {
        "data": 7,
        "copy": 3,
        "forward": 20 + 6,  # what training_step does beside the loss
        "loss": 4,
        "backward": 15,
        "clipping": 2,
        "optimizer": 16,
        "zero_grad": 2,
        "trainer": 95 - 14 - 65,
        "host": 3,
        "idle": 6,
    }


@pytest.mark.parametrize("norm", ["aten::linalg_vector_norm", "aten::norm", "aten::_foreach_norm"])
def test_a_norm_of_gradients_is_clipping_only_where_gradients_change_after_it(norm: str) -> None:
    for then, clips in (("aten::mul_", True), ("aten::_foreach_mul_", True), ("aten::item", False)):
        trace = Trace()
        trace.annotation("ProfilerStep#1", 0, 100 * TICK)
        trace.forward("", "Model", 10 * TICK, 20 * TICK)
        operator(trace, "aten::addmm", 12, 14, seq=0)
        trace.node("AddmmBackward0", 30 * TICK, 40 * TICK, seq=0, thread=HOST)
        operator(trace, norm, 42, 46)
        operator(trace, then, 46, 50)
        trace.annotation("Optimizer.step#AdamW.step", 60 * TICK, 70 * TICK)
        assert ticks(report_of(trace)).get("clipping", 0) == (8 if clips else 0), then


def test_the_host_before_a_copy_is_not_called_waiting_for_data_where_no_loader_is_seen() -> None:
    trace = Trace()
    step(trace, loader=False)
    trace.operator("aten::to", 14 * TICK, 16 * TICK)
    trace.kernel(
        15 * TICK,
        17 * TICK,
        launch=15 * TICK,
        launch_thread=HOST,
        name="Memcpy HtoD (Pinned -> Device)",
        cat="gpu_memcpy",
    )
    report = report_of(trace)
    # But for zero_grad at 10; the operator that copies is the copy's from its start.
    assert ticks(report)["host"] == 13
    assert "data" not in ticks(report)
    assert ticks(report)["copy"] == 3


def test_a_device_that_gets_no_batch_waits_for_none() -> None:
    trace = Trace()
    step(trace, loader=False)
    trace.kernel(22 * TICK, 30 * TICK, launch=22 * TICK, launch_thread=HOST)
    assert "data" not in ticks(report_of(trace))


def test_a_loss_outside_the_model_is_the_loss_and_one_inside_is_the_forward() -> None:
    for path, inside in (("loss", False), ("loss", True)):
        trace = Trace()
        trace.annotation("ProfilerStep#1", 0, 100 * TICK)
        trace.forward("", "Model", 10 * TICK, (40 if inside else 25) * TICK)
        trace.forward(path, "HuberLoss", 30 * TICK, 40 * TICK)
        operator(trace, "aten::huber_loss", 32, 34, seq=0)
        trace.node("HuberLossBackward0", 50 * TICK, 60 * TICK, seq=0, thread=HOST)
        spent = ticks(report_of(trace))
        assert spent["forward"] == (30 if inside else 15)
        assert spent.get("loss", 0) == (0 if inside else 10)


def test_without_labels_the_loss_is_told_by_its_operator() -> None:
    trace = Trace()
    trace.annotation("ProfilerStep#1", 0, 100 * TICK)
    operator(trace, "aten::mul", 10, 12, seq=0)
    operator(trace, "aten::add", 14, 20, seq=1)
    operator(trace, "aten::cross_entropy_loss", 30, 34, seq=2)
    trace.node("MulBackward0", 50 * TICK, 60 * TICK, seq=0, thread=HOST)
    spent = ticks(report_of(trace))
    assert (spent["forward"], spent["loss"], spent["backward"]) == (20, 4, 10)


def test_without_labels_an_operator_before_a_parameter_is_no_loss() -> None:
    trace = Trace()
    trace.annotation("ProfilerStep#1", 0, 100 * TICK)
    operator(trace, "aten::mul", 10, 12, seq=0)
    operator(trace, "BalanceWithAuxiliaryLoss", 14, 16, seq=1)
    operator(trace, "aten::linear", 20, 30, seq=2)
    trace.node("AddmmBackward0", 50 * TICK, 55 * TICK, seq=2, thread=HOST)
    trace.node("torch::autograd::AccumulateGrad", 56 * TICK, 57 * TICK, thread=HOST)
    trace.node("MulBackward0", 58 * TICK, 60 * TICK, seq=0, thread=HOST)
    spent = ticks(report_of(trace))
    assert (spent["forward"], spent.get("loss"), spent["backward"]) == (40, None, 10)


def test_without_labels_what_the_pass_does_not_run_has_no_phase() -> None:
    """As in a pipeline, where the pass after a forward is that of other data."""
    trace = Trace()
    trace.annotation("ProfilerStep#1", 0, 100 * TICK)
    operator(trace, "aten::mul", 10, 12, seq=70)
    operator(trace, "BackwardWithAuxiliaryLoss", 14, 16, seq=71)
    operator(trace, "aten::mul", 16, 40, seq=72)
    trace.node("MulBackward0", 50 * TICK, 60 * TICK, seq=7, thread=HOST)
    report = report_of(trace)
    spent = ticks(report)
    assert spent.keys() == {"other", "backward", "idle"}
    assert (spent["other"], spent["backward"]) == (28, 10)
    text = render_text(report, width=200)
    assert "so this may be forward, loss or anything else" in text


def test_what_two_devices_do_together_counts_once() -> None:
    trace = Trace()
    step(trace)
    for device in (0, 1):
        trace.kernel(
            (52 + device) * TICK,
            (58 + device) * TICK,
            launch=51 * TICK,
            launch_thread=HOST,
            device=device,
            stream=7 + device,
        )
    report = report_of(trace)
    assert busy(report) == {"backward": 7}
    assert ticks(report)["backward"] * TICK == report.wall_ns


# Generated ---------------------------------------------------------------------------------------

KERNELS = st.tuples(
    st.integers(0, 230),
    st.integers(0, 40),
    st.integers(1, 60),
    st.sampled_from(["gemm", "ncclDevKernel_AllReduce", "Memcpy HtoD (Pinned -> Device)"]),
    st.sampled_from([HOST, ENGINE, None]),
    st.integers(0, 1),
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    trace = Trace()
    marked, loader = draw(st.booleans()), draw(st.booleans())
    for number in range(draw(st.integers(1, 2))):
        step(trace, 110 * number, marked=marked, loader=loader)
    for stream, (launch, wait, length, name, thread, device) in enumerate(
        draw(st.lists(KERNELS, max_size=10))
    ):
        trace.kernel(
            (launch + wait) * TICK,
            (launch + wait + length) * TICK,
            launch=None if thread is None else launch * TICK,
            launch_thread=thread or HOST,
            name=name,
            cat="gpu_memcpy" if name.startswith("Memcpy") else "kernel",
            device=device,
            stream=7 + stream,
        )
    return trace


@pytest.mark.slow
@given(traces(), st.randoms(use_true_random=False))
def test_the_phases_sum_to_the_steps_and_no_order_of_events_changes_them(
    trace: Trace, shuffle: random.Random
) -> None:
    report = report_of(trace)
    assert_adds_up(report)
    assert 0.0 <= report.utilisation <= 1.0
    shuffle.shuffle(trace.events)
    assert report_of(trace).phases == report.phases


def test_work_that_starts_at_the_same_moment_is_told_apart_by_its_launch() -> None:
    shares = []
    for reverse in (False, True):
        trace = Trace()
        step(trace)
        # The device idles until both start; the optimizer launched one of them, the loop the other.
        for stream, launch in ((8, 75), (9, 85)):
            trace.kernel(
                95 * TICK, 96 * TICK, launch=launch * TICK, launch_thread=HOST, stream=stream
            )
        if reverse:
            trace.events.reverse()
        shares.append(ticks(report_of(trace)))
    assert shares[0] == shares[1]


@given(traces())
def test_the_backward_phase_is_what_the_rows_are_made_of(trace: Trace) -> None:
    known = [e for e in trace.events if e["cat"] == "cuda_runtime"]
    launched = {e["args"]["correlation"] for e in known}
    trace.events = [e for e in trace.events if e["args"].get("correlation", -1) in {-1, *launched}]
    report = report_of(trace)
    assert ticks(report).get("backward", 0) * TICK == sum(report.wall_ns_by_step)


def test_what_a_loop_does_in_a_moment_is_no_waiting_for_data() -> None:
    trace = Trace()
    step(trace, loader=False)
    trace.kernel(
        TICK // 2,
        TICK,
        launch=TICK // 2,
        launch_thread=HOST,
        name="Memcpy HtoD (Pinned -> Device)",
        cat="gpu_memcpy",
    )
    assert "data" not in ticks(report_of(trace))


def test_idle_time_of_a_cpu_is_called_python_with_what_may_be_the_profilers() -> None:
    trace = Trace()
    step(trace)
    report = report_of(trace)
    idle, recorded = STEP["idle"] * TICK, report.step_ns
    assert "35% idle (Python)" in render_text(report, width=200)
    for real, most in ((recorded - 30 * TICK, 30), (recorded - 60 * TICK, idle // TICK)):
        replayed = ReplayedStep(real, real, real, fitted=False)
        text = render_text(replace(report, replayed_step=replayed), width=200, full=True)
        assert f"up to {most}.0 ms of it may be the profiler's own" in text
    text = render_text(replace(report, clock="real"), width=200, full=True)
    assert "so this is Python and the program's other work" in text
    assert "the profiler's own" not in text


def launched(kernels: int, gap: int) -> Report:
    """A step whose forward launches kernels, each so long after the one before has ended."""
    trace = Trace()
    step(trace)
    for number in range(kernels):
        start = 20 * TICK + number * (gap + 10_000) + gap
        name = ("relu", "gelu", "silu", "tanh", "exp", "log", "abs", "neg")[number % 8]
        operator(trace, f"aten::{name}", (start - 5_000) / TICK, (start - 1_000) / TICK)
        trace.kernel(start, start + 10_000, launch=start - 2_000, launch_thread=HOST)
    trace.kernel(50 * TICK, 60 * TICK, launch=50 * TICK, launch_thread=HOST)
    return report_of(trace)


@pytest.mark.parametrize(("gap", "late"), [(100_000, 149), (300_000, 0)])
def test_launches_that_the_device_waits_for_are_counted_by_phase_and_module(
    gap: int, late: int
) -> None:
    """What lasts longer than a launch can is waiting for something else."""
    report = launched(kernels=150 if late else 60, gap=gap)
    (forward,) = (one for one in report.launches if one.phase == "forward")
    assert forward.class_name == "Model"
    assert (forward.count, forward.late) == (150 if late else 60, late)
    assert forward.idle_ns == late * gap


def test_a_forward_that_waits_for_launches_is_launch_bound_though_its_backward_is_not() -> None:
    (found,) = (one for one in launched(150, 100_000).findings if one.rule == "launch-bound")
    assert found.places[0].class_name == "Model"
    assert "of the forward" in found.seen
    assert "149 of 150 kernels" in found.seen
