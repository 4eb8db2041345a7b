"""When a step begins and ends, on traces made by hand."""

from __future__ import annotations

import pytest

from support.phased import HOST, STEP, TICK, busy, operator, report_of, step, ticks
from support.sums import assert_adds_up
from support.synthetic import Trace


def test_the_profilers_own_time_between_two_marks_is_no_steps() -> None:
    trace = Trace()
    step(trace)
    step(trace, 120)
    report = report_of(trace)
    assert report.step_ns_by_step == (100 * TICK, 100 * TICK)
    assert ticks(report) == {name: 2 * spent for name, spent in STEP.items()}


def test_without_marks_steps_go_from_optimizer_to_optimizer() -> None:
    trace = Trace()
    step(trace, marked=False)
    step(trace, 100, marked=False)
    report = report_of(trace)
    assert report.step_unit == "optimizer step"
    # The recording begins with the loader; what follows the last optimizer's step is not recorded.
    assert report.step_ns_by_step == (78 * TICK, 100 * TICK)
    assert sum(ticks(report).values()) == 178
    assert_adds_up(report)
    assert ticks(report)["metrics"] == 2


def test_two_optimizers_of_one_pass_belong_to_one_step() -> None:
    trace = Trace()
    for at in (0, 100):
        step(trace, at, marked=False)
        trace.annotation("Optimizer.step#Adam.step", (at + 84) * TICK, (at + 88) * TICK)
    report = report_of(trace)
    assert report.step_ns_by_step == (86 * TICK, 100 * TICK)
    assert ticks(report)["optimizer"] == 2 * (STEP["optimizer"] + 4)


def test_without_an_optimizer_a_step_is_a_pass_with_its_forward() -> None:
    trace = Trace()
    for at in (0, 100):
        trace.forward("", "Model", (at + 20) * TICK, (at + 40) * TICK)
        operator(trace, "aten::mul", at + 22, at + 24, seq=at)
        trace.node("MulBackward0", (at + 50) * TICK, (at + 60) * TICK, seq=at, thread=HOST)
    report = report_of(trace)
    assert report.step_unit == "backward pass"
    assert report.step_ns_by_step == (40 * TICK, 40 * TICK)
    assert ticks(report) == {"forward": 40, "backward": 20, "idle": 20}


def test_backward_passes_alone_tell_nothing_of_a_step() -> None:
    trace = Trace()
    trace.node("MulBackward0", 10 * TICK, 20 * TICK, seq=0)
    report = report_of(trace)
    assert report.phases == ()
    assert report.step_ns_by_step == (10 * TICK,)
    assert report.utilisation == 0.0


def test_a_step_lasts_until_the_device_is_done_and_the_next_begins_no_earlier() -> None:
    trace = Trace()
    for at in (0, 100):
        step(trace, at)
        trace.kernel(
            (at + 75) * TICK, (at + 110) * TICK, launch=(at + 72) * TICK, launch_thread=HOST
        )
    report = report_of(trace)
    assert report.step_ns_by_step == (110 * TICK, 100 * TICK)
    # From 72 the kernel waits, from 75 it runs; the second step's batch comes meanwhile.
    assert ticks(report)["optimizer"] == 2 * (2 + 38)
    assert ticks(report)["data"] == 8
    assert busy(report) == {"optimizer": 35}
    assert_adds_up(report)


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
    assert by_forward.step_ns_by_step == by_backward.step_ns_by_step == (70 * TICK,)
    assert "data" not in ticks(by_backward)


def test_work_without_a_launch_record_that_a_pass_may_have_launched_is_the_steps() -> None:
    trace = Trace()
    step(trace)
    trace.kernel(55 * TICK, 65 * TICK, launch=None)
    trace.kernel(75 * TICK, 76 * TICK, launch=72 * TICK, launch_thread=HOST)
    trace.kernel(15 * TICK, 30 * TICK, launch=None, stream=8)  # nothing in its queue tells
    assert report_of(trace).step_ns_by_step == (100 * TICK,)


def test_an_exchange_that_the_next_backward_overtakes_is_still_the_step_before() -> None:
    trace = Trace()
    step(trace)
    step(trace, 110)
    exchange = {"launch_thread": HOST, "name": "ncclDevKernel_AllReduce"}
    trace.kernel(90 * TICK, 165 * TICK, launch=72 * TICK, **exchange)
    trace.kernel(161 * TICK, 162 * TICK, launch=161 * TICK, launch_thread=HOST, stream=8)
    report = report_of(trace)
    assert report.step_ns_by_step == (165 * TICK, 45 * TICK)


@pytest.mark.parametrize("beside", [{"device": 1}, {"name": "ncclDevKernel_AllReduce"}])
def test_work_from_between_two_steps_takes_nothing_of_a_backward_beside_it(beside) -> None:
    trace = Trace()
    step(trace)
    step(trace, 110)
    trace.kernel(101 * TICK, 161 * TICK, launch=100 * TICK, launch_thread=HOST, **beside)
    trace.kernel(160 * TICK, 162 * TICK, launch=160 * TICK, launch_thread=HOST, stream=8)
    report = report_of(trace)
    assert report.step_ns_by_step == (100 * TICK, 50 * TICK)
    assert ticks(report)["backward"] * TICK == sum(report.wall_ns_by_step) == 20 * TICK
