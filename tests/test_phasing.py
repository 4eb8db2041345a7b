"""Where a step's clock time goes, on traces made by hand and generated ones."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import backspot
from backspot import Report
from synthetic import Trace

TICK = 1_000_000  # nanoseconds: well above what a clock rounds, and what a loop does in Python
HOST, ENGINE = 1, 2


def report_of(trace: Trace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return backspot.locate(trace.save(Path(folder) / "trace.json"))


def ticks(report: Report) -> dict[str, float]:
    return {phase.name: phase.wall_ns / TICK for phase in report.phases}


def busy(report: Report) -> dict[str, float]:
    return {phase.name: phase.busy_ns / TICK for phase in report.phases if phase.busy_ns}


def operator(trace: Trace, name: str, start: float, end: float, seq: int | None = None) -> None:
    trace.operator(name, int(start * TICK), int(end * TICK), seq=seq)


def step(trace: Trace, at: int = 0, *, marked: bool = True, loader: bool = True) -> None:
    """A hundred ticks: data 2 to 10, forward 20 to 40, loss to 44, backward 50 to 60, …"""
    if marked:
        trace.annotation(f"ProfilerStep#{at}", at * TICK, (at + 100) * TICK)
    if loader:
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        trace.annotation(name, (at + 2) * TICK, (at + 10) * TICK)
        operator(trace, "aten::stack", at + 4, at + 5)
    trace.annotation("Optimizer.zero_grad#SGD.zero_grad", (at + 10) * TICK, (at + 11) * TICK)
    trace.forward("", "Model", (at + 20) * TICK, (at + 40) * TICK)
    operator(trace, "aten::mul", at + 22, at + 24, seq=2 * at)
    operator(trace, "aten::sum", at + 42, at + 43, seq=2 * at + 1)
    operator(trace, "aten::ones_like", at + 43.5, at + 44)
    trace.node("SumBackward0", (at + 50) * TICK, (at + 51) * TICK, seq=2 * at + 1, thread=HOST)
    trace.node("MulBackward0", (at + 51) * TICK, (at + 60) * TICK, seq=2 * at, thread=HOST)
    operator(trace, "aten::_foreach_norm", at + 62, at + 63)
    operator(trace, "aten::mul", at + 64, at + 65)
    trace.annotation("Optimizer.step#SGD.step", (at + 70) * TICK, (at + 80) * TICK)
    operator(trace, "aten::item", at + 90, at + 92)


STEP = {
    "data": 8,
    "forward": 20,
    "loss": 2,
    "backward": 10,
    "optimizer": 1 + 3 + 10,
    "other": 2,
    "idle": 44,
}


def test_each_moment_of_a_marked_step_goes_to_one_phase() -> None:
    trace = Trace()
    step(trace)
    report = report_of(trace)
    assert ticks(report) == STEP
    assert [phase.name for phase in report.phases] == list(STEP)
    assert sum(report.step_ns) == 100 * TICK
    assert busy(report) == {}
    assert report.utilisation == 0.0


def test_the_profilers_own_time_between_two_marks_is_no_steps() -> None:
    trace = Trace()
    step(trace)
    step(trace, 120)
    report = report_of(trace)
    assert report.step_ns == (100 * TICK, 100 * TICK)
    assert ticks(report) == {name: 2 * spent for name, spent in STEP.items()}


def test_without_marks_steps_go_from_optimizer_to_optimizer() -> None:
    trace = Trace()
    step(trace, marked=False)
    step(trace, 100, marked=False)
    report = report_of(trace)
    assert report.step_unit == "optimizer step"
    # The recording begins with the loader; what follows the last optimizer's step is not recorded.
    assert report.step_ns == (78 * TICK, 100 * TICK)
    assert sum(phase.wall_ns for phase in report.phases) == 178 * TICK
    assert ticks(report)["other"] == 2


def test_two_optimizers_of_one_pass_belong_to_one_step() -> None:
    trace = Trace()
    for at in (0, 100):
        step(trace, at, marked=False)
        trace.annotation("Optimizer.step#Adam.step", (at + 84) * TICK, (at + 88) * TICK)
    report = report_of(trace)
    assert report.step_ns == (86 * TICK, 100 * TICK)
    assert ticks(report)["optimizer"] == 2 * (STEP["optimizer"] + 4)


def test_without_an_optimizer_a_step_is_a_pass_with_its_forward() -> None:
    trace = Trace()
    for at in (0, 100):
        trace.forward("", "Model", (at + 20) * TICK, (at + 40) * TICK)
        operator(trace, "aten::mul", at + 22, at + 24, seq=at)
        trace.node("MulBackward0", (at + 50) * TICK, (at + 60) * TICK, seq=at, thread=HOST)
    report = report_of(trace)
    assert report.step_unit == "backward pass"
    assert report.step_ns == (40 * TICK, 40 * TICK)
    assert ticks(report) == {"forward": 40, "backward": 20, "idle": 20}


def test_backward_passes_alone_tell_nothing_of_a_step() -> None:
    trace = Trace()
    trace.node("MulBackward0", 10 * TICK, 20 * TICK, seq=0)
    report = report_of(trace)
    assert report.phases == ()
    assert report.step_ns == (10 * TICK,)
    assert report.utilisation == 0.0


def test_a_step_lasts_until_the_device_is_done_and_the_next_begins_no_earlier() -> None:
    trace = Trace()
    for at in (0, 100):
        step(trace, at)
        trace.kernel(
            (at + 75) * TICK, (at + 110) * TICK, launch=(at + 72) * TICK, launch_thread=HOST
        )
    report = report_of(trace)
    assert report.step_ns == (110 * TICK, 100 * TICK)
    # From 72 the kernel waits, from 75 it runs; the second step's batch comes meanwhile.
    assert ticks(report)["optimizer"] == 2 * (1 + 3 + 2 + 38)
    assert ticks(report)["data"] == 8
    assert busy(report) == {"optimizer": 70}


def left_over_and_a_step(*, launch: int) -> Trace:
    """Two kernels of before the recording run into it, one behind the other; then one of a step."""
    trace = Trace()
    step(trace, 100)
    trace.kernel(90 * TICK, 120 * TICK, launch=None)
    trace.kernel(120 * TICK, 130 * TICK, launch=None)
    trace.kernel(165 * TICK, 166 * TICK, launch=launch * TICK, launch_thread=HOST)
    return trace


def test_the_first_step_begins_when_what_was_launched_before_the_recording_is_done() -> None:
    by_forward = report_of(left_over_and_a_step(launch=125))
    by_backward = report_of(left_over_and_a_step(launch=155))
    assert by_forward.step_ns == by_backward.step_ns == (70 * TICK,)
    assert "data" not in ticks(by_backward)


def test_work_without_a_launch_record_that_a_pass_may_have_launched_is_the_steps() -> None:
    trace = Trace()
    step(trace)
    trace.kernel(55 * TICK, 65 * TICK, launch=None)
    trace.kernel(75 * TICK, 76 * TICK, launch=72 * TICK, launch_thread=HOST)
    trace.kernel(15 * TICK, 30 * TICK, launch=None, stream=8)  # nothing in its queue tells
    assert report_of(trace).step_ns == (100 * TICK,)


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
        "optimizer": 2 + 18,
        "idle": 25,
    }


def test_what_is_fetched_by_no_marked_loader_is_waited_for_until_it_is_copied() -> None:
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
    assert ticks(report)["data"] == 13
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


def test_what_is_left_on_one_device_takes_nothing_of_a_backward_on_another() -> None:
    trace = Trace()
    step(trace)
    step(trace, 110)
    trace.kernel(101 * TICK, 165 * TICK, launch=100 * TICK, launch_thread=HOST)
    trace.kernel(161 * TICK, 162 * TICK, launch=160 * TICK, launch_thread=HOST, device=1, stream=8)
    report = report_of(trace)
    assert report.step_ns == (100 * TICK, 50 * TICK)
    # But for what runs on the other device while this one has nothing to run.
    assert ticks(report)["backward"] * TICK == report.wall_ns == 16 * TICK


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


@settings(deadline=None, max_examples=40)
@given(traces(), st.randoms(use_true_random=False))
def test_the_phases_sum_to_the_steps_and_no_order_of_events_changes_them(
    trace: Trace, shuffle: random.Random
) -> None:
    report = report_of(trace)
    assert sum(phase.wall_ns for phase in report.phases) == sum(report.step_ns)
    assert all(0 <= phase.busy_ns <= phase.wall_ns for phase in report.phases)
    assert 0.0 <= report.utilisation <= 1.0
    shuffle.shuffle(trace.events)
    assert report_of(trace).phases == report.phases


@settings(deadline=None, max_examples=40)
@given(traces())
def test_the_backward_phase_is_what_the_rows_are_made_of(trace: Trace) -> None:
    known = [e for e in trace.events if e["cat"] == "cuda_runtime"]
    launched = {e["args"]["correlation"] for e in known}
    trace.events = [e for e in trace.events if e["args"].get("correlation", -1) in {-1, *launched}]
    report = report_of(trace)
    assert ticks(report).get("backward", 0) * TICK == report.wall_ns


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
