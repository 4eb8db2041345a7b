"""Prices of causes that only a GPU shows: what of their work a remedy takes away."""

from __future__ import annotations

import pytest

import backspot
from backspot.results import Report
from backspot.results.findings import Finding
from backspot.results.report import predictor_of
from backspot.trace import names
from support.replays import BACKWARD, FORWARD, MS, PATHS, STEP, US, Program


def finding_of(name: str, rule: str) -> Finding:
    """What a rule finds in a recording of an H200."""
    (found,) = (one for one in backspot.locate(PATHS[name]).findings if one.rule == rule)
    return found


@pytest.mark.parametrize(
    ("name", "rule", "least", "most"),
    [
        # The host is on its own here, and the GPU waits for it.
        ("cpu_suppression_detector", "cpu-operators", 0.95, 1.0),
        # A byte stands for the four of a float.
        ("volume_floats_vit", "host-to-device-volume", 0.7, 0.76),
        ("zeros_by_hand_wide", "zero-grad-fill", 0.6, 1.01),
        ("unread_weights", "unread-gradient", 0.95, 1.01),
        ("unused_lstm_recommender", "unused-gradient", 0.7, 1.01),
    ],
)
def test_a_cause_on_a_gpu_has_the_price_of_what_its_remedy_takes_away(name, rule, least, most):
    found = finding_of(name, rule)
    assert least * found.wall_ns <= found.saves.ns <= most * found.wall_ns


def test_other_forms_of_a_convolution_have_no_price_as_some_lose():
    assert finding_of("depthwise_volume", "slow-convolution").saves is None


def on_the_host(folder, *, behind_us: int, then: str = "operator") -> Finding:
    """An operator of 4 ms on the CPU, and what the program does some time behind it."""
    program = Program()
    for step, at in program.steps():
        begin = at - BACKWARD + FORWARD + 300 * US
        program.trace.forward("table", "Table", begin, begin + 12 * MS)
        program.trace.operator("aten::cos", begin + 10 * US, begin + 4_010 * US)
        again = begin + (4_010 + behind_us) * US
        if then == "operator":
            program.trace.operator("aten::slice", again, again + 5 * US)
        else:
            program.call("cudaLaunchKernel", again, again + 5 * US, thread=1)
        program.node(step, "b", at + 13 * MS, at + 14 * MS)
        program.call("cudaLaunchKernel", at + 13 * MS + 8 * US, at + 13 * MS + 9 * US)
        program.trace.kernel(at + 13 * MS + 9 * US, at + 14 * MS, launch=at + 13 * MS + 8 * US)
    report = backspot.locate(program.save(folder))
    (found,) = (one for one in report.findings if one.rule == "cpu-operators")
    return found


@pytest.mark.parametrize("then", ["operator", "launch"])
@pytest.mark.parametrize(("behind_us", "counted_us"), [(1_000, 1_000), (7_500, 4_000)])
def test_an_operator_on_the_cpu_counts_until_the_program_goes_on(
    tmp_path, then, behind_us, counted_us
):
    found = on_the_host(tmp_path, behind_us=behind_us, then=then)
    assert found.path == "table"
    assert found.wall_ns == pytest.approx((4_000 + counted_us) * US, rel=0.01)
    assert found.saves.ns == pytest.approx(found.wall_ns, rel=0.05)
    assert found.saves.at_best


def read(folder, *operators: str) -> Finding:
    """A value is read that these operators compute, one after the other, each with a kernel."""
    program = Program()
    for step, at in program.steps():
        begin = at - BACKWARD + FORWARD + 300 * US
        end = begin + 30 * US + len(operators) * MS
        program.trace.forward("look", "Look", begin, end + 60 * US)
        for number, name in enumerate(operators):
            start = begin + (10 + 100 * number) * US
            program.trace.operator(name, start, start + 50 * US)
            program.trace.kernel(
                begin + 30 * US + number * MS,
                begin + 30 * US + (1 + number) * MS,
                launch=start + 10 * US,
                launch_thread=1,
            )
        program.trace.operator("aten::item", begin + 800 * US, end + 50 * US)
        program.call("cudaStreamSynchronize", begin + 810 * US, end + 20 * US, thread=1)
        program.node(step, "b", end + 100 * US, end + 200 * US)
        program.trace.kernel(end + 120 * US, end + 20 * MS, launch=end + 110 * US)
    report = backspot.locate(program.save(folder))
    (found,) = (one for one in report.findings if one.rule == "host-waits")
    return found


@pytest.mark.parametrize(
    ("chain", "goes"),
    [
        (("aten::detach", "aten::abs", "aten::amax"), True),
        (("aten::detach", "aten::add_", "aten::amax"), False),  # changes what others read
        (("aten::sigmoid", "aten::abs", "aten::amax"), False),  # others may read it, too
    ],
)
def test_with_a_value_that_nobody_reads_goes_what_computes_it_for_nothing_else(
    tmp_path, chain, goes
):
    (tmp_path / "alone").mkdir()
    alone = read(tmp_path / "alone", "aten::sigmoid", "aten::sigmoid", "aten::sigmoid").saves.ns
    saves = read(tmp_path, *chain).saves.ns
    of_host = 3 * 50 * US * goes
    assert saves == pytest.approx(alone + of_host, abs=10 * US)


def copied_batches(folder, *, pinned: bool) -> Report:
    """A batch of 1 ms on the bus, and kernels of 1 ms that the host launches for 2 ms behind it."""
    kind = "Pinned" if pinned else "Pageable"
    program = Program()
    for step, at in program.steps():
        begin = at - 6_200 * US
        # The device still has work of 3 ms for which a copy that blocks has to wait.
        program.trace.operator("aten::mm", begin, begin + 20 * US)
        program.trace.kernel(begin + 10 * US, begin + 3 * MS, launch=begin + 5 * US)
        call = begin + 100 * US
        program.trace.event(
            "cuda_runtime", "cudaMemcpyAsync", call, call + (10 * US if pinned else 4 * MS),
            correlation=step + 1,
        )  # fmt: skip
        program.trace.event(
            "gpu_memcpy", f"Memcpy HtoD ({kind} -> Device)", begin + 3 * MS, begin + 4 * MS, 7,
            device=0, stream=7, correlation=step + 1, bytes=1 << 24,
        )["pid"] = 0  # fmt: skip
        after = call + (20 * US if pinned else 4_010 * US)
        for number in range(20):
            launch = after + 100 * number * US
            program.trace.operator("aten::add", launch, launch + 90 * US)
            start = max(launch + 10 * US, begin + 4 * MS + 50 * number * US)
            program.trace.kernel(start, start + 50 * US, launch=launch + 5 * US)
        program.node(step, "b", at, at + MS)
        program.call("cudaLaunchKernel", at + 8 * US, at + 9 * US)
        program.trace.kernel(at + 10 * US, at + 29 * MS, launch=at + 8 * US)
        end = step * STEP + STEP - 20 * US
        program.call("cudaDeviceSynchronize", at + 2 * MS, end, thread=1)
    return backspot.locate(program.save(folder))


def test_a_copy_that_blocks_costs_what_the_device_is_idle_after_it_too(tmp_path):
    (found,) = (
        one
        for one in copied_batches(tmp_path, pinned=False).findings
        if one.rule == "pageable-copy"
    )
    # The host would have launched the forward while the device still computed and copied.
    assert found.wall_ns == pytest.approx(2 * MS, rel=0.1)
    assert "the GPU is then idle for" in found.seen
    assert found.saves.ns == pytest.approx(found.wall_ns, rel=0.1)
    pinned = copied_batches(tmp_path, pinned=True)
    assert "pageable-copy" not in {one.rule for one in pinned.findings}


def test_without_the_waits_of_a_remedy_less_work_of_a_device_saves_more(tmp_path):
    predictor = predictor_of(copied_batches(tmp_path, pinned=False))
    less = [(0.0, 0.5 * MS), (0.0, 0.0)]
    of_copies, nothing = predictor.with_less(["(data)"], less)
    unblocked, waits = predictor.with_less(["(data)"], less, unblocked="pageable-copy")
    assert nothing == 0
    assert waits == pytest.approx(1.1 * MS, rel=0.1)
    assert unblocked == pytest.approx(waits + 0.5 * MS, rel=0.1)
    assert of_copies < waits
    assert predictor.with_less(["(data)"], less, unblocked="casts") == [of_copies, nothing]


@pytest.mark.parametrize(("kernel_us", "saved_us"), [(50, 2_500), (7_000, 14_000)])
def test_of_gradients_that_nobody_reads_go_the_kernels_and_what_the_host_does(
    tmp_path, kernel_us, saved_us
):
    """Of two gradients nobody reads one; each has two kernels."""
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 5 * MS, "OwnBackward")
        program.trace.operator(names.unread_mark(1, 2), at + 4_990 * US, at + 4_992 * US, thread=2)
        done = at
        for launch in range(at + 100 * US, at + 4_900 * US, 1_200 * US):
            begin = max(launch + 10 * US, done)
            done = begin + kernel_us * US
            program.trace.kernel(begin, done, launch=launch)
        program.node(step, "a", at + 5 * MS, at + 5_100 * US)
        program.call("cudaDeviceSynchronize", at + 5_200 * US, max(done, at + 5_210 * US), thread=1)
    report = backspot.locate(program.save(tmp_path))
    (unread,) = (one for one in report.findings if one.rule == "unread-gradient")
    assert unread.saves.ns == pytest.approx(saved_us * US, rel=0.1)
