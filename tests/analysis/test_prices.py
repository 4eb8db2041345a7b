"""Prices of causes that only a GPU shows: what of their work a remedy takes away."""

from __future__ import annotations

import pytest

import backspot
from backspot.results.findings import Finding
from support.replays import BACKWARD, FORWARD, MS, PATHS, US, Program


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
