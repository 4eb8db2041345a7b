"""Passes and steps that were recorded in part are left out of all numbers, and mentioned once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import backspot
from backspot import Report
from backspot.pipeline import save_labelled
from backspot.render.json import to_json
from support import h200
from support.choice import slow_except
from support.phased import HOST, TICK, operator, report_of, step, ticks
from support.sums import assert_adds_up
from support.synthetic import Trace

torch = pytest.importorskip("torch")

UNRECORDED = "(forward not recorded)"


def loop(count: int, *, marked: bool = True, split: bool = False) -> Trace:
    """Steps of a hundred ticks, each with a kernel in its pass.

    Args:
        count: how many.
        marked: whether the profiler marks them.
        split: whether the marks begin between forward and backward, as Lightning's.
    """
    trace = Trace()
    for at in range(0, 100 * count, 100):
        step(trace, at, marked=marked and not split)
        if split:
            trace.annotation(f"ProfilerStep#{at}", (at + 45) * TICK, (at + 145) * TICK)
        launch = (at + 52) * TICK
        trace.kernel(launch + TICK, launch + 30 * TICK, launch=launch, launch_thread=HOST)
    return trace


def recorded(trace: Trace, begin: float = 0, end: float = 10_000) -> Trace:
    """Keep what begins and ends within a recording; the device's work needs its launch only."""
    low, high = begin * TICK / 1000, end * TICK / 1000
    host = [e for e in trace.events if e["cat"] != "kernel"]
    kept = [e for e in host if e["ts"] >= low and e["ts"] + e["dur"] <= high]
    launched = {e["args"].get("correlation") for e in kept} - {None}
    work = [e for e in trace.events if e["cat"] == "kernel"]
    trace.events = kept + [e for e in work if e["args"]["correlation"] in launched]
    return trace


def left_out(report: Report) -> list[str]:
    return [warning for warning in report.warnings if "left out" in warning]


def costs_in(report: backspot.Report) -> tuple[backspot.Row, ...]:
    """The rows without their savings, which also depend on what was recorded around the steps."""
    return tuple(replace(row, saves=None, total_saves=None) for row in report.modules)


def rows_of_whole_steps(count: int) -> tuple[backspot.Row, ...]:
    return costs_in(report_of(loop(count)))


# The beginning of a recording --------------------------------------------------------------------


def test_a_profiler_that_steps_between_forward_and_backward_gives_whole_steps() -> None:
    report = report_of(recorded(loop(4, split=True), 45, 345))
    assert costs_in(report) == rows_of_whole_steps(2)
    assert report.step_unit == "optimizer step"
    # From update to update; the first begins with what follows the update of the step before.
    assert report.step_ns_by_step == (92 * TICK, 100 * TICK)
    whole = ticks(report_of(loop(2)))
    assert {k: v for k, v in ticks(report).items() if k != "idle"} == {
        k: v for k, v in whole.items() if k != "idle"
    }
    assert_adds_up(report)
    assert left_out(report) == [
        "1 of 3 backward passes was recorded without its forward, the last forward was recorded "
        "without its backward: all of these are left out."
    ]
    assert report.warnings == tuple(left_out(report))


def test_an_optimizers_closure_with_forward_and_backward_is_one_step() -> None:
    trace = Trace()
    for at in range(0, 400, 100):
        trace.annotation(f"ProfilerStep#{at}", (at + 45) * TICK, (at + 145) * TICK)
        trace.annotation("enumerate(DataLoader)#Iter", (at + 2) * TICK, (at + 10) * TICK)
        trace.annotation("Optimizer.step#SGD.step", (at + 15) * TICK, (at + 80) * TICK)
        trace.forward("", "Model", (at + 20) * TICK, (at + 40) * TICK)
        operator(trace, "aten::mul", at + 22, at + 24, seq=2 * at)
        operator(trace, "aten::sum", at + 26, at + 28, seq=2 * at + 1)
        operator(trace, "aten::div", at + 46, at + 47, seq=2 * at + 2)  # behind the mark
        trace.node("DivBackward0", (at + 49) * TICK, (at + 50) * TICK, seq=2 * at + 2, thread=HOST)
        trace.node("SumBackward0", (at + 50) * TICK, (at + 51) * TICK, seq=2 * at + 1, thread=HOST)
        trace.node("MulBackward0", (at + 51) * TICK, (at + 60) * TICK, seq=2 * at, thread=HOST)
        operator(trace, "aten::add_", at + 70, at + 75)
    report = report_of(recorded(trace, 45, 345))
    # The first optimizer step's mark began before the recording; the next step begins with its
    # batch, at 102.
    assert report.step_ns_by_step == (78 * TICK, 100 * TICK)
    assert "1 of 3 backward passes was recorded without its forward" in report.warnings[0]
    assert UNRECORDED not in {row.path for row in report.modules}
    assert_adds_up(report)


def test_a_recording_that_begins_after_a_forward_counts_from_the_next_step() -> None:
    report = report_of(recorded(loop(3, marked=False), 45))
    assert costs_in(report) == rows_of_whole_steps(2)
    assert report.step_ns_by_step == (92 * TICK, 100 * TICK)
    assert report.warnings == (
        "1 of 3 backward passes was recorded without its forward and is left out.",
    )
    assert_adds_up(report)


def test_a_recording_that_begins_within_a_forward_counts_from_the_next_step() -> None:
    report = report_of(recorded(loop(3, marked=False), 23))
    assert costs_in(report) == rows_of_whole_steps(2)
    assert len(left_out(report)) == 1


def test_a_pass_before_the_first_mark_takes_no_marked_step_with_it() -> None:
    report = report_of(recorded(loop(3), 45))
    assert costs_in(report) == rows_of_whole_steps(2)
    assert report.step_unit == "profiler step"
    assert report.step_ns_by_step == (100 * TICK, 100 * TICK)
    assert len(left_out(report)) == 1


def test_a_step_of_several_passes_is_left_out_as_a_whole() -> None:
    def accumulating(start: int, count: int) -> Trace:
        trace = Trace()
        for at in range(start, start + 200 * count, 100):
            step(trace, at, marked=False)
            if at % 200 == 0:  # the second pass of two ends the step
                trace.events = [
                    e
                    for e in trace.events
                    if not (e["name"].startswith("Optimizer.step") and e["ts"] * 1000 > at * TICK)
                ]
        return trace

    report = report_of(recorded(accumulating(0, 3), 45))
    assert costs_in(report) == costs_in(report_of(accumulating(200, 2)))
    assert [one.step for one in report.passes] == [0, 0, 1, 1]
    assert left_out(report) == [
        "1 of 6 backward passes was recorded without its forward, 1 of 6 backward passes belongs "
        "to a step recorded in part: all of these are left out."
    ]


def test_work_of_a_pass_that_is_left_out_counts_nowhere_although_it_still_runs() -> None:
    trace = loop(3, split=True)
    late = 51 * TICK
    trace.kernel(90 * TICK, 156 * TICK, launch=late, launch_thread=HOST, name="late")
    report = report_of(recorded(trace, 45))
    names = {kernel.name for row in report.modules for kernel in row.kernels}
    assert names == {"kernel"}
    assert report.step_ns_by_step[0] < 100 * TICK  # it begins when the work of before is done
    assert not any("launch record" in warning for warning in report.warnings)
    assert_adds_up(report)


# The end of a recording --------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [True, False])
def test_a_pass_that_the_recordings_end_cuts_off_is_left_out(marked: bool) -> None:
    report = report_of(recorded(loop(3, marked=marked), 0, 251))
    assert costs_in(report) == rows_of_whole_steps(2)
    assert report.steps == 2
    assert report.warnings == (
        "1 of 3 backward passes was cut off by the end of the recording and is left out.",
    )
    assert_adds_up(report)


def test_a_pass_that_lacks_its_last_kernels_is_left_out() -> None:
    trace = loop(3)
    trace.events = [e for e in trace.events if e["cat"] != "kernel" or e["ts"] * 1000 < 200 * TICK]
    report = report_of(trace)
    assert costs_in(report) == rows_of_whole_steps(2)
    assert "cut off by the end of the recording" in left_out(report)[0]


def test_the_mark_of_a_step_without_its_pass_is_left_out() -> None:
    report = report_of(recorded_with_a_lone_forward())
    assert costs_in(report) == rows_of_whole_steps(2)
    assert report.warnings == (
        "The last forward was recorded without its backward and is left out.",
    )


def recorded_with_a_lone_forward() -> Trace:
    trace = recorded(loop(3), 0, 249)
    trace.annotation("ProfilerStep#200", 200 * TICK, 249 * TICK)
    return trace


def test_a_last_step_with_too_few_passes_and_no_update_is_left_out() -> None:
    trace = Trace()
    for at in range(0, 500, 100):
        step(trace, at, marked=False)
    firsts = [70 * TICK, 270 * TICK, 470 * TICK]
    trace.events = [
        e
        for e in trace.events
        if not (e["name"].startswith("Optimizer.step") and round(e["ts"] * 1000) in firsts)
    ]
    report = report_of(trace)
    assert [one.step for one in report.passes] == [0, 0, 1, 1]
    assert left_out(report) == [
        "1 of 5 backward passes belongs to a step recorded in part and is left out."
    ]


# What is whole -----------------------------------------------------------------------------------


def test_a_trace_with_a_single_pass_is_never_emptied() -> None:
    report = report_of(recorded(loop(1), 45))
    assert {row.path for row in report.modules if sum(row.wall_ns_by_step)} >= {UNRECORDED}
    assert not left_out(report)
    assert any("no forward operator in the trace" in warning for warning in report.warnings)


def test_a_profiler_that_steps_after_the_forward_is_asked_for_more_steps() -> None:
    (warning,) = report_of(recorded(loop(2, split=True), 45, 145)).warnings
    assert "record two steps or more at a time" in warning
    assert "start the profiler" not in warning


def test_passes_through_one_old_graph_are_all_kept() -> None:
    trace = Trace()
    for at in (0, 100, 200):
        trace.node("MulBackward0", (at + 50) * TICK, (at + 60) * TICK, seq=3, thread=HOST)
        operator(trace, "aten::add_", at + 70, at + 71)
    assert len(report_of(trace).passes) == 3


def test_an_old_graph_that_every_pass_goes_through_makes_no_pass_partial() -> None:
    trace = Trace()
    for at in (100, 200, 300):
        operator(trace, "aten::mul", at, at + 10, seq=at)
        trace.node("MulBackward0", (at + 50) * TICK, (at + 55) * TICK, seq=at, thread=HOST)
        trace.node("ExpBackward0", (at + 56) * TICK, (at + 60) * TICK, seq=3, thread=HOST)
    report = report_of(trace)
    assert len(report.passes) == 3
    assert not left_out(report)


def test_a_second_backward_through_a_retained_graph_is_whole() -> None:
    trace = loop(2, marked=False)
    trace.node("SumBackward0", 190 * TICK + 5 * TICK, 196 * TICK, seq=201, thread=HOST)
    trace.node("MulBackward0", 196 * TICK, 199 * TICK, seq=200, thread=HOST)
    report = report_of(trace)
    assert len(report.passes) == 3
    assert not left_out(report)


def test_a_forward_without_labels_is_not_a_forward_that_was_not_recorded() -> None:
    trace = Trace()
    for at in (0, 100):
        operator(trace, "aten::mul", at, at + 10, seq=at)
        trace.node("MulBackward0", (at + 50) * TICK, (at + 60) * TICK, seq=at, thread=HOST)
    assert not left_out(report_of(trace))


# An evaluation after the training -----------------------------------------------------------------


@pytest.mark.parametrize(("marked", "has_mark"), [(True, True), (True, False), (False, False)])
def test_an_evaluation_after_the_last_step_counts_nowhere(marked: bool, has_mark: bool) -> None:
    trace = loop(2, marked=marked)
    if has_mark:
        trace.annotation("ProfilerStep#200", 200 * TICK, 360 * TICK)
    for at in (200, 250, 300):
        trace.forward("", "Model", (at + 20) * TICK, (at + 40) * TICK)
        operator(trace, "aten::mul", at + 22, at + 24)
        operator(trace, "aten::sum", at + 32, at + 34)
        operator(trace, "aten::item", at + 41, at + 45)
    report = report_of(trace)
    assert not left_out(report)
    assert [row.calls for row in report.modules if row.class_name == "Model"] == [1]
    without = report_of(loop(2, marked=marked))
    assert costs_in(report) == costs_in(without)
    assert report.phases == without.phases
    assert_adds_up(report)


def test_an_evaluation_of_another_model_counts_nowhere() -> None:
    trace = loop(2)
    for at in (200, 250):
        trace.forward("averaged", "Averaged", (at + 20) * TICK, (at + 40) * TICK)
    report = report_of(trace)
    assert sum(row.calls for row in report.modules if row.class_name == "Averaged") == 0


def test_a_pass_outside_of_all_marks_stays_though_an_evaluation_follows() -> None:
    trace = loop(1)
    step(trace, 100, marked=False)
    trace.forward("", "Model", 220 * TICK, 240 * TICK)
    assert len(report_of(trace).passes) == 2


def test_what_is_called_behind_each_update_is_a_part_of_its_step() -> None:
    trace = loop(3, marked=False)
    for at in (0, 100, 200):
        trace.forward("metric", "Accuracy", (at + 82) * TICK, (at + 86) * TICK)
    report = report_of(trace)
    assert [row.calls for row in report.modules if row.class_name == "Accuracy"] == [1]


def with_evaluation(trace: dict[str, Any], times: int = 3) -> dict[str, Any]:
    """A trace of a GPU in which the first forward runs again after the end, without gradients.

    Args:
        trace: with the times of ``h200.Plain``.
        times: how often.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    nodes = [one for one in events if one["name"].startswith(h200.EVALUATE)]
    first, end = min(one["start"] for one in nodes), max(one["end"] for one in events)
    work = [one for one in events if one["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    forward = [
        one
        for one in events
        if one["end"] <= first
        and one["cat"] in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
        and not one["name"].startswith("ProfilerStep")
    ]
    launched = {one.get("args", {}).get("correlation") for one in forward} - {None}
    forward += [one for one in work if one["args"].get("correlation") in launched]
    again = []
    for time in range(1, times + 1):
        shift = (end + (time - 1) * first) / 1_000 + time * 1_000  # microseconds
        for one in forward:
            args = {k: v for k, v in one.get("args", {}).items() if k not in _OF_GRADIENTS}
            args |= {key: args[key] + time * 10**7 for key in _NUMBERS if key in args}
            again.append({**one, "ts": one["ts"] + shift, "args": args})
    return {**trace, "traceEvents": [*trace["traceEvents"], *again]}


_OF_GRADIENTS = ("Sequence number", "Fwd thread id", "Ev Idx")
_NUMBERS = ("correlation", "External id")


# Behind the last step of python_stack are frames of the profiler, which weigh 152 of 2,353,623 ns.
OF_STEPS = tuple(name for name in h200.WITH_BACKWARD if name != "python_stack")


@pytest.mark.parametrize("name", slow_except(h200.QUICK, OF_STEPS))
def test_an_evaluation_on_a_gpu_changes_no_number(name: str, tmp_path: Path) -> None:
    document = h200.plain_of(name).document
    # The profiler waits for the device at the end; there, an evaluation would be in between.
    waits = [one for one in document["traceEvents"] if one["name"] == "cudaDeviceSynchronize"]
    last = max(waits, key=lambda one: float(one["ts"]), default=None)
    events = [one for one in document["traceEvents"] if one is not last]
    trace = {**document, "traceEvents": events}
    path, reports = tmp_path / "trace.json", []
    for content in (trace, with_evaluation(trace)):
        path.write_text(json.dumps(content), encoding="utf-8")
        reports.append(json.loads(to_json(backspot.locate(path))))
    plain, evaluated = reports
    assert evaluated == plain


# The labelled trace, and real recordings ---------------------------------------------------------


def test_the_labelled_trace_shows_everything(tmp_path: Path) -> None:
    path = recorded(loop(4, split=True), 45, 345).save(tmp_path / "trace.json")
    output = tmp_path / "labelled.json"
    report = backspot.locate(path, trace=output)
    assert len(report.passes) == 2
    shown = [e.get("name") for e in json.loads(output.read_text())["traceEvents"]]
    assert any(UNRECORDED in str(name) for name in shown)
    plain = backspot.locate(path)
    save_labelled(plain, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == output.read_bytes()


class _Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))


def _recorded(path: Path, *, between: bool) -> Report:
    """Record three steps of a loop, whose profiler steps after the forward or after the update."""
    torch.manual_seed(0)
    model = _Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    with (
        backspot.instrument(model),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=schedule,
            on_trace_ready=lambda prof: prof.export_chrome_trace(str(path)),
        ) as prof,
    ):
        for _ in range(7):
            loss = model(torch.randn(4, 8)).square().mean()
            if between:
                prof.step()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not between:
                prof.step()
    return backspot.locate(path)


def test_a_real_recording_that_steps_after_the_forward_agrees_with_one_of_whole_steps(
    tmp_path: Path,
) -> None:
    split = _recorded(tmp_path / "split.json", between=True)
    whole = _recorded(tmp_path / "whole.json", between=False)
    assert (split.steps, whole.steps) == (2, 3)
    assert left_out(split)
    assert not left_out(whole)

    def per_step(report: Report) -> dict[str, dict[str, float]]:
        return {
            row.path: {"calls": row.calls} | {node.name: node.count for node in row.nodes}
            for row in report.modules
        }

    assert per_step(split) == per_step(whole)
    assert_adds_up(split)
