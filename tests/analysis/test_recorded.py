"""What a report says of where, when and how its trace was recorded."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import backspot
from backspot.analysis.recorded import find_recorded
from backspot.analysis.recording import Recording
from backspot.trace import read_events
from support.h200 import path_of, report_of
from support.synthetic import Trace


def test_a_report_names_its_devices_and_the_time():
    assert report_of("vit_patch_drop").recorded == {
        "device": "NVIDIA H200",
        "time": "2026-11-20 22:53 UTC",
    }
    assert report_of("model_parallel").recorded["device"] == "2 × NVIDIA H200"


def test_what_a_trace_does_not_have_is_left_out(tmp_path):
    trace = Trace()
    trace.forward("", "Net", 0, 100_000)
    trace.operator("aten::mul", 2_000, 3_000, seq=0)
    trace.node("MulBackward0", 220_000, 230_000, seq=0)
    assert backspot.locate(trace.save(tmp_path / "t.json")).recorded == {}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (["/home/me/train.py", "--lr", "0.1", "a b"], "train.py --lr 0.1 'a b'"),
        (
            ["train.py", "--wandb-api-key=abc", "--steps", "9"],
            "train.py --wandb-api-key=… --steps 9",
        ),
        (["train.py", "--token", "abc"], "train.py --token …"),
        (["/env/ipykernel_launcher.py", "-f", "x.json"], ""),
        (["-c"], ""),
        ([], ""),
    ],
)
def test_a_live_report_names_the_command_without_secrets(line, shown, monkeypatch):
    from backspot.analysis.attribution.ownership import attribute
    from backspot.analysis.recorded import find_recorded
    from backspot.trace import read_events

    monkeypatch.setattr(sys, "argv", line)
    events = read_events(path_of("sync_in_backward"))
    found = find_recorded(events, attribute(events), live=True)
    assert found.get("command", "") == shown


def test_the_page_says_it_and_a_saved_report_keeps_it(tmp_path):
    report = report_of("vit_patch_drop")
    page = report.save(tmp_path / "report.html").read_text("utf-8")
    assert f"NVIDIA H200 · 2026-11-20 22:53 UTC · Backspot {backspot.__version__}" in page
    assert backspot.Report.load(report.save(tmp_path / "r.json")).recorded == report.recorded


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_live_report_says_how_much_memory_of_the_gpu_was_needed(on_gpu, monkeypatch):
    torch = pytest.importorskip("torch")
    ways = {
        "is_initialized": on_gpu,
        "current_device": 0,
        "get_device_properties": SimpleNamespace(total_memory=80_000_000_000),
        "max_memory_reserved": 9_500_000_000,
    }
    for name, value in ways.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    recording = Recording.of(read_events(path_of("vit_patch_drop")))
    recorded = find_recorded(recording.events, recording.ownership, live=True)
    assert recorded.get("memory") == ("9.5 of 80.0 GB" if on_gpu else None)
