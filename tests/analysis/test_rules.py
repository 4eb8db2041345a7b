"""Which rules judge a trace."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import pytest

import backspot
from backspot.analysis.findings import Evidence, all_rules, find_all, rules_about_memory
from backspot.analysis.recording import Recording
from backspot.analysis.typical import every_step
from backspot.trace import read_events

DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the tests run outside of the checkout")
def test_the_page_says_which_devices_a_rule_looks_at() -> None:
    table = re.findall(r"^\| \[([a-z-]+)\]\(#\1\) \| .* \| (.+) \|$", PAGE.read_text(), re.M)
    words = {
        ("cpu",): "CPU",
        ("cuda",): "GPU",
        ("cpu", "cuda"): "CPU and GPU",
        ("cpu", "cuda", "other"): "any device",
    }
    assert dict(table) == {rule.name: words[tuple(rule.devices)] for rule in all_rules()}


def test_all_rules_but_those_for_a_cpu_look_at_a_trace_of_a_gpu() -> None:
    on_gpu = backspot.locate(DATA / "h200" / "vit_patch_drop.trace.json.gz")
    of_gpus = {rule.name for rule in all_rules() if "cuda" in rule.devices}
    of_memory = {rule.name for rule in rules_about_memory()}
    assert of_gpus | of_memory == set(on_gpu.rules)
    needy = {rule.name: rule.needs for rule in (*all_rules(), *rules_about_memory()) if rule.needs}
    lacks = {rule: state for rule, state in on_gpu.rules.items() if state.startswith("needs")}
    assert lacks == {rule: f"needs {need}" for rule, (need,) in needy.items() if rule in lacks}
    assert set(lacks.values()) == {"needs stacks", "needs memory"}
    assert {one.rule for one in on_gpu.findings} == {
        rule for rule, state in on_gpu.rules.items() if state == "found"
    }


def test_of_a_trace_that_is_cut_short_no_rule_has_looked(tmp_path) -> None:
    text = gzip.decompress((DATA / "h200" / "vit_patch_drop.trace.json.gz").read_bytes())
    path = tmp_path / "t.json"
    path.write_bytes(text[: len(text) * 6 // 10])
    assert "found" not in (states := set(backspot.locate(path).rules.values()))
    assert "nothing" not in states
    assert "the trace is cut short" in states


def test_a_gpu_that_is_busy_without_the_profiler_waits_for_no_host() -> None:
    """The profiler slows the host: what decides is the step without the profiler."""
    path = DATA / "h200" / "launch_bound.trace.json.gz"
    recording, report = Recording.of(read_events(path)), backspot.locate(path)

    def found(unprofiled_step_ns: int) -> dict[str, str]:
        timed = replace(report, unprofiled_step_ns=unprofiled_step_ns)
        of = recording.events, recording.ledger, timed, every_step(timed.steps), recording.waits
        judged = find_all(Evidence(*of))
        return {finding.rule: finding.seen for finding in judged.findings}

    busy = sum(phase.busy_ns for phase in report.phases)
    idle = found(10 * busy)
    assert {"launch-bound", "small-batch"} <= set(idle)
    assert "Without the profiler, the GPU is busy for 10% of the step." in idle["launch-bound"]
    assert not {"launch-bound", "small-batch"} & set(found(busy))


@pytest.mark.parametrize(
    ("memory", "left"), [("", False), ("60.0 of 80.0", False), ("9.5 of 80.0", True)]
)
def test_checkpointing_says_where_memory_is_left(memory: str, left: bool) -> None:
    path = DATA / "findings" / "recompute_tower_recommender.trace.json.gz"
    recording, report = Recording.of(read_events(path)), backspot.locate(path)
    known = replace(report, recorded={"memory": f"{memory} GB"} if memory else {})
    of = recording.events, recording.ledger, known, every_step(known.steps), recording.waits
    (found,) = (one for one in find_all(Evidence(*of)).findings if one.rule == "recompute")
    assert ("while memory is left" in found.title) is left
    assert ("At most 9.5 of 80.0 GB" in found.seen) is left
