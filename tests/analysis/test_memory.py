"""Memory by module: the peak to the byte, what modules keep, and what checkpointing would free."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

import backspot
from backspot.results.report import Report
from tests.support.synthetic import Trace

DATA = Path(__file__).parents[1] / "data" / "memory"
KB = 1000


class Model:
    """Two layers and a loss, by hand: each has 10 ns of forward; the allocator starts at 500 kB."""

    def __init__(self) -> None:
        self.trace, self.allocated = Trace(), 500 * KB
        self.live: dict[int, int] = {}

    def comes(self, address: int, size: int, at: int, thread: int = 1, device: int = 0) -> None:
        self.allocated += size
        self.live[address] = size
        self.trace.memory(
            address, size, at, allocated=self.allocated, thread=thread, device=device, reserved=900
        )

    def goes(self, address: int, at: int, thread: int = 2, size: int = 0) -> None:
        size = self.live.pop(address, size)
        self.allocated -= size
        self.trace.memory(address, -size, at, allocated=self.allocated, thread=thread, reserved=900)

    def step(self, start: int, *, leak: bool = False) -> None:
        trace, seq = self.trace, start
        trace.forward("", "Net", start, start + 50)
        trace.forward("a", "Linear", start + 10, start + 20)
        trace.operator("aten::mul", start + 11, start + 19, seq=seq)
        trace.forward("b", "Linear", start + 30, start + 40)
        trace.operator("aten::mul", start + 31, start + 39, seq=seq + 1)
        self.comes(1, 100 * KB, start + 12)  # saved by a
        self.comes(2, 20 * KB, start + 13)  # a's workspace
        self.goes(2, start + 14, thread=1)
        self.comes(3, 30 * KB, start + 18)  # a's output, which only b saves
        self.comes(4, 40 * KB, start + 32)  # saved by b
        if leak:
            self.comes(1000 + start, 7 * KB, start + 33)
        trace.node("MulBackward0", start + 60, start + 70, seq=seq + 1)
        self.comes(5, 60 * KB, start + 62, thread=2)  # the gradient of b's input
        self.comes(6, 5 * KB, start + 63, thread=2)  # the gradient of b's parameter
        self.goes(4, start + 68)
        self.goes(3, start + 69)
        trace.node("MulBackward0", start + 71, start + 80, seq=seq)
        self.comes(7, 15 * KB, start + 73, thread=2)  # the gradient of a's parameter
        self.goes(1, start + 78)
        self.goes(5, start + 79)
        trace.annotation("Optimizer.step#SGD.step", start + 90, start + 95)
        self.comes(8, 2 * KB, start + 91)
        self.goes(8, start + 93, thread=1)
        trace.annotation("Optimizer.zero_grad#SGD.zero_grad", start + 96, start + 98)
        self.goes(6, start + 97, thread=1)
        self.goes(7, start + 98, thread=1)

    def report(self, folder: Path) -> Report:
        return backspot.locate(self.trace.save(folder / "t.json"))


@pytest.fixture
def report(tmp_path: Path) -> Report:
    model = Model()
    model.step(1000)
    model.step(2000)
    return model.report(tmp_path)


def test_the_peak_is_split_by_module_and_kind_to_the_byte(report: Report) -> None:
    (device,) = report.memory
    assert device.peak_bytes == 735 * KB
    assert {(s.path, s.kind): s.bytes for s in device.live} == {
        ("(before the recording)", "before"): 500 * KB,
        ("a", "activation"): 130 * KB,
        ("b", "activation"): 40 * KB,
        ("b", "backward"): 60 * KB,
        ("b", "gradient"): 5 * KB,
    }
    assert (device.peak_path, device.peak_phase, device.peak_step) == ("b", "backward", 0)
    assert device.peak_ns == 63
    assert (device.before_bytes, device.reserved_bytes) == (500 * KB, 900)
    assert device.least_by_step == (500 * KB,)


def test_a_module_keeps_what_its_backward_finds(report: Report) -> None:
    a, b, net = (report[path].row.memory for path in ("a", "b", ""))
    assert a
    assert b
    assert net
    assert (a.kept_bytes, b.kept_bytes, net.kept_bytes) == (130 * KB, 40 * KB, 0)
    assert (net.total_kept_bytes, net.total_at_peak_bytes) == (170 * KB, 235 * KB)
    assert (a.peak_bytes, b.peak_bytes) == (130 * KB, 105 * KB)
    assert (net.peak_bytes, net.total_peak_bytes) == (0, 235 * KB)


def test_checkpointing_frees_what_a_modules_own_backward_needs_but_not_its_output(
    report: Report,
) -> None:
    a, b = report["a"].row.memory, report["b"].row.memory
    assert a
    assert b
    assert (a.checkpoint_frees_bytes, b.checkpoint_frees_bytes) == (100 * KB, 40 * KB)


def test_groups_sum_what_adds_up_and_give_no_peak(report: Report) -> None:
    by_class = next(row for row in report.top(by="class") if row.class_name == "Linear")
    assert by_class.memory is not None
    assert by_class.memory.kept_bytes == by_class.memory.total_kept_bytes == 170 * KB
    assert by_class.memory.checkpoint_frees_bytes == 140 * KB
    assert by_class.memory.peak_bytes is None
    (root,) = (row for row in report.top(depth=0) if row.is_module)
    assert root.memory is not None
    assert (root.memory.kept_bytes, root.memory.peak_bytes) == (170 * KB, 235 * KB)


def test_devices_and_the_host_count_for_themselves(tmp_path: Path) -> None:
    model = Model()
    model.step(1000)
    model.trace.memory(1, 9 * KB, 1015, allocated=9 * KB, device=1)
    model.trace.memory(1, 3 * KB, 1016, allocated=3 * KB, device=-1)
    report = model.report(tmp_path)
    peaks = [(one.name, one.peak_bytes, one.before_bytes) for one in report.memory]
    assert peaks == [("GPU 0", 735 * KB, 500 * KB), ("GPU 1", 9 * KB, 0), ("CPU", 3 * KB, 0)]
    memory = report["a"].row.memory
    assert memory is not None
    assert memory.kept_bytes == 139 * KB  # without the host's


def test_what_the_allocator_counts_and_no_block_explains_is_said(tmp_path: Path) -> None:
    model = Model()
    model.step(1000)
    model.allocated += 1000 * KB  # NCCL's, say
    model.step(2000)
    (device,) = model.report(tmp_path).memory
    assert device.live[0].path == "(not accounted for)"
    assert device.live[0].bytes == 1000 * KB
    assert sum(share.bytes for share in device.live) == device.peak_bytes == 1735 * KB


def test_a_trace_without_memory_has_none_in_any_form(tmp_path: Path) -> None:
    model = Model()
    model.step(1000)
    model.trace.events = [event for event in model.trace.events if event["ph"] != "i"]
    report = model.report(tmp_path)
    assert report.memory == ()
    assert report["a"].row.memory is None
    for suffix in (".json", ".csv", ".md"):
        assert b'"memory"' not in report.save(tmp_path / f"r{suffix}").read_bytes()


def test_saved_reports_keep_it_and_must_not_contradict_themselves(
    report: Report, tmp_path: Path
) -> None:
    path = report.save(tmp_path / "r.json")
    assert Report.load(path) == report
    path.write_text(path.read_text().replace('"peak_bytes": 735000', '"peak_bytes": 735001'))
    with pytest.raises(backspot.NotATraceError, match="does not sum to its peak_bytes"):
        Report.load(path)


def test_every_form_shows_it(report: Report, tmp_path: Path) -> None:
    assert "Memory of GPU 0: peak 735 kB" in str(report)
    text = report.save(tmp_path / "r.txt").read_text("utf-8")
    assert "170 kB activations" in " ".join(text.split())
    head, first, *_ = report.save(tmp_path / "r.csv").read_text().splitlines()
    assert head.endswith('"checkpoint_frees_bytes"')
    assert first.count(",") == head.count(",")
    for suffix in (".md", ".html"):
        page = report.save(tmp_path / f"r{suffix}").read_text()
        assert "emory of GPU 0: peak 735 kB" in page


@pytest.mark.parametrize(
    ("name", "before", "peak"),
    [("vit", 1_478_590_976, 3_555_418_112), ("llama", 892_164_096, 1_548_002_304)],
)
def test_the_peak_is_what_pytorch_counted_on_a_gpu(name: str, before: int, peak: int) -> None:
    """The figures are ``torch.cuda.memory_allocated()`` and ``max_memory_allocated()``."""
    report = backspot.locate(DATA / f"{name}.trace.json.gz")
    device = report.memory[0]
    assert (device.before_bytes, device.peak_bytes) == (before, peak)
    assert sum(share.bytes for share in device.live) == peak
    of_rows = sum(row.memory.at_peak_bytes for row in report.modules if row.memory)
    named = {row.path for row in report.modules}
    recorded = [share for share in device.live if share.path in named]
    assert of_rows == sum(share.bytes for share in recorded)
    assert max(device.timeline.allocated_bytes) == peak


def test_the_logits_and_their_gradient_fill_a_language_models_peak() -> None:
    report = backspot.locate(DATA / "llama.trace.json.gz")
    held: Counter[str] = Counter()
    for share in report.memory[0].live:
        held[share.kind] += share.bytes
    assert held["backward"] == 524_288_000
    # Its layers are checkpointed already: checkpointing them again frees nothing.
    layer = report["model.layers.3"].row.memory
    assert layer is not None
    assert layer.checkpoint_frees_bytes == 0


@pytest.mark.slow
def test_broken_memory_events_are_passed_over(tmp_path: Path) -> None:
    document = json.loads(gzip.decompress((DATA / "vit.trace.json.gz").read_bytes()))
    blocks = [event for event in document["traceEvents"] if event["name"] == "[memory]"]
    blocks[0]["args"] = {}
    blocks[1]["args"] = None
    blocks[2]["args"]["Bytes"] = None
    blocks[3]["args"]["Addr"] = 1 << 70
    blocks[4]["ts"] = None
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    (device,) = backspot.locate(path).memory
    assert device.peak_bytes == 3_555_418_112
    assert sum(share.bytes for share in device.live) == device.peak_bytes


# Findings ----------------------------------------------------------------------------------------


def rules_of(report: Report) -> dict[str, backspot.Finding]:
    return {one.rule: one for one in report.findings if one.held_bytes is not None}


def test_what_a_module_leaves_behind_in_each_step_is_found(tmp_path: Path) -> None:
    model = Model()
    for start in (1000, 2000, 3000):
        model.step(start, leak=True)
    report = model.report(tmp_path)
    finding = rules_of(report)["held-over-steps"]
    assert (finding.path, finding.held_bytes) == ("b", 7 * KB)
    assert report.memory[0].least_by_step == (507 * KB, 514 * KB)
    assert "7.00 kB" in str(report)
    assert Report.load(report.save(tmp_path / "r.json")) == report


def test_what_only_some_steps_leave_behind_is_no_growth(tmp_path: Path) -> None:
    model = Model()
    for start in (1000, 2000, 3000):
        model.step(start, leak=start == 1000)
    assert "held-over-steps" not in rules_of(model.report(tmp_path))


@pytest.mark.slow
def test_reserved_memory_that_no_tensor_uses_is_found() -> None:
    llama = backspot.locate(DATA / "llama.trace.json.gz")
    assert rules_of(llama)["fragmentation"].held_bytes == 5_012_193_280 - 1_548_002_304
    assert "fragmentation" not in rules_of(backspot.locate(DATA / "vit.trace.json.gz"))


def test_the_findings_of_the_recorded_models() -> None:
    llama = rules_of(backspot.locate(DATA / "llama.trace.json.gz"))
    assert set(llama) == {"fragmentation", "logits"}
    assert llama["logits"].held_bytes == 786_432_512
    vit = rules_of(backspot.locate(DATA / "vit.trace.json.gz"))
    assert set(vit) == {"kept-pointwise"}
