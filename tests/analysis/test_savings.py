"""What a step would save without a module, as reports say it."""

from __future__ import annotations

import copy
import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import backspot
from backspot.analysis.recording import Options, Recording
from backspot.pipeline import report_of
from backspot.render.markdown import to_markdown
from backspot.render.tables import to_csv
from backspot.render.text import render_text
from backspot.results.report import changed
from backspot.trace import read_events
from support.replays import MS, PATHS, US, Program
from support.synthetic import Trace

DATA = Path(__file__).parents[1] / "data"
SOME = ("two_streams", "sync_in_backward", "fsdp2.rank0", "vit_patch_drop", "launch_bound")


@pytest.fixture(scope="module")
def reports():
    return {name: backspot.locate(PATHS[name]) for name in SOME}


def said(report, **view) -> str:
    return " ".join(render_text(report, width=100, full=True, **view).split())


def beside_a_long_kernel(program: Program, name: str) -> Program:
    """``a`` computes for 5 ms, while ``b`` has a kernel of 20 ms on another stream."""
    for step, at in program.steps():
        program.node(step, "b", at, at + 100 * US)
        program.trace.kernel(at + 20 * US, at + 20 * MS, launch=at + 10 * US, stream=20, name=name)
        program.node(step, "a", at + 100 * US, at + 200 * US)
        program.trace.kernel(at + 120 * US, at + 5_120 * US, launch=at + 110 * US)
        program.call("cudaDeviceSynchronize", at + 500 * US, at + 20 * MS + 5 * US)
    return program


def waiting_for_the_host(program: Program) -> Program:
    for step, at in program.steps():
        program.node(step, "b", at, at + 8 * MS)
        program.trace.kernel(at + 1_010 * US, at + 2 * MS, launch=at + 1 * MS)
        program.node(step, "a", at + 8 * MS, at + 14 * MS)
        program.trace.kernel(at + 9_010 * US, at + 10 * MS, launch=at + 9 * MS)
    return program


def test_a_module_that_hides_behind_communication_saves_little_and_the_report_says_so(tmp_path):
    program = beside_a_long_kernel(Program(), "ncclDevKernel_AllReduce_Sum_f32")
    report = backspot.locate(program.save(tmp_path))
    row = report["a"].row
    assert row.wall_ns == pytest.approx(5 * MS, rel=0.05)
    assert row.saves.ns <= row.saves.high_ns < 2.5 * MS
    assert report.top(1, sort="saves")[0].path == "(communication)"
    text = said(report)
    assert "a takes 5.0 ms of the backward, but without it a step would take" in text
    assert text.count("other work takes that time anyway") == 1


def test_wall_time_that_is_the_profilers_own_cost_hides_behind_nothing(tmp_path):
    program = beside_a_long_kernel(Program(), "ncclDevKernel_AllReduce_Sum_f32")
    report = backspot.locate(program.save(tmp_path))
    most = replace(report.replayed_step, ns=report.step_ns // 100)
    assert "other work takes that time anyway" not in said(replace(report, replayed_step=most))


def test_two_computations_share_the_gpu_so_one_that_hides_may_save_its_time(tmp_path):
    report = backspot.locate(beside_a_long_kernel(Program(), "gemm").save(tmp_path))
    saves = report["a"].row.saves
    assert saves.ns < MS
    assert 4.9 * MS <= saves.high_ns < 7.5 * MS
    assert "other work takes that time anyway" not in said(report)


def test_where_the_gpu_decides_a_module_saves_its_gpu_time_forward_and_backward():
    report = backspot.locate(PATHS["ddp.rank0"])
    for row in report.top(4):
        parts = row.saves.parts
        assert row.saves.ns == pytest.approx(row.gpu_ns + parts["forward"], rel=0.02)
        assert parts["forward"] <= row.forward_ns
        assert parts["backward"] == pytest.approx(row.gpu_ns, rel=0.05)
        assert sum(parts.values()) == row.saves.ns


def test_where_the_host_decides_a_module_saves_its_host_time(tmp_path):
    report = backspot.locate(waiting_for_the_host(Program()).save(tmp_path))
    assert report["b"].row.saves.ns == pytest.approx(report["b"].row.cpu_ns, rel=0.05)
    assert report.what_if({"b": 0.5}).saves_ns == pytest.approx(4 * MS, rel=0.05)


def test_a_prediction_prints_as_a_sentence():
    assert str(backspot.results.WhatIf(24_698_846, 1_922_516, -434_546, 3_394_807)) == (
        "A step would take 24.7 ms: 1.9 ms less (uncertain, 0 ms to 3.4 ms), by a replay "
        "without the profiler"
    )
    assert "hardly less" in str(backspot.results.WhatIf(24_698_846, 0, 0, 3_394_807))


def test_many_steps_are_replayed_by_the_middle_ones(tmp_path, monkeypatch):
    path = waiting_for_the_host(Program(9)).save(tmp_path)
    every = backspot.locate(path)
    monkeypatch.setattr("backspot.analysis.replay.predict._ENOUGH", 1)
    some = backspot.locate(path)
    for one, other in zip(every.modules, some.modules, strict=True):
        if one.is_module:
            assert one.saves.ns == pytest.approx(other.saves.ns, abs=20 * US)
    assert [f.saves is None for f in every.findings] == [f.saves is None for f in some.findings]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_a_module_that_stays_as_it_is_saves_exactly_nothing(reports, name):
    report = reports[name]
    nothing = report.what_if({"**": 1.0})
    assert (nothing.saves_ns, nothing.low_ns, nothing.high_ns) == (0, 0, 0)
    assert nothing.step_ns == report.replayed_step.ns


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_two_modules_save_at_least_as_much_as_one(reports, name):
    report = reports[name]
    first, second, *_ = [row.path for row in report.top() if row.is_module]
    both = report.what_if({first: 0.0, second: 0.0})
    alone = [report.what_if({path: 0.0}) for path in (first, second)]
    assert both.saves_ns >= max(one.saves_ns for one in alone) - 2
    assert both.step_ns + both.saves_ns == report.replayed_step.ns


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_what_a_row_saves_is_within_its_range_and_that_of_all_modules_inside_is_its_total(
    reports, name
):
    report = reports[name]
    for row in report.modules:
        if row.saves is not None:
            assert 0 <= row.saves.low_ns <= row.saves.ns <= row.saves.high_ns
            assert row.total_saves.ns >= row.saves.ns - 2
    for finding in report.findings:
        saves = finding.saves
        assert saves is None or 0 <= saves.low_ns <= saves.ns <= saves.high_ns


@pytest.mark.slow
def test_a_folded_row_saves_what_its_modules_save_together(reports):
    report = reports["vit_patch_drop"]
    folded = {row.path: row for row in report.top(depth=2)}
    assert folded["blocks.0"].saves == report["blocks.0"].row.total_saves
    assert folded["blocks.0"].saves.ns == report.what_if({"blocks.0": 0.0}).saves_ns
    assert folded[""].saves == report[""].row.saves
    assert backspot.locate(PATHS["vit_patch_drop"], depth=2).top() == report.top(depth=2)
    # Savings do not add up, so nothing is said of other groups.
    assert {row.saves for row in report.top(by="class") if row.members > 1} == {None}


@pytest.mark.slow
def test_patterns_name_modules_and_inner_keys_count_more(reports):
    report = reports["vit_patch_drop"]
    each = report.what_if({f"blocks.{number}.attn": 0.0 for number in range(3)})
    assert report.what_if({"blocks.*.attn": 0.0}) == each
    spared = report.what_if({"blocks.*": 0.0, "blocks.*.attn": 1.0})
    assert 0 < spared.saves_ns < report.what_if({"blocks.*": 0.0}).saves_ns
    assert report.what_if({"VisionTransformer": 0.0}) == report.what_if({"": 0.0})


def test_unknown_names_and_impossible_factors_are_refused(reports):
    report = reports["vit_patch_drop"]
    for unknown in ("patch_dorp", "nothing.*"):
        with pytest.raises(KeyError, match="no module") as refused:
            report.what_if({unknown: 0.5})
        with pytest.raises(KeyError) as same:
            report[unknown]
        assert str(refused.value) == str(same.value)
    for factor in (-0.1, 1.1, "0.5", True, float("nan")):
        with pytest.raises(backspot.UsageError, match=r"from 0 \(free\) to 1"):
            report.what_if({"patch_drop": factor})
    with pytest.raises(backspot.UsageError, match="give a dict"):
        report.what_if("patch_drop")


def test_a_saved_report_keeps_savings_and_names_the_way_to_replay_again(reports, tmp_path):
    report = reports["vit_patch_drop"]
    loaded = backspot.Report.load(report.save(tmp_path / "report.json"))
    assert loaded == report
    assert loaded["patch_drop"].row.saves == report["patch_drop"].row.saves
    assert str(loaded) == str(report)
    with pytest.raises(backspot.UsageError, match=r"read from JSON .* locate the trace again"):
        loaded.what_if({"patch_drop": 0.5})


def test_why_a_step_cannot_be_replayed_is_said(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 8 * MS)
        program.trace.operator("aten::sort", at, at + 8 * MS, thread=9)
    report = backspot.locate(program.save(tmp_path))
    assert report.replayed_step is None
    assert {row.saves for row in report.modules} == {None}
    reason = "Several threads run operators at once"
    assert reason in report.not_replayed
    for full in (True, False):
        text = " ".join(render_text(report, width=100, full=full).split())
        assert f"saves –: not known. {reason}" in text
    markdown = to_markdown(report).decode()
    assert "| saves ms |" in markdown
    assert "| – |" in markdown
    table = csv.DictReader(to_csv(report).decode().splitlines())
    assert {row["saves_ns"] for row in table} == {""}
    with pytest.raises(backspot.UsageError, match=reason):
        report.what_if({"b": 0.5})
    ranked = said(report, view=backspot.render.view.View(sort="saves"))
    assert ranked.startswith("The step cannot be replayed")


def test_a_trace_alone_says_that_the_cost_of_the_profiler_was_measured_elsewhere(reports):
    report = reports["vit_patch_drop"]
    assert not report.replayed_step.fitted
    assert report.replayed_step.low_ns < report.replayed_step.ns < report.replayed_step.high_ns
    assert "cost of the profiler that was measured elsewhere" in said(report)
    assert "of 30.4 ms with the profiler, about 26.7 ms without it" in said(report)


def test_real_steps_that_are_longer_than_any_replay_leave_the_savings_of_the_trace(reports):
    alone = reports["launch_bound"]
    busy = Options(real_steps=(2 * alone.step_ns,) * 10)
    report = report_of(Recording.of(read_events(PATHS["launch_bound"])), busy)
    assert not report.replayed_step.fitted
    assert {row.path: row.saves for row in report.modules} == {
        row.path: row.saves for row in alone.modules
    }
    assert "so roughly: real steps are longer" in said(report)


def test_an_empty_pass_has_no_savings_to_rank(tmp_path):
    trace = Trace()
    trace.node("MulBackward0", 0, 10, seq=0)
    report = backspot.locate(trace.save(tmp_path / "trace.json"))
    assert report.top(sort="saves") == report.top()


@pytest.mark.slow
def test_no_step_of_a_damaged_trace_is_replayed_as_longer_than_it_was(tmp_path):
    with gzip.open(DATA / "work" / "lstm.trace.json.gz") as file:
        whole = json.load(file)
    replayed = 0
    for seed in range(10, 24):
        random = Random(seed)
        trace = copy.deepcopy(whole)
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        for _ in range(random.randrange(1, 4)):
            kind = random.choice(events)["cat"]
            like = [event for event in events if event["cat"] == kind]
            for event in random.sample(like, min(20, len(like))):
                event["ts"] += random.choice((-1e6, -1e5, 1e5, 1e6))
        path = tmp_path / f"{seed}.json"
        path.write_text(json.dumps(trace), encoding="utf-8")
        report = backspot.locate(path)
        if step := report.replayed_step:
            replayed += 1
            assert step.high_ns <= 1.05 * max(report.step_ns_by_step)
            assert all(row.saves.high_ns <= step.ns for row in report.modules if row.saves)
    assert replayed


@pytest.mark.parametrize("name", ["vit_patch_drop", "launch_bound"])
def test_repeated_layers_save_what_all_of_them_together_would(reports, name):
    report = reports[name]
    rows = [row for row in report.top(by="pattern") if row.members > 1 and row.saves]
    inside = {row.path.rpartition(".")[0] for row in report.top(by="pattern")}
    leaves = [row for row in rows if row.path not in inside][:4]
    assert leaves
    for row in leaves:
        together = report.what_if({row.path: 0.0})
        assert (row.saves.ns, row.saves.high_ns) == (together.saves_ns, together.high_ns)
        assert sum(row.saves.parts.values()) == row.saves.ns


def test_folded_layers_claim_no_saving_of_the_layers_alone(reports):
    report = reports["vit_patch_drop"]
    assert report.layers
    folded = {row.label: row.saves for row in report.top(depth=2, by="pattern") if row.members > 1}
    assert folded
    assert not any(folded.values())


def test_the_answer_names_a_module_that_costs_most_in_its_forward_alone(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 3 * MS)
        program.node(step, "a", at + 3 * MS, at + 5 * MS)
        program.trace.forward("metric", "Accuracy", at + 6 * MS, at + 26 * MS)
        program.trace.operator("aten::eq", at + 7 * MS, at + 25 * MS)
    report = backspot.locate(program.save(tmp_path))
    assert (report.answer.kind, report.answer.path) == ("module", "metric")
    assert report.answer.saves == report["metric"].row.saves
    first, second = said(report).split(" b (M) ", 1)
    assert first.startswith("metric (Accuracy) takes ")
    assert "most of it in its forward; without it, a step would take 20.0 ms less" in first
    assert second.startswith("takes 60% of the backward: 3.0 ms")
    short = [
        replace(row, forward_ns=MS // 100) if row.path == "metric" else row
        for row in report.modules
    ]
    noisy = changed(report, modules=tuple(short))  # a module of 10 us that would save 20 ms
    assert noisy.answer.path != "metric"


def test_a_step_without_a_copy_from_pageable_memory_is_shorter_by_the_copy():
    # The call stages what it copies, and returns shortly before the device has the last of it.
    found = {one.rule: one for one in backspot.locate(PATHS["pageable_copies"]).findings}
    copy = found["pageable-copy"]
    assert 0.9 * copy.wall_ns <= copy.saves.ns <= copy.wall_ns
