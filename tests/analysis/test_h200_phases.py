"""Where the steps recorded on real GPUs spend their time."""

from __future__ import annotations

import pytest

from backspot import Report, pipeline
from backspot.analysis.recording import Options, Recording
from backspot.formatting import duration
from backspot.render.text import render_text
from support.h200 import (
    EACH_WITH_BACKWARD,
    clipped,
    length,
    path_of,
    plain_of,
    report_of,
    spans_of,
)
from support.sums import assert_phases_add_up, usual


def spent(report: Report, name: str) -> int:
    return sum(sum(phase.wall_ns_by_step) for phase in report.phases if phase.name == name)


def extents(name: str) -> list[tuple[int, int]]:
    """The steps by hand: both ends are when all is done that was launched before the mark's."""
    plain = plain_of(name)

    def done(time: int) -> int:
        return max([time, *(work.end for work in plain.work if work.launch < time)])

    return [(done(mark["start"]), done(mark["end"])) for mark in plain.named("ProfilerStep#")]


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_the_phases_sum_to_the_steps_as_read_by_hand(name: str) -> None:
    report = report_of(name)
    assert report.step_ns_by_step == tuple(end - start for start, end in extents(name))
    assert_phases_add_up(report)


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_the_backward_phase_is_the_rows_wall_time(name: str) -> None:
    report = report_of(name)
    (backward,) = (phase for phase in report.phases if phase.name == "backward")
    assert backward.wall_ns_by_step == report.wall_ns_by_step
    assert backward.wall_ns == report.wall_ns


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_the_gpus_are_as_busy_as_their_kernels_say(name: str) -> None:
    report = report_of(name)
    running = spans_of(plain_of(name).work)
    by_hand = [length(clipped(running, window)) for window in extents(name)]
    busy = sum(phase.busy_ns for phase in report.phases)
    assert busy == usual(report, by_hand)
    assert report.utilisation == busy / report.step_ns


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_every_step_has_a_forward_a_loss_and_an_optimizer(name: str) -> None:
    report = report_of(name)
    for phase in ("forward", "loss", "optimizer"):
        assert spent(report, phase) > 0
    # A plain training loop: nothing in it is of unknown use, and its data lie in memory.
    assert spent(report, "other") + spent(report, "data") < 0.01 * sum(report.step_ns_by_step)


def test_batches_from_pageable_memory_are_waited_for_and_prefetched_ones_are_not() -> None:
    copies = [w for w in plain_of("pageable_copies").work if "HtoD (Pageable" in w.name]
    assert spent(report_of("pageable_copies"), "copy") >= 0.95 * sum(w.duration for w in copies)
    prefetched = [w for w in plain_of("pinned_prefetch").work if "HtoD" in w.name]
    hidden = report_of("pinned_prefetch")
    assert 0 < spent(hidden, "copy") < 0.1 * sum(w.duration for w in prefetched)


def test_a_loop_over_parameters_takes_longer_than_a_foreach_optimizer() -> None:
    loop, together = report_of("optimizer_foreach_false"), report_of("pinned_prefetch")
    assert spent(loop, "optimizer") > 5 * spent(together, "optimizer")


def test_communication_that_backward_starts_is_backward() -> None:
    for name in ("ddp.rank0", "fsdp2.rank1"):
        report = report_of(name)
        exposed = sum(row.wall_on.communication_ns for row in report.modules)
        assert 0 < exposed < report.wall_ns


def test_a_launch_bound_step_leaves_the_gpu_idle_and_a_gpu_bound_one_does_not() -> None:
    assert report_of("launch_bound").utilisation < 0.05
    assert report_of("fp32_convnet").utilisation > 0.95


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_the_devices_time_of_a_step_is_that_of_all_its_work_as_read_by_hand(name: str) -> None:
    report, work = report_of(name), plain_of(name).work
    by_step = [
        sum(one.end - one.start for one in work if start <= one.start < end)
        for start, end in extents(name)
    ]
    assert report.step_gpu_ns == usual(report, by_step)
    assert report.step_gpu_ns + report.steps >= report.gpu_ns


def test_the_head_line_says_whose_the_devices_time_is() -> None:
    name = "resnet_channels_last"
    recorded = report_of(name)
    timed = Options(real_steps=(recorded.step_ns * 3 // 4,) * 4)
    real = pipeline.report_of(Recording.read(path_of(name)), timed)
    assert (real.step_gpu_ns, real.gpu_ns) == (recorded.step_gpu_ns, recorded.gpu_ns)
    text = " ".join(render_text(real).split())
    whole, part = duration(real.step_gpu_ns), duration(real.gpu_ns)
    assert f"GPU {whole} per step, {part} in the backward" in text
    text = " ".join(render_text(recorded).split())
    assert text.index("Backward ") < text.index(f" GPU {part} ·")  # it can be no other's
    assert whole not in text
