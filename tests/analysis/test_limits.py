"""Work and the device's limit: formulas against PyTorch's own, and where modules fall."""

from __future__ import annotations

import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import backspot
import backspot.render.text
from backspot.analysis.accounting.formulas import (
    Inputs,
    Unknown,
    bytes_formulas,
    flops_formulas,
)
from backspot.analysis.accounting.peaks import peaks_of
from backspot.results.limits import REACHABLE_COMPUTE, REACHABLE_MEMORY, share_of_peak
from backspot.trace.events import Signature
from tests.support.synthetic import Trace

DATA = Path(__file__).parents[1] / "data" / "memory"


def inputs(*shapes: list[int], values: dict[int, str] | None = None, kind: str = "float") -> Inputs:
    """The inputs of an operator: tensors of these shapes, then other values by their place."""
    count = max(len(shapes), *(at + 1 for at in values or {0: ""}))
    types = [kind if at < len(shapes) and shapes[at] else "" for at in range(count)]
    given = [(values or {}).get(at, "") for at in range(count)]
    every = [list(shapes[at]) if at < len(shapes) else [] for at in range(count)]
    return Inputs.of(Signature(json.dumps(every), json.dumps(types), "", json.dumps(given)))


def of(operator: str, *shapes: list[int], values: dict[int, str] | None = None) -> int:
    return flops_formulas()[f"aten::{operator}"](inputs(*shapes, values=values))


def test_attention_counts_as_pytorch_counts_it() -> None:
    counter = pytest.importorskip("torch.utils.flop_counter")
    query, key, value = [2, 8, 10, 16], [2, 8, 12, 16], [2, 8, 12, 24]
    gradient = [2, 8, 10, 24]
    forward = counter.sdpa_flop_count(query, key, value)
    backward = counter.sdpa_backward_flop_count(gradient, query, key, value)
    for name in ("efficient", "flash", "cudnn"):
        operator = f"_scaled_dot_product_{name}_attention"
        assert of(operator, query, key, value) == forward
        assert of(f"{operator}_backward", gradient, query, key, value) == backward
    rows_first = [[a, c, b, d] for a, b, c, d in (query, key, value)]
    assert of("_flash_attention_forward", *rows_first) == forward
    assert of("_efficient_attention_backward", [2, 10, 8, 24], *rows_first) == backward


def test_several_query_heads_share_a_key() -> None:
    query, key = [2, 8, 10, 16], [2, 2, 12, 16]
    assert of("_scaled_dot_product_flash_attention", query, key, key) == 2 * 2 * 8 * 10 * 12 * 32


def test_grouped_products_count_each_row_once() -> None:
    assert of("_grouped_mm", [30, 16], [4, 16, 8]) == 2 * 30 * 16 * 8
    assert of("_scaled_mm", [30, 16], [16, 8]) == 2 * 30 * 16 * 8


@pytest.mark.parametrize(
    ("operator", "shapes", "values"),
    [
        ("mm", ([3, 4], [5, 6]), None),
        ("mm", ([3, 4],), None),
        ("bmm", ([2, 3, 4], [3, 4, 5]), None),
        ("convolution", ([1, 2, 8, 8], [4, 2, 3, 3]), None),
        ("convolution", ([1, 2, 8, 8], [4, 2, 3, 3]), {6: "False", 3: "[1", 4: "[0]", 5: "[1]"}),
        ("_scaled_dot_product_flash_attention", ([2, 3, 4], [2, 3, 4], [2, 3, 4]), None),
        ("_flash_attention_forward", ([20, 3, 4], [20, 3, 4], [20, 3, 4]), None),
        ("_cudnn_rnn", ([5, 2, 3], [16, 3]), None),
        ("mkldnn_rnn_layer", ([5, 2, 3], [16, 4], [16, 4]), None),
    ],
)
def test_inputs_that_do_not_say_enough_are_unknown(
    operator: str, shapes: tuple[list[int], ...], values: dict[int, str] | None
) -> None:
    with pytest.raises(Unknown):
        of(operator, *shapes, values=values)


def test_bytes_are_those_that_must_be_moved() -> None:
    formulas = bytes_formulas()
    add = Inputs.of(
        Signature(
            "[[4, 8], [8], []]", '["float", "c10::Half", "Scalar"]', "[[8, 1], [1], []]", "[]"
        )
    )
    assert formulas["aten::add"](add) == 4 * 8 * 4 + 8 * 2 + 4 * 8 * 4
    spread = Inputs.of(Signature("[[4, 8]]", '["float"]', "[[0, 1]]", "[]"))
    assert formulas["aten::neg"](spread) == 8 * 4 + 4 * 8 * 4
    assert formulas["aten::mm"](inputs([3, 4], [4, 5])) == 4 * (12 + 20 + 15)
    # Compiled code gives the place for the result, too.
    added = inputs([5], [3, 4], [4, 5], [], [], [3, 5])
    assert formulas["aten::addmm"](added) == 4 * (5 + 12 + 20 + 15)
    assert formulas["aten::sum"](inputs([3, 4], values={1: "[1]"})) == 4 * (12 + 3)
    assert formulas["aten::sum"](inputs([3, 4])) == 4 * (12 + 1)


def test_a_number_does_not_widen_a_result_and_a_comparison_gives_one_byte() -> None:
    formulas = bytes_formulas()
    scaled = Inputs([[4, 8], []], ["c10::BFloat16", "double"], [[8, 1], []], [])
    assert formulas["aten::mul"](scaled) == 2 * 4 * 8 * 2 + 8
    counted = Inputs([[4, 8], []], ["bool", "double"], [[8, 1], []], [])
    assert formulas["aten::mul"](counted) == 4 * 8 * (1 + 4) + 8
    chosen = Inputs([[4, 8], [], []], ["bool", "float", "float"], [[8, 1], [], []], [])
    assert formulas["aten::where"](chosen) == 4 * 8 * (1 + 4) + 2 * 4
    positive = Inputs([[4, 8], []], ["float", "Scalar"], [[8, 1], []], [])
    assert formulas["aten::gt"](positive) == 4 * 8 * (4 + 1)


@pytest.mark.parametrize(("training", "reads"), [("True", 2), ("False", 1), ("", 2)])
def test_a_batch_norm_reads_its_input_again_in_training(training: str, reads: int) -> None:
    formulas, image, few = bytes_formulas(), [2, 3, 4, 4], [3]
    forward = inputs(image, few, few, few, few, values={5: training})
    elements, channels = 2 * 3 * 4 * 4, 3
    assert formulas["aten::native_batch_norm"](forward) == 4 * ((reads + 1) * elements + 12)
    mask = {7: training, 9: "[True, False, False]"}
    backward = inputs(image, image, few, few, few, few, few, values=mask)
    moved = 4 * ((2 * reads + 1) * elements + 5 * channels)
    assert formulas["aten::native_batch_norm_backward"](backward) == moved


def test_a_recurrent_layer_reads_its_weights_once() -> None:
    """Two directions of an LSTM with 3 inputs and a state of 4, over 5 moments of 2 sequences."""
    weights = [[16, 3], [16, 4], [16], [16]] * 2
    of_weights, rows = 4 * 2 * (16 * 3 + 16 * 4 + 32), 5 * 2
    values = ["", "", "4", "", "", "", "2", "4", "0", "1", "False", "0.", "True", "True", "[]", ""]
    types = ["float", "TensorList", "Scalar", "float", *["Scalar"] * 12]
    forward = Inputs([[5, 2, 3], weights, *[[]] * 14], types, [], values)
    found = bytes_formulas()["aten::_cudnn_rnn"](forward)
    assert found == of_weights + 4 * rows * (3 + 8)
    values = [*values[:4], *[""] * 6, *values[6:], "", "[True, True, True, True]"]
    kinds = ["float", "TensorList", "Scalar", *["float"] * 5, *["", ""], *["Scalar"] * 9, ""]
    types = [*kinds, "unsigned char", "ScalarList"]
    shapes = [[5, 2, 3], weights, [], [2 * 240], [2, 2, 4], [2, 2, 4], [5, 2, 8], [5, 2, 8]]
    backward = Inputs([*shapes, *[[]] * 12, [900], []], types, [], values)
    found = bytes_formulas()["aten::_cudnn_rnn_backward"](backward)
    assert found == 2 * of_weights + 4 * rows * (2 * 3 + 2 * 8) + 900
    assert flops_formulas()["aten::_cudnn_rnn_backward"](backward) == 2 * 2 * rows * 2 * 16 * 7
    cell = inputs([2, 16], [2, 16], [2, 4])
    assert bytes_formulas()["aten::_thnn_fused_lstm_cell"](cell) == 4 * 2 * (3 * 16 + 3 * 4)


def test_the_work_of_a_vision_transformer_is_what_its_paper_says() -> None:
    """ViT-B/16 needs 17.56e9 multiplications and additions for an image, here for 32."""
    report = backspot.locate(DATA / "vit.trace.json.gz")
    forward = sum(row.work.forward_flops or 0 for row in report.modules if row.work)
    assert forward == pytest.approx(32 * 2 * 17.56e9, rel=1e-3)
    backward = sum(row.work.flops or 0 for row in report.modules if row.work)
    assert backward == pytest.approx(2 * forward, rel=0.02)  # less the gradient of the images
    types = {kind for row in report.modules if row.work for kind in row.work.flops_by_type}
    assert types == {"bf16"}


def test_an_operator_that_calls_itself_has_the_work_of_the_inner_call(tmp_path: Path) -> None:
    trace = Trace()
    trace.forward("layer", "Linear", 0, 90_000)
    for at, kind in ((10_000, "float"), (20_000, "c10::BFloat16")):  # autocast lies in between
        trace.event(
            "cpu_op",
            "aten::mm",
            at,
            100_000 - at - 20_000,
            **{"Input Dims": [[4, 8], [8, 2]], "Input type": [kind, kind]},
            **{"Sequence number": 1, "Fwd thread id": 0},
        )
    trace.node("MmBackward0", 200_000, 300_000, seq=1)
    work = backspot.locate(trace.save(tmp_path / "trace.json"))["layer"].row.work
    assert work.forward_flops_by_type == {"bf16": 2 * 4 * 8 * 2}


def test_a_recurrent_layer_on_a_gpu_has_its_work_and_its_limit() -> None:
    report = backspot.locate(DATA.parent / "work" / "lstm.trace.json.gz")
    row = report["rnn"].row
    rows, first, second = 30 * 8, 512 * (96 + 128), 512 * (256 + 128)
    assert row.work.forward_flops == 2 * rows * 2 * (first + second)
    assert row.work.flops == 2 * row.work.forward_flops
    limit = report.limit(row)
    assert limit.of_peak < 0.02  # its kernels depend on each other
    assert limit.gbps is not None


def test_each_row_of_grouped_products_meets_one_expert() -> None:
    """As if the groups were multiplied one by one: their sizes do not matter."""
    report = backspot.locate(DATA.parent / "work" / "experts.trace.json.gz")
    row = report[""].row
    groups = (64, 96, 32, 64)
    assert row.work.forward_flops == sum(2 * 2 * rows * 128 * 256 for rows in groups)
    assert row.work.flops == 2 * row.work.forward_flops


def test_modules_fall_below_the_roof_and_headroom_follows() -> None:
    report = backspot.locate(DATA / "vit.trace.json.gz")
    peaks = report.peaks
    assert peaks is not None
    assert (peaks.device, peaks.tflops["bf16"], peaks.gbps) == ("NVIDIA H200", 989.4, 4800)
    row = report["blocks.3.mlp.fc2"].row
    limit = report.limit(row)
    assert limit is not None
    work = row.work
    assert limit.tflops == pytest.approx(work.flops / row.gpu_ns / 1e3)
    computing = work.flops / 989.4e3
    known = row.gpu_ns * (1 - work.unknown_share)
    assert limit.of_peak == pytest.approx(computing / known)
    assert limit.headroom_ns == pytest.approx(known - computing / REACHABLE_COMPUTE, abs=1)
    norm = report["blocks.3.norm1"].row
    moving = norm.work.bytes / 4800
    known = norm.gpu_ns * (1 - norm.work.unknown_share)
    assert report.limit(norm).of_peak == pytest.approx(moving / known)
    assert report.limit(norm).headroom_ns == pytest.approx(known - moving / REACHABLE_MEMORY, abs=1)
    assert report.limit(norm).tflops is None  # unknown, not nothing
    for each in report.modules:
        limit = report.limit(each)
        if limit is not None and limit.of_peak is not None:
            assert 0 <= limit.of_peak < 1.2  # caches save traffic of small tensors
            assert 0 <= limit.headroom_ns <= each.gpu_ns
    assert report.mfu is not None
    assert 0 < report.mfu < 0.2


def test_rows_are_ranked_by_headroom_and_by_memory() -> None:
    report = backspot.locate(DATA / "vit.trace.json.gz")
    first = report.top(1, sort="headroom", by="pattern")[0]
    assert first.path == "blocks.*.attn"
    assert report.top(1, sort="memory")[0].path == "blocks.11.mlp.fc1"
    text = backspot.render.text.render_text(report, width=150, full=True)
    assert "Peaks of NVIDIA H200: 989 TFLOP/s bf16, 4,800 GB/s" in text
    assert "of peak" in text


def test_a_module_whose_work_is_mostly_unknown_gets_no_percentage() -> None:
    """The sorted ``index_put_`` of this dropout has no formula."""
    path = DATA.parent / "h200" / "vit_patch_drop.trace.json.gz"
    report = backspot.locate(path)
    row = report["patch_drop"].row
    assert row.work.unknown_share > 0.8
    limit = report.limit(row)
    assert limit.gbps is not None
    assert (limit.of_peak, limit.bound, limit.headroom_ns) == (None, None, None)


@pytest.mark.slow
def test_a_user_may_give_the_peaks_of_a_device(tmp_path: Path) -> None:
    path = DATA / "vit.trace.json.gz"
    slow = backspot.locate(path, peak_tflops=500, peak_gbps=1000)
    assert slow.peaks is not None
    assert slow.peaks.source == "the user"
    known = backspot.locate(path)
    assert slow.mfu == pytest.approx(known.mfu * 989.4 / 500)
    assert backspot.Report.load(slow.save(tmp_path / "r.json")) == slow
    with pytest.raises(backspot.UsageError, match="peak_gbps=0: give a number above 0"):
        backspot.locate(path, peak_gbps=0)


def test_an_unknown_device_gets_no_percentage() -> None:
    assert peaks_of("NVIDIA Imaginary 9000") is None
    assert peaks_of("NVIDIA Imaginary 9000", 100.0) is None
    assert peaks_of("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert peaks_of("NVIDIA A100-SXM4-40GB MIG 3g.20gb") is None
    assert peaks_of("NVIDIA Imaginary 9000", 100.0, 10.0) is not None
    report = backspot.locate(DATA / "vit.trace.json.gz")
    unknown = replace(report, peaks=None, mfu=None)
    limit = unknown.limit(unknown["head"].row)
    assert limit.tflops is not None
    assert (limit.of_peak, limit.headroom_ns, limit.bound) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("A100-SXM4-40GB", 312.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GB200", 2500.0),
        ("AMD Instinct MI300X OAM", 1307.4),
        ("AMD Instinct MI250X / MI250", 191.5),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI350X", 2306.9),
        ("AMD Instinct MI355X", 2516.6),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("Tesla T4", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_devices_are_known_by_their_whole_name(name: str, bf16: float | None) -> None:
    assert peaks_of(name).tflops.get("bf16") == bf16


@pytest.mark.parametrize(
    ("name", "fp32", "bf16", "fp8"),
    [
        ("3080", 29.8, 59.5, None),
        ("3090", 35.6, 71.2, None),
        ("4080", 48.7, 97.5, 194.9),
        ("4090", 82.6, 165.2, 330.3),
        ("5080", 56.3, 112.6, 225.1),
        ("5090", 104.8, 209.5, 419.0),
    ],
)
def test_consumer_cards_have_the_rates_of_their_papers(
    name: str, fp32: float, bf16: float, fp8: float | None
) -> None:
    tflops = peaks_of(f"NVIDIA GeForce RTX {name}").tflops
    assert tflops["fp32"] == tflops["tf32"] == pytest.approx(fp32, abs=0.06)
    assert tflops["bf16"] == tflops["fp16"] == pytest.approx(bf16, abs=0.06)
    assert tflops.get("fp8") == (None if fp8 is None else pytest.approx(fp8, abs=0.2))


def test_devices_that_share_the_work_share_its_utilisation() -> None:
    report = backspot.locate(DATA / "vit.trace.json.gz")
    alone, shared = (
        share_of_peak(report.modules, report.peaks, report.step_ns, devices) for devices in (1, 2)
    )
    assert alone is not None
    assert shared == pytest.approx(alone / 2)


GARBAGE: tuple[object, ...] = (
    None, -1, 1 << 70, 1e300, "", "[" * 3000, [], [[]], [None], {}, [[1 << 40] * 8], ["float", 3],
    ["[1, 2"], [["a"]], True,
)  # fmt: skip


def test_garbage_in_memory_and_inputs_gives_a_report_that_can_be_saved(tmp_path: Path) -> None:
    path = DATA.parent / "h200" / "embedding_duplicates.trace.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()))
    events = document["traceEvents"]
    operators = [event for event in events if "Input Dims" in event.get("args", {})]
    model = Trace()
    for at, event in enumerate(operators):
        time = round(1000 * event["ts"])
        model.memory(at % 50, 1000 if at % 100 < 50 else -1000, time, allocated=10**6)
    for block, event in zip(model.events, operators, strict=True):
        block.update(pid=event["pid"], tid=event["tid"])
    random = Random(7)
    for number in range(4):
        broken = copy.deepcopy([*events, *model.events])
        for event in random.sample(broken, len(broken) // 3):
            keys = [key for key in event.get("args", {}) if key.startswith(_DETAILS)]
            if keys:
                event["args"][random.choice(keys)] = random.choice(GARBAGE)
        broken_path = tmp_path / f"{number}.json"
        broken_path.write_text(json.dumps(document | {"traceEvents": broken, "profile_memory": 1}))
        report = backspot.locate(broken_path)
        assert report.memory
        saved = report.save(tmp_path / f"{number}.report.json")
        assert backspot.Report.load(saved) == report
        assert str(report)


_DETAILS = ("Input", "Concrete", "Total", "Addr", "Bytes", "Device")
