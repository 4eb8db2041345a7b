"""What looks like a rule's cause and is none: findings must not say what is not so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import backspot
from backspot.results.findings import Finding
from backspot.trace.labels import Kind, Label, format_label, unused_label
from support.h200 import EACH_WITH_BACKWARD, report_of
from support.synthetic import Trace

TICK = 100_000  # nanoseconds
HOST, ENGINE = 1, 2
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >"
SGEMM = "ampere_sgemm_128x64_nn"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


class Step:
    """A step of a thousand ticks: forward 100 to 200, backward 300 to 600, optimizer 700 to 800."""

    def __init__(self) -> None:
        self.trace = Trace()

    def operator(self, name: str, start: int, end: int, seq: int | None = None) -> None:
        self.trace.operator(name, start * TICK, end * TICK, seq=seq)

    def node(self, name: str, start: int, end: int, seq: int | None = None) -> None:
        self.trace.node(name, start * TICK, end * TICK, seq=seq)

    def kernel(
        self, name: str, start: int, end: int, launch: int | None = None, thread: int = HOST
    ) -> None:
        since = None if launch is None else launch * TICK
        kind = "kernel" if not name.startswith("Mem") else "gpu_memcpy"
        self.trace.kernel(
            start * TICK, end * TICK, launch=since, launch_thread=thread, name=name, cat=kind
        )

    def mark(self, name: str, start: int, end: int) -> None:
        self.trace.annotation(name, start * TICK, end * TICK)

    def training(self) -> None:
        self.mark("ProfilerStep#1", 0, 1000)
        self.trace.forward("", "Model", 100 * TICK, 200 * TICK)
        self.operator("aten::mul", 110, 120, seq=0)
        self.node("MulBackward0", 300, 600, seq=0)
        self.mark("Optimizer.step#SGD.step", 700, 800)

    def findings(self, folder: Path) -> dict[str, Finding]:
        report = backspot.locate(self.trace.save(folder / "trace.json"))
        for finding in report.findings:
            assert 0 < finding.wall_ns <= report.whole_ns
        return {finding.rule: finding for finding in report.findings}


def test_what_was_launched_before_the_recording_counts_for_no_finding(tmp_path):
    step = Step()
    step.training()
    step.kernel(SGEMM, 5, 250)
    step.kernel("mul", 250, 260, launch=112)
    step.kernel(SGEMM, 320, 420, launch=320, thread=ENGINE)
    found = step.findings(tmp_path)["no-tensor-cores"]
    assert [(place.path, place.count, place.wall_ns) for place in found.places] == [
        ("", 1, 100 * TICK)
    ]
    assert "1 kernel per step, 10.0 ms of the step" in found.seen


def test_what_runs_between_two_steps_counts_for_no_finding(tmp_path):
    step = Step()
    step.training()
    step.kernel(SGEMM, 320, 420, launch=320, thread=ENGINE)
    step.kernel(SGEMM, 1200, 1900, launch=1100)
    step.mark("ProfilerStep#2", 2000, 2100)
    assert step.findings(tmp_path)["no-tensor-cores"].wall_ns == 100 * TICK


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_no_finding_on_a_real_gpu_costs_more_than_the_steps_took(name):
    report = report_of(name)
    assert all(0 < finding.wall_ns <= report.whole_ns for finding in report.findings)


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_findings_read_well_for_one_thing_as_for_many(name):
    for finding in report_of(name).findings:
        assert not re.search(r"\b1 \w+ per step (take|run|fill|sort|compute)\b", finding.seen)
        assert not re.search(r"\b1 \w+s per step\b", finding.seen)
        assert finding.seen.endswith((".", ".)"))


@pytest.mark.parametrize(
    ("inside", "found"),
    [("aten::embedding_dense_backward", True), ("aten::embedding_sparse_backward", False)],
)
def test_a_sparse_table_writes_no_dense_gradient(tmp_path, inside, found):
    step = Step()
    step.mark("ProfilerStep#1", 0, 1000)
    step.trace.forward("table", "Embedding", 100 * TICK, 200 * TICK)
    step.operator("aten::embedding", 110, 120, seq=0)
    step.node("EmbeddingBackward0", 300, 600, seq=0)
    step.trace.operator(inside, 310 * TICK, 590 * TICK, thread=ENGINE)
    step.kernel("Memset (Device)", 330, 550, launch=320, thread=ENGINE)
    assert ("dense-embedding-gradient" in step.findings(tmp_path)) is found


@pytest.mark.parametrize("of_parameter", [True, False])
def test_a_parameter_is_cast_by_autocast_and_no_cast_of_an_activation(tmp_path, of_parameter):
    step = Step()
    step.mark("ProfilerStep#1", 0, 1000)
    step.trace.forward("layer", "Linear", 100 * TICK, 200 * TICK)
    step.operator("aten::_to_copy", 110, 120, seq=0)
    step.node("ToCopyBackward0", 300, 600, seq=0)
    step.kernel("cast", 330, 550, launch=320, thread=ENGINE)
    if of_parameter:
        step.node("torch::autograd::AccumulateGrad", 601, 610)
    assert ("casts" in step.findings(tmp_path)) is not of_parameter


@pytest.mark.parametrize(("width", "found"), [(1, False), (4, True)])
def test_a_batch_that_is_cast_behind_its_copy_did_not_travel_at_full_width(tmp_path, width, found):
    step = Step()
    step.training()
    pixels = 8_000_000
    step.kernel("Memcpy HtoD (Pinned -> Device)", 10, 60, launch=5)
    step.trace.events[-1]["args"] |= {"bytes": width * pixels}
    step.operator("aten::to", 6, 9)
    step.kernel("cast", 61, 65, launch=7)
    step.trace.events[-1]["args"] |= {"blocks per SM": pixels / 512 / 120}
    assert ("host-to-device-volume" in step.findings(tmp_path)) is found


@pytest.mark.parametrize(
    ("width", "cast", "found"),
    [(1, 1, False), (4, 1, True), (4, 10, True), (1, 0.01, True)],
    ids=["bytes", "floats, to half", "a larger activation", "indices"],
)
def test_a_batch_that_the_model_casts_itself_did_not_travel_at_full_width(
    tmp_path, width, cast, found
):
    step = Step()
    step.training()
    pixels = 8_000_000
    step.kernel("Memcpy HtoD (Pinned -> Device)", 10, 60, launch=5)
    step.trace.events[-1]["args"] |= {"bytes": width * pixels}
    step.kernel("add", 61, 65, launch=7)
    step.trace.forward("inner", "Inner", 130 * TICK, 150 * TICK)
    step.operator("aten::to", 131, 140)
    step.kernel("cast", 141, 145, launch=132)
    step.trace.events[-1]["args"] |= {"blocks per SM": cast * pixels / 512 / 120}
    assert ("host-to-device-volume" in step.findings(tmp_path)) is found


@pytest.mark.parametrize(("around", "found"), [("", True), ("aten::zeros", False)])
def test_a_new_tensor_of_zeros_is_no_zero_grad(tmp_path, around, found):
    step = Step()
    step.training()
    if around:
        step.operator(around, 20, 60)
    step.operator("aten::zero_", 30, 50)
    step.kernel(FILL, 45, 95, launch=40)
    assert ("zero-grad-fill" in step.findings(tmp_path)) is found


def test_an_exchange_of_gradients_is_no_addition_to_zeros(tmp_path):
    step = Step()
    step.training()
    step.mark("Optimizer.zero_grad#SGD.zero_grad", 20, 80)
    step.kernel(FILL, 45, 95, launch=40)
    step.node("torch::autograd::AccumulateGrad", 610, 650)
    step.trace.operator("aten::add_", 612 * TICK, 625 * TICK, thread=ENGINE)
    step.kernel("add", 620, 630, launch=620, thread=ENGINE)
    step.kernel(NCCL, 640, 690, launch=627, thread=ENGINE)
    found = step.findings(tmp_path)["zero-grad-fill"]
    assert found.kernels == (FILL, "add")
    assert "adds to the zeros for 1.0 ms" in found.seen


def test_what_a_closure_launches_is_not_the_optimizers(tmp_path):
    step = Step()
    step.mark("Optimizer.step#LBFGS.step", 10, 900)
    step.trace.forward("", "Model", 100 * TICK, 200 * TICK)
    step.operator("aten::mul", 110, 120, seq=0)
    for number in range(80):
        step.kernel("small", 121 + number // 2, 122 + number // 2, launch=120)
    step.node("MulBackward0", 300, 600, seq=0)
    assert "optimizer-kernels" not in step.findings(tmp_path)
    for number in range(80):
        step.kernel("small", 700 + number, 701 + number, launch=700 + number)
    step.trace.events = [
        {**event, "dur": 20.0} if event["cat"] == "kernel" else event for event in step.trace.events
    ]
    assert step.findings(tmp_path)["optimizer-kernels"].places[0].count == 80


@pytest.mark.parametrize("updated", [False, True])
def test_two_passes_accumulate_only_where_no_update_lies_between(tmp_path, updated):
    step = Step()
    step.mark("ProfilerStep#1", 0, 1000)
    for at in (0, 500):
        step.trace.forward("", "Model", (at + 10) * TICK, (at + 100) * TICK)
        step.operator("aten::mul", at + 20, at + 30, seq=at)
        step.node("MulBackward0", at + 150, at + 200, seq=at)
        step.node("torch::autograd::AccumulateGrad", at + 210, at + 300)
        step.trace.operator("aten::add_", (at + 215) * TICK, (at + 225) * TICK, thread=ENGINE)
        step.kernel("add", at + 230, at + 290, launch=at + 220, thread=ENGINE)
        if updated or at:
            step.mark("Optimizer.step#SGD.step", at + 320, at + 340)
    found = step.findings(tmp_path)["gradient-accumulation"]
    assert ("2 passes before each update" in found.seen) is not updated
    assert ("several passes" in found.title) is not updated


def two_passes(folder: Path, *calls: tuple[str, int, int], norm: str = "") -> Finding:
    """What is said of two passes of a critic before one update, beside calls of a generator.

    The critic runs at 110 and at 510, and its passes from 150 to 300 and from 550 to 700.

    Args:
        folder: for the trace.
        calls: model, start and end.
        norm: the class of a module in the critic.
    """
    folder.mkdir()
    step = Step()
    step.mark("ProfilerStep#1", 0, 1000)
    for model, start, end in (*calls, ("critic", 110, 140), ("critic", 510, 540)):
        step.trace.forward(model, model.title(), start * TICK, end * TICK)
    for at in (100, 500):
        if norm:
            step.trace.forward("critic.norm", norm, (at + 12) * TICK, (at + 38) * TICK)
        step.operator("aten::mul", at + 20, at + 30, seq=at)
        step.node("MulBackward0", at + 50, at + 100, seq=at)
        step.node("torch::autograd::AccumulateGrad", at + 110, at + 200)
        step.trace.operator("aten::add_", (at + 115) * TICK, (at + 125) * TICK, thread=ENGINE)
        step.kernel("add", at + 130, at + 190, launch=at + 120, thread=ENGINE)
    step.mark("Optimizer.step#SGD.step", 900, 920)
    return step.findings(folder)["gradient-accumulation"]


def test_what_another_model_runs_before_a_further_pass_is_not_of_its_price(tmp_path):
    alone = two_passes(tmp_path / "alone")
    assert alone.saves is not None
    assert "several passes" in alone.title
    once = two_passes(tmp_path / "once", ("generator", 350, 450))
    assert once.saves is not None
    assert (once.wall_ns, once.saves.ns) == (alone.wall_ns, alone.saves.ns)
    each_time = two_passes(tmp_path / "each", ("generator", 20, 100), ("generator", 350, 450))
    assert each_time.saves is not None
    assert each_time.wall_ns > alone.wall_ns
    assert each_time.saves.ns > alone.saves.ns
    within = two_passes(tmp_path / "within", ("generator", 542, 548))
    assert "several passes" not in within.title
    assert within.wall_ns < alone.wall_ns


def test_the_price_of_a_single_pass_is_no_floor_for_that_of_fewer_passes(tmp_path):
    """It holds the idle time of all further passes, and what else a single pass saves is not known.

    Additions alone are a floor.
    """
    whole = two_passes(tmp_path / "whole").saves
    additions = two_passes(tmp_path / "additions", ("generator", 542, 548)).saves
    assert whole is not None
    assert additions is not None
    assert (whole.at_least, whole.at_best) == (False, False)
    assert additions.at_least


@pytest.mark.parametrize("norm", ["BatchNorm2d", "GroupNorm"])
def test_that_fewer_passes_change_the_training_is_said_of_batch_norms(tmp_path, norm):
    found = two_passes(tmp_path / norm, norm=norm)
    assert ("Batch norms" in found.remedy) is (norm == "BatchNorm2d")
    assert found.changes_training is (norm == "BatchNorm2d")


@pytest.mark.parametrize(
    ("operator", "in_a_hook", "is_work"),
    [
        ("aten::detach", False, False),
        ("aten::add_", False, True),
        ("aten::clone", False, True),
        ("aten::add_", True, False),
    ],
)
def test_on_a_cpu_a_gradient_that_is_taken_over_is_no_work(tmp_path, operator, in_a_hook, is_work):
    step = Step()
    step.training()
    step.node("torch::autograd::AccumulateGrad", 600, 690)
    step.operator(operator, 610, 680)
    for event in step.trace.events:
        event["tid"] = ENGINE if event["name"] == operator else event["tid"]
        if in_a_hook and event["name"] == "torch::autograd::AccumulateGrad":
            event["dur"] = TICK / 1000
    assert ("gradient-accumulation" in step.findings(tmp_path)) is is_work


def test_on_a_cpu_a_hook_that_also_copies_is_no_copy_of_a_gradient(tmp_path):
    step = Step()
    step.training()
    step.node("torch::autograd::AccumulateGrad", 600, 690)
    step.trace.operator("aten::mm", 610 * TICK, 670 * TICK, thread=ENGINE)
    step.trace.operator("aten::copy_", 671 * TICK, 675 * TICK, thread=ENGINE)
    assert "gradient-accumulation" not in step.findings(tmp_path)


@pytest.mark.parametrize(
    ("operator", "in_a_hook", "is_work"),
    [
        ("aten::add_", False, True),
        ("aten::add_", True, False),
        ("aten::linalg_vector_norm", False, False),  # hooks after the addition run in the node
    ],
)
def test_what_a_hook_on_a_parameter_launches_is_no_copy_of_its_gradient(
    tmp_path, operator, in_a_hook, is_work
):
    step = Step()
    step.training()
    step.node("torch::autograd::AccumulateGrad", 600, 690)
    if in_a_hook:
        step.trace.events[-1]["dur"] = TICK / 1000
    step.trace.operator(operator, 625 * TICK, 635 * TICK, thread=ENGINE)
    step.kernel("add", 640, 680, launch=630, thread=ENGINE)
    assert ("gradient-accumulation" in step.findings(tmp_path)) is is_work


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("steps", [False, True], ids=["adds", "steps"])
def test_an_optimizer_that_steps_within_the_node_copies_no_gradient(tmp_path, steps, on_gpu):
    step = Step()
    step.training()
    step.node("torch::autograd::AccumulateGrad", 600, 690)
    step.operator("aten::add_", 620, 680)
    step.trace.events[-1]["tid"] = ENGINE
    if steps:
        step.trace.annotation("Optimizer.step#SGD.step", 610 * TICK, 685 * TICK, ENGINE)
    if on_gpu:
        step.kernel("add", 640, 680, launch=630, thread=ENGINE)
    assert ("gradient-accumulation" in step.findings(tmp_path)) is not steps


def test_without_calls_of_the_driver_no_operator_is_said_to_compute_on_the_host(tmp_path):
    step = Step()
    step.training()
    step.kernel("mul", 112, 119)
    step.kernel("mul", 400, 500)
    assert "cpu-operators" not in step.findings(tmp_path)
    step.kernel("mul", 900, 910, launch=890)
    assert "cpu-operators" in step.findings(tmp_path)


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_gradient_that_an_input_wants_is_used(tmp_path, at_the_end):
    step = Step()
    step.mark("ProfilerStep#1", 0, 1000)
    step.trace.forward("first", "Linear", 50 * TICK, 100 * TICK)
    step.operator("aten::mul", 60, 70, seq=0)
    step.trace.forward("used", "Linear", 100 * TICK, 200 * TICK)
    step.operator("aten::mul", 110, 120, seq=1)
    step.trace.forward("idle", "Linear", 200 * TICK, 250 * TICK)
    step.node("MulBackward0", 300, 400, seq=1)
    step.node("torch::autograd::AccumulateGrad", 401, 410)
    step.node("MulBackward0", 420, 600, seq=0)
    if at_the_end:
        step.node("torch::autograd::AccumulateGrad", 601, 610)
    step.mark("Optimizer.step#SGD.step", 700, 800)
    path = "first" if at_the_end else "idle"
    label = format_label(Label(Kind.UNUSED, path, "Linear"))
    step.operator(label, 790, 791)
    assert ("unused-gradient" in step.findings(tmp_path)) is at_the_end


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_a_node_that_passes_a_gradient_on_is_half_needless(tmp_path, part):
    step = Step()
    step.mark("ProfilerStep#1", 0, 1000)
    step.trace.forward("used", "Linear", 50 * TICK, 100 * TICK)
    step.operator("aten::mul", 60, 70, seq=0)
    step.trace.forward("idle", "Linear", 100 * TICK, 200 * TICK)
    step.operator("aten::mul", 110, 120, seq=1)
    step.node("MulBackward0", 300, 400, seq=1)
    step.node("torch::autograd::AccumulateGrad", 400, 410)
    step.node("MulBackward0", 420, 600, seq=0)
    step.node("torch::autograd::AccumulateGrad", 600, 610)
    step.mark("Optimizer.step#SGD.step", 700, 800)
    step.operator(format_label(unused_label("idle", "Linear", part)), 790, 791)
    (place,) = step.findings(tmp_path)["unused-gradient"].places
    assert (place.path, place.wall_ns) == ("idle", part * (100 // 2 + 10) * TICK)


@pytest.mark.parametrize(
    ("kernel", "width"), [(SGEMM, "fp32"), ("volta_dgemm_64x64_nt", "fp64"), ("hgemm", None)]
)
def test_the_precision_of_products_is_told_by_their_kernels(tmp_path, kernel, width):
    step = Step()
    step.training()
    step.kernel(kernel, 320, 420, launch=320, thread=ENGINE)
    found = step.findings(tmp_path).get("no-tensor-cores")
    assert (found.title if found else None) == (
        f"Matrix products run in {width} without tensor cores" if width else None
    )


@pytest.mark.parametrize(
    ("node", "beside", "known"),
    [
        ("ConvolutionBackward0", "sm90_xmma_fprop_tf32f32_tf32f32_f32", 0),
        ("ConvolutionBackward0", "ampere_scudnn_128x64_relu", 1),
        ("MmBackward0", "sm90_xmma_fprop_tf32f32_tf32f32_f32", 1),
    ],
)
def test_a_convolution_beside_others_in_tf32_has_no_kernel_to_be_asked_for(
    tmp_path, node, beside, known
):
    """TF32 is allowed for all convolutions or for none, and says nothing of matrix products."""
    step = Step()
    step.mark("ProfilerStep#1", 100, 1000)
    step.trace.forward("", "Model", 102 * TICK, 130 * TICK)
    for number, (name, kernel, start) in enumerate(
        [(node, SGEMM, 500), ("ConvolutionBackward0", beside, 150)]
    ):
        step.operator("aten::mul", 110 + 10 * number, 115 + 10 * number, seq=number)
        begin = 160 - 20 * number
        step.node(name, begin, begin + 15, seq=number)
        step.kernel(kernel, start, start + 350, launch=begin + 5, thread=ENGINE)
    step.kernel("add", 850, 995, launch=116)
    report = backspot.locate(step.trace.save(tmp_path / "trace.json"))
    (found,) = (one for one in report.findings if one.rule == "no-tensor-cores")
    assert ("cuDNN has no kernel in TF32 for their sizes" in found.seen) is not bool(known)
    assert (found.saves is not None) is bool(known)


@pytest.mark.parametrize("marked", [True, False])
def test_a_loader_is_named_only_where_it_left_marks(tmp_path, marked):
    step = Step()
    step.training()
    if marked:
        step.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 80)
    assert ("waiting-for-data" in step.findings(tmp_path)) is marked


@pytest.mark.parametrize(
    ("waits", "cost"),
    [
        ([60] * 9, 60),
        ([60, 0, 60, 0, 60, 0, 60, 0, 60], 60 * 5 / 9),
        ([0, 60, 0, 60, 0, 60, 0, 60, 0], 60 * 4 / 9),
        ([0, 0, 0, 60, 0, 0, 0, 60, 0], 60 * 2 / 9),
        ([0, 900, 0, 0], 900 / 4),
    ],
)
def test_workers_that_deliver_in_turn_cost_every_step(tmp_path, waits, cost):
    trace, begin = Trace(), 0
    for number, wait in enumerate(waits):
        at = begin + wait * TICK
        for name, start, end in (
            (f"ProfilerStep#{number}", begin, at + 90 * TICK),
            ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", begin, at),
        ):
            trace.annotation(name, start, end)
        trace.forward("", "Model", at, at + 20 * TICK)
        trace.operator("aten::mul", at, at + 20 * TICK, seq=number)
        trace.node("MulBackward0", at + 30 * TICK, at + 80 * TICK, seq=number)
        begin = at + 90 * TICK
    report = backspot.locate(trace.save(tmp_path / "trace.json"))
    found = {one.rule: one for one in report.findings}.get("waiting-for-data")
    assert (found and found.wall_ns / TICK) == (cost and pytest.approx(cost, rel=0.01))
    if found:
        assert ("in 4 of 9 steps" in found.seen) is (sum(map(bool, waits)) == 4)


@pytest.mark.parametrize("copied", [True, False])
def test_unrecorded_time_before_a_copy_may_be_loading_and_is_not_said_to_be(tmp_path, copied):
    step = Step()
    step.training()
    step.kernel("mul", 112, 119, launch=111)
    if copied:
        step.kernel("Memcpy HtoD (Pinned -> Device)", 95, 99, launch=90)
    found = step.findings(tmp_path)
    assert ("waiting-for-data" in found) is copied
    if copied:
        waiting = found["waiting-for-data"]
        assert waiting.title == "The GPU is idle before the batch is copied"
        assert waiting.wall_ns == 90 * TICK
        assert "DataLoader" not in waiting.title + waiting.seen + waiting.remedy


def ratios(
    folder: Path, backward: list[int], gpu: bool, forward: Sequence[int] = ()
) -> dict[str, Finding]:
    """Findings of steps with a forward of 10 ticks, or of so many, and a backward of so many."""
    trace, begin = Trace(), 0
    for number, length in enumerate(backward):
        called = forward[number] if forward else 10
        start, end = begin + (90 + called) * TICK, begin + (90 + called + length) * TICK
        trace.annotation(f"ProfilerStep#{number}", begin, end + 10 * TICK)
        trace.forward("", "Model", begin, begin + called * TICK)
        trace.operator("aten::mul", begin, begin + 2 * TICK, seq=number)
        trace.node("MulBackward0", start, end, seq=number)
        if gpu:
            trace.kernel(begin + TICK, begin + 11 * TICK, launch=begin + TICK, launch_thread=HOST)
            trace.kernel(start + 1, end, launch=start + 1)
        begin = end + 10 * TICK
    found = backspot.locate(trace.save(folder / "trace.json")).findings
    return {finding.rule: finding for finding in found}


@pytest.mark.parametrize("gpu", [True, False])
def test_a_backward_that_is_held_up_in_one_step_is_not_slow(tmp_path, gpu):
    once = [20, 20, 20, 20, 3000, 20, 20, 20, 20, 20]
    assert "backward-ratio" not in ratios(tmp_path, once, gpu)
    half = [20, 20, 20, 20, 20, 300, 300, 300, 300, 300]
    assert "backward-ratio" not in ratios(tmp_path, half, gpu)


@pytest.mark.parametrize(("interrupted", "found"), [(10, True), (90, False)])
def test_a_backward_that_is_three_times_its_forward_in_the_typical_step_is_as_usual(
    tmp_path, interrupted, found
):
    forward = [10, interrupted] * 3 + [10]
    of_steps = ratios(tmp_path, [120] * 7, False, forward)
    assert ("backward-ratio" in of_steps) is found


@pytest.mark.parametrize(("gpu", "least"), [(True, 2), (False, 3)])
def test_a_slow_backward_on_a_host_is_one_in_three_steps(tmp_path, gpu, least):
    assert ("backward-ratio" in ratios(tmp_path, [300, 20, 300], gpu)) is (least <= 2)
    assert "backward-ratio" in ratios(tmp_path, [300, 300, 300], gpu)


def test_a_slow_backward_of_less_than_a_millisecond_on_a_host_may_be_an_interruption(tmp_path):
    step = Step()
    for at in (0, 20, 40):
        step.mark(f"ProfilerStep#{at}", at, at + 20)
        step.trace.forward("", "Model", at * TICK, at * TICK + TICK // 2)
        step.trace.operator("aten::mul", at * TICK + 1, at * TICK + 2, seq=at)
        step.node("MulBackward0", at + 5, at + 14, seq=at)
    assert "backward-ratio" not in step.findings(tmp_path)


@pytest.mark.parametrize("gpu", [True, False])
def test_a_backward_that_is_slow_says_its_typical_times_and_in_how_many_steps(tmp_path, gpu):
    found = ratios(tmp_path, [300, 20, 310, 330, 5000], gpu)["backward-ratio"]
    assert found.wall_ns == pytest.approx(24e6)  # what the table has, without the hiccup
    assert "the forward takes 1.0 ms and the backward 24.0 ms" in found.seen
    assert "24 times as long" in found.seen
    assert "more than 10 times its forward in 4 of 5 steps" in found.seen


def test_adding_a_gradient_to_its_parameter_does_not_make_a_backward_slow(tmp_path):
    step = Step()
    for at in (0, 1000, 2000):
        step.mark(f"ProfilerStep#{at}", at, at + 1000)
        step.trace.forward("slow", "Slow", (at + 100) * TICK, (at + 110) * TICK)
        step.operator("aten::mul", at + 101, at + 102, seq=at)
        step.node("MulBackward0", at + 300, at + 590, seq=at)
        step.node("torch::autograd::AccumulateGrad", at + 591, at + 599)
    slow = step.findings(tmp_path)["backward-ratio"]
    assert slow.seen.endswith("Most of it is MulBackward0.")
    assert slow.nodes == ("MulBackward0",)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(
    ("operators", "says"),
    [
        (
            (),
            {
                True: "Use torch.nn.functional.scaled",
                False: "0. The fused kernel for the CPU needs",
            },
        ),
        (("math",), {True: "Use half precision", False: "a mask that needs no gradient"}),
        (("math", "dropout"), {True: "Use half precision", False: "because dropout_p is not 0"}),
    ],
)
def test_why_attention_is_not_fused_is_seen_in_its_forward(tmp_path, operators, says, gpu):
    step = Step()
    step.mark("ProfilerStep#1", 0, 1000)
    step.trace.forward("attention", "Attention", 100 * TICK, 200 * TICK)
    if "math" in operators:
        step.operator("aten::_scaled_dot_product_attention_math", 105, 195)
    step.operator("aten::bmm", 110, 120, seq=0)
    step.operator("aten::_softmax", 121, 130, seq=1)
    if "dropout" in operators:
        step.operator("aten::bernoulli_", 131, 139)
    step.operator("aten::bmm", 140, 150, seq=2)
    step.node("BmmBackward0", 300, 400, seq=2)
    step.node("SoftmaxBackward0", 401, 450, seq=1)
    step.node("BmmBackward0", 451, 600, seq=0)
    if gpu:
        step.kernel("bmm", 302, 600, launch=301, thread=ENGINE)
    remedy = step.findings(tmp_path)["attention-math"].remedy
    assert says[gpu] in remedy
    assert ("half precision" in remedy) is (gpu and "math" in operators)


@pytest.mark.parametrize("layers", [(), (415,), (465,), (415, 465)])
def test_scores_that_a_layer_mixes_cannot_be_fused_and_are_no_finding(tmp_path, layers):
    step = Step()
    step.mark("ProfilerStep#1", 0, 1000)
    step.trace.forward("attention", "TalkingHeads", 100 * TICK, 200 * TICK)
    step.operator("aten::bmm", 110, 120, seq=0)
    step.operator("aten::_softmax", 131, 139, seq=2)
    step.operator("aten::bmm", 150, 160, seq=4)
    step.trace.forward("attention.before", "Linear", 121 * TICK, 130 * TICK)
    step.operator("aten::addmm", 122, 129, seq=1)
    step.trace.forward("attention.after", "Linear", 140 * TICK, 149 * TICK)
    step.operator("aten::addmm", 141, 148, seq=3)
    step.node("BmmBackward0", 300, 400, seq=4)
    step.node("SoftmaxBackward0", 430, 450, seq=2)
    for at in layers:
        step.node("AddmmBackward0", at, at + 10, seq=3 if at < 430 else 1)
    step.node("BmmBackward0", 480, 600, seq=0)
    assert ("attention-math" in step.findings(tmp_path)) is (465 not in layers)


@pytest.mark.parametrize(("longest", "found"), [(30, True), (50, False)])
def test_products_of_unlike_sizes_are_no_scores_and_values(tmp_path, longest, found):
    step = Step()
    step.mark("ProfilerStep#1", 0, 1000)
    step.trace.forward("attention", "Attention", 100 * TICK, 200 * TICK)
    step.operator("aten::bmm", 110, 120, seq=0)
    step.operator("aten::_softmax", 121, 129, seq=1)
    step.operator("aten::bmm", 130, 130 + longest, seq=2)
    step.node("BmmBackward0", 300, 400, seq=2)
    step.node("SoftmaxBackward0", 401, 450, seq=1)
    step.node("BmmBackward0", 451, 600, seq=0)
    assert ("attention-math" in step.findings(tmp_path)) is found


def remedy_of_a_slow(node: str, folder: Path, inside: list[str]) -> str:
    """What to do about a node of 290 ticks whose forward takes 10, with operators in it."""
    step = Step()
    length = 290 * TICK // max(1, len(inside))
    for at in (0, 1000, 2000):
        step.mark(f"ProfilerStep#{at}", at, at + 1000)
        step.trace.forward("slow", "Slow", (at + 100) * TICK, (at + 110) * TICK)
        step.operator("aten::mul", at + 101, at + 102, seq=at)
        step.node(node, at + 300, at + 590, seq=at)
        for number, name in enumerate(inside):
            start = (at + 300) * TICK + number * length
            step.trace.operator(name, start + 10, start + length - 10, thread=ENGINE)
    return step.findings(folder)["backward-ratio"].remedy


@pytest.mark.parametrize(
    ("node", "inside", "says", "never"),
    [
        ("CompiledFunctionBackward", [], "compiled already", "compile the module"),
        ("PowerBackward", ["aten::mul"], "fewer operators", "autograd.Function"),
        ("PowerBackward", ["aten::mul"] * 200, "aten::mul 200 times", "compile"),
        ("ConvolutionBackward0", [], "dilated", "channels_last"),
        ("IndexBackward0", ["aten::_index_put_impl_"], "index_select", "autograd.Function"),
        ("IndexBackward0", ["aten::zero_", "aten::_index_put_impl_"], "nn.Embedding", "compile"),
        ("CumprodBackward0", ["aten::mul"] * 200, "compile the module", "loop"),
    ],
)
def test_the_remedy_for_a_slow_backward_goes_by_its_node(tmp_path, node, inside, says, never):
    remedy = remedy_of_a_slow(node, tmp_path, inside)
    assert says in remedy
    assert never not in remedy


@pytest.mark.parametrize(
    ("dilation", "transposed", "groups", "says"),
    [
        ("[1, 1]", "False", "1", "neither grouped nor dilated nor transposed"),
        ("[2, 2]", "False", "1", "The convolution is dilated:"),
        ("[1, 1]", "True", "8", "The convolution is grouped and transposed:"),
    ],
)
def test_a_convolution_is_told_what_it_is_where_shapes_are_recorded(
    tmp_path, dilation, transposed, groups, says
):
    step = Step()
    values = ["", "", "", "[8]", "[1, 1]", "[0, 0]", dilation, transposed, "[0, 0]", groups, "[]"]
    shape = [[4, 8, 9, 9], [4, 8, 9, 9], [8, 8, 3, 3], *([[]] * 8)]
    known = {"Input Dims": shape, "Input type": ["float"] * 3, "Concrete Inputs": values}
    for at in (0, 1000, 2000):
        step.mark(f"ProfilerStep#{at}", at, at + 1000)
        step.trace.forward("slow", "Slow", (at + 100) * TICK, (at + 110) * TICK)
        step.operator("aten::conv2d", at + 101, at + 102, seq=at)
        step.node("ConvolutionBackward0", at + 300, at + 590, seq=at)
        span = (at + 310) * TICK, (at + 580) * TICK
        step.trace.event("cpu_op", "aten::convolution_backward", *span, ENGINE, **known)
    assert says in step.findings(tmp_path)["backward-ratio"].remedy


@pytest.mark.parametrize("held_up", [1, 2])
def test_a_gradient_that_is_held_up_in_one_step_is_no_cause(tmp_path, held_up):
    step = Step()
    for at in (0, 2000, 4000):
        step.mark(f"ProfilerStep#{at}", at, at + 2000)
        step.trace.forward("", "Model", (at + 100) * TICK, (at + 200) * TICK)
        step.operator("aten::mul", at + 110, at + 120, seq=at)
        step.node("MulBackward0", at + 300, at + 500, seq=at)
        length = 1000 if at < held_up * 2000 else 4
        step.node("torch::autograd::AccumulateGrad", at + 600, at + 600 + length)
        start, end = (at + 600) * TICK + 10, (at + 600 + length) * TICK - 10
        step.trace.operator("aten::add_", start, end, thread=ENGINE)
        step.mark("Optimizer.step#SGD.step", at + 1700, at + 1800)
    assert ("gradient-accumulation" in step.findings(tmp_path)) is (held_up == 2)
