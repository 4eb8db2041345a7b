"""Which rules judge a trace."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import backspot
from backspot.analysis.findings import Evidence, Found, all_rules, find_all
from backspot.analysis.findings.observations import launching
from backspot.analysis.parts import RULES
from backspot.analysis.recording import Options, Recording
from backspot.pipeline import report_of
from backspot.results.findings import Finding, Saving, in_order
from backspot.trace import read_events
from support.synthetic import Trace

DATA = Path(__file__).parents[1] / "data"


def test_all_rules_but_those_for_a_cpu_look_at_a_trace_of_a_gpu() -> None:
    on_gpu = backspot.locate(DATA / "h200" / "vit_patch_drop.trace.json.gz")
    of_gpus = {rule.name for rule in all_rules() if "cuda" in rule.devices}
    every = [rule for of_part in RULES for rule in of_part()]
    of_others = {rule.name for rule in every} - {rule.name for rule in all_rules()}
    assert of_gpus | of_others == set(on_gpu.rules)
    needy = {rule.name: rule.needs for rule in every if rule.needs}
    lacks = {rule: state for rule, state in on_gpu.rules.items() if state.startswith("needs")}
    assert lacks == {rule: f"needs {need}" for rule, (need,) in needy.items() if rule in lacks}
    assert "needs stacks" in lacks.values()
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

    def found(real_ns: int) -> dict[str, str]:
        timed = report_of(recording, Options(real_steps=(real_ns,)))
        return {finding.rule: finding.seen for finding in timed.findings}

    busy = sum(phase.busy_ns for phase in report.phases)
    idle = found(10 * busy)
    assert {"launch-bound", "small-batch"} <= set(idle)
    assert "Without the profiler, the GPU is busy for 10% of the step." in idle["launch-bound"]
    assert not {"launch-bound", "small-batch"} & set(found(busy))


@pytest.mark.parametrize(("times", "waits"), [(10, True), (1.1, False)])
def test_no_span_launches_too_slowly_for_a_gpu_that_is_busy_for_nine_tenths(times, waits) -> None:
    path = DATA / "h200" / "launch_bound.trace.json.gz"
    recording = Recording.of(read_events(path))
    busy = sum(phase.busy_ns for phase in backspot.locate(path).phases)
    report = report_of(recording, Options(real_steps=(int(times * busy),)))
    assert launching(Evidence(recording, report)).any() == waits


@pytest.mark.parametrize(
    ("reserved", "left"),
    [
        (None, False),
        ((60_000_000_000, 80_000_000_000), False),
        ((9_500_000_000, 80_000_000_000), True),
    ],
)
def test_checkpointing_says_where_memory_is_left(
    reserved: tuple[int, int] | None, left: bool
) -> None:
    path = DATA / "findings" / "recompute_tower_recommender.trace.json.gz"
    recording, report = Recording.of(read_events(path)), backspot.locate(path)
    evidence = Evidence(recording, report, reserved)
    found = {one.rule: one for one in find_all(evidence).findings}["recompute"]
    assert ("while memory is left" in found.title) is left
    assert ("At most 9.5 of 80.0 GB" in found.seen) is left


def test_a_rule_that_would_need_shapes_for_what_it_sees_says_so(tmp_path) -> None:
    """A convolution in fp32 takes the same way on purpose, so that its type decides."""
    for name, state in (("general_fp64", "needs shapes"), ("lstm_layer", "nothing")):
        text = gzip.decompress((DATA / "findings" / f"{name}.trace.json.gz").read_bytes()).decode()
        path = tmp_path / f"{name}.json"
        path.write_text(re.sub(r'"Input (Dims|type|Strides)"', r'"No \1"', text))
        assert backspot.locate(path).rules["slow-path"] == state


def test_waits_within_a_convolution_are_those_of_a_search_for_kernels(tmp_path) -> None:
    text = gzip.decompress((DATA / "host" / "clip_each.trace.json.gz").read_bytes()).decode()
    path = tmp_path / "t.json"
    for caller, searches in (("aten::item", False), ("aten::cudnn_convolution", True)):
        path.write_text(text.replace('"aten::item"', f'"{caller}"'))
        (found,) = (one for one in backspot.locate(path).findings if one.rule == "host-waits")
        assert ("torch.backends.cudnn.benchmark" in found.remedy) is searches


def test_a_function_around_the_model_takes_at_least_what_it_saves() -> None:
    """The host launches in it, and the GPU works for it: both are gone without the function."""
    report = backspot.locate(DATA / "host" / "clip_each.trace.json.gz")
    (found,) = (one for one in report.findings if one.rule == "code-around-model")
    idle = sum(one.idle_ns for one in report.host if one.function == "clip_each")
    assert found.saves is not None
    assert idle < found.wall_ns
    assert found.saves.ns <= found.wall_ns


def test_a_bound_all_over_the_step_comes_behind_a_certain_gain_in_one_place() -> None:
    some = backspot.locate(DATA / "findings" / "trip_gradient_gpt.trace.json.gz")
    one, step = some.findings[0], some.replayed_step

    def finding(rule: str, ns: int, places: int, *, at_best: bool) -> Finding:
        where = tuple(replace(one.places[0], wall_ns=one.wall_ns // places) for _ in range(places))
        saves = Saving(ns, ns, ns, at_best=at_best)
        return replace(one, rule=rule, places=where, saves=saves, tried=None)

    certain = finding("certain", 10_000_000, 1, at_best=False)
    for places, first in ((1, "bound"), (8, "certain")):
        found = in_order([certain, finding("bound", 30_000_000, places, at_best=True)], step)
        assert found[0].rule == first


def test_a_view_is_no_work_of_a_processor(tmp_path) -> None:
    """One that takes long was held up, or keeps its Python stack in anomaly mode."""
    name = "cpu_suppression_detector.trace.json.gz"
    text = gzip.decompress((DATA / "findings" / name).read_bytes()).decode()
    path = tmp_path / "t.json"
    for operator, there in (("aten::sort", True), ("aten::view", False)):
        path.write_text(text.replace('"aten::sort"', f'"{operator}"'))
        (found,) = (one for one in backspot.locate(path).findings if one.rule == "cpu-operators")
        assert (operator in found.operators) is there


def test_launches_of_another_cause_are_not_found_twice() -> None:
    path = DATA / "findings" / "launch_cells_recommender.trace.json.gz"
    recording, report = Recording.of(read_events(path)), backspot.locate(path)
    evidence = Evidence(recording, report)
    (rule,) = (one for one in all_rules() if one.name == "launch-bound")
    ownership = evidence.ownership
    owners = [ownership.owners.path(owner) for owner in ownership.owner.tolist()]
    cells = evidence.costs.places_of_spans(np.array([path == "lstm.cell" for path in owners]))
    loop = Found("a loop", "", "", "", cells.wall_ns, cells.places, 2, removable=cells.removable)
    alone, beside = rule.find(evidence, []), rule.find(evidence, [loop])
    assert isinstance(alone, Finding)
    assert alone.path == "lstm.cell"
    assert not isinstance(beside, Finding) or "lstm.cell" not in {p.path for p in beside.places}


@pytest.mark.parametrize("checked", [True, False])
def test_waits_of_anomaly_mode_are_found_once(tmp_path, checked: bool) -> None:
    """A hook that looks for NaN by itself is a wait like others."""
    us, engine, trace = 1_000, 2, Trace()
    trace.annotation("ProfilerStep#1", 0, 4_000 * us)
    trace.forward("layer", "Layer", 10 * us, 100 * us)
    trace.operator("aten::linear", 20 * us, 90 * us, seq=0)
    trace.node("AddmmBackward0", 300 * us, 2_000 * us, seq=0)
    any_true = "aten::_is_any_true" if checked else "aten::any"
    for name, start, end in (("aten::isnan", 500, 520), (any_true, 520, 540)):
        trace.operator(name, start * us, end * us, thread=engine)
        trace.kernel((end + 5) * us, (end + 10) * us, launch=(start + 5) * us)
    trace.operator("aten::item", 600 * us, 1_900 * us, thread=engine)
    trace.event("cuda_runtime", "cudaStreamSynchronize", 700 * us, 1_800 * us, engine)
    trace.kernel(2_200 * us, 3_900 * us, launch=1_950 * us)
    rules = {one.rule: one for one in backspot.locate(trace.save(tmp_path / "t.json")).findings}
    assert ("anomaly-mode" in rules, "host-waits" in rules) == (checked, not checked)
    if checked:
        assert rules["anomaly-mode"].path == "layer"


@pytest.mark.parametrize(
    ("name", "title", "remedy"),
    [
        ("findings/dense_items_recommender", "for the whole table", "sparse=True"),
        ("h200/embedding_duplicates", "to few rows", "padding_idx"),
    ],
)
def test_a_small_table_is_not_told_to_be_sparse(name: str, title: str, remedy: str) -> None:
    found = backspot.locate(DATA / f"{name}.trace.json.gz").findings
    (table,) = (one for one in found if one.rule == "dense-embedding-gradient")
    assert title in table.title
    assert remedy in table.remedy


@pytest.mark.parametrize(
    ("once_each", "in_turn", "found"),
    [(200, 500, True), (500, 200, False), (900, 800, False)],
    ids=["few rows", "many rows", "a large batch"],
)
def test_an_embedding_whose_gradients_go_to_many_rows_is_as_usual(
    tmp_path: Path, once_each: int, in_turn: int, found: bool
) -> None:
    trace, us = Trace(), 1_000
    for step in range(2):
        begin = step * 4_000 * us
        trace.forward("table", "Embedding", begin, begin + 60 * us)
        trace.operator("aten::embedding", begin + 10 * us, begin + 50 * us, seq=step)
        trace.node("EmbeddingBackward0", begin + 100 * us, begin + 200 * us, seq=step)
        time = begin + 210 * us
        for name, length in (
            ("DeviceRadixSortOnesweepKernel", 300),
            ("void at::native::compute_grad_weight<float, long>(long const*)", once_each),
            ("void at::native::sum_and_scatter<float, long>(long const*)", in_turn),
        ):
            trace.kernel(time, time + length * us, launch=begin + 120 * us, name=name)
            time += length * us
        trace.annotation(f"ProfilerStep#{step}", begin, begin + 3_900 * us)
    report = backspot.locate(trace.save(tmp_path / "trace.json"))
    tables = [one for one in report.findings if one.rule == "dense-embedding-gradient"]
    assert bool(tables) is found
    for one in tables:
        assert one.path == "table"
        # The sort and one look at each gradient are needed in any case.
        assert one.wall_ns == in_turn * us


@pytest.mark.parametrize(
    ("calls", "kinds", "length", "found"),
    [(20, 3, 4, True), (12, 3, 4, False), (20, 1, 4, False), (20, 3, 60, False)],
    ids=["a loop", "a few calls", "one activation for all layers", "long operators"],
)
def test_a_module_that_one_call_of_another_calls_again_and_again_is_a_loop(
    tmp_path: Path, calls: int, kinds: int, length: int, found: bool
) -> None:
    trace, us, time, number = Trace(), 1_000, 0, 0
    for step in range(2):
        begin, first = time, number
        trace.forward("outer", "Outer", time, time + calls * (kinds * length + 4) * us)
        for _ in range(calls):
            trace.forward("outer.inner", "Inner", time, time + (kinds * length + 2) * us)
            for kind in ("mul", "sin", "exp")[:kinds]:
                trace.operator(f"aten::{kind}", time, time + length * us, seq=number)
                time, number = time + length * us, number + 1
            time += 4 * us
        for node in reversed(range(first, number)):
            name = f"{('Mul', 'Sin', 'Exp')[(node - first) % kinds]}Backward0"
            trace.node(name, time, time + length * us, seq=node)
            time += (length + 1) * us
        trace.annotation(f"ProfilerStep#{step}", begin, time)
        time += us
    report = backspot.locate(trace.save(tmp_path / "trace.json"))
    loops = [one for one in report.findings if one.rule == "operator-loop"]
    assert bool(loops) is found
    for one in loops:
        assert one.places[0].path == "outer.inner"
        assert f"outer (Outer) calls outer.inner (Inner) {calls} times" in one.seen
        assert one.remedy.startswith("Where no call needs what another returns")
