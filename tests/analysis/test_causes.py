"""A price is that of the cause: of what a remedy takes away, and of nothing else around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

import backspot
from backspot import Finding, Report
from backspot.analysis.findings import Evidence, Found, Removable, all_rules, find_all
from backspot.analysis.recording import Recording
from backspot.analysis.replay.changes import free
from backspot.analysis.replay.predict import predict
from backspot.analysis.replay.replayable import Refusal
from support.choice import slow_except
from support.recordings import DATA, IN_ONE_WORKER, recording_of, report_of
from support.synthetic import Trace

pytestmark = IN_ONE_WORKER

US, MS = 1_000, 1_000_000
TRACES = sorted(
    str(path.relative_to(DATA))
    for folder in ("findings", "h200", "host", "optimizers", "loops", "work", "foreign", "ranks")
    for path in DATA.joinpath(folder).rglob("*.json.gz")
    if "forward_only" not in path.name and "cuda_graph_step" not in path.name
)
WHOLE_CALLS = {rule.name for rule in all_rules() if rule.whole_calls}


@cache
def causes(name: str) -> tuple[Recording, Report, list[Found]]:
    """A recording, its report, and what its rules find before it is replayed."""
    recording = recording_of(DATA / name).whole
    try:
        report = report_of(DATA / name)
    except backspot.BackspotError:
        pytest.skip("this trace has no report")
    found = find_all(Evidence(recording, report)).findings
    return recording, report, [one for one in found if isinstance(one, Found)]


def named_by(found: Found) -> list[Removable]:
    """The work that a finding names: what its remedy takes away."""
    changed = [what for what in found.change.values() if isinstance(what, Removable)]
    return changed or ([found.removable] if found.removable else [])


@pytest.mark.parametrize("name", slow_except(TRACES[::6], TRACES))
def test_no_remedy_takes_away_calls_of_modules_but_where_it_leaves_them_out(name: str) -> None:
    recording, _, found = causes(name)
    calls = recording.ownership.spans.module >= 0
    for one in found:
        if one.rule not in WHOLE_CALLS:
            assert not any((work.spans & calls).any() for work in named_by(one)), one.rule


@pytest.mark.parametrize("name", slow_except(TRACES[::6], TRACES))
def test_no_price_is_above_what_the_named_work_takes_in_the_replay(name: str) -> None:
    recording, report, found = causes(name)
    prediction = predict(recording, report.unprofiled_step_ns)
    saves = {one.rule: one.saves for one in report.findings if one.saves}
    if isinstance(prediction, Refusal) or report.replayed_step is None:
        assert all(one.change == {} or one.rule not in saves for one in found if named_by(one))
        return
    for one in found:
        if (saving := saves.get(one.rule)) is None:
            continue
        assert one.priced, one.rule
        within = [prediction.within(work) for work in named_by(one)]
        asked = [free(prediction.recording, work) for work in within]
        answer = prediction.savings(asked)
        assert not isinstance(answer, Refusal)
        most = max([saved.ns for saved in answer[1]], default=one.wall_ns)
        if "graph" in one.change:  # takes away launches, in whatever phase they are late
            most = round(one.wall_ns * max(1.0, report.recorded_step_ns / report.step_ns))
        assert saving.ns <= most + 0.01 * report.step_ns, one.rule


def on_the_clock(recording: Recording, report: Report, works: list[Removable]) -> float:
    """How long a processor works for this in a typical step: each moment once, without a replay.

    What the engine does between a node and the next one is done for the first.
    """
    events, spans = recording.events, recording.ownership.spans
    evidence = Evidence(recording, report)
    of_spans = evidence.costs.of_spans_by_step(np.logical_or.reduce([w.spans for w in works]))
    alone = np.concatenate([np.concatenate([w.operators, w.waits]) for w in works])
    pairs = [*zip(events.start[alone].tolist(), events.end[alone].tolist(), strict=True)]
    for work in works:
        pairs += zip(*work.stretches.tolist(), strict=True)
        nodes = np.flatnonzero(spans.is_node & (recording.ownership.passes.of_span >= 0))
        nodes = nodes[np.argsort(spans.start[nodes], kind="stable")]
        for node, following in pairwise(nodes.tolist()):
            if work.spans[node] and spans.start[following] > spans.end[node]:
                pairs.append((int(spans.end[node]), int(spans.start[following])))
    taken, until = np.zeros(len(of_spans)), 0
    for start, end in sorted(pairs):
        if end > max(start, until):
            step = recording.ledger.steps.at(np.array([max(start, until)]))[0]
            ns = evidence.costs.elapsed(np.array([max(start, until)]), np.array([end]))[0]
            taken[step] += ns * (step >= 0)
            until = end
    return evidence.typical.value((of_spans + taken).astype(np.int64))


@pytest.mark.parametrize("name", slow_except(TRACES[::6], TRACES))
def test_no_price_on_a_processor_is_above_what_the_clock_says_that_the_named_work_takes(
    name: str,
) -> None:
    """A replay that takes away too much would agree with itself."""
    recording, report, found = causes(name)
    saves = {one.rule: one.saves for one in report.findings if one.saves}
    for one in found:
        free_alone = set(one.change) <= {"free"} and named_by(one)
        if not report.has_gpu and one.rule in saves and free_alone:
            most = on_the_clock(recording, report, named_by(one))
            assert saves[one.rule].ns <= most + 0.005 * report.step_ns, one.rule


def test_a_stretch_that_ends_within_an_operator_takes_only_its_part_away() -> None:
    """In anomaly mode each operator of the forward keeps a stack first, for as long as a view."""
    report = backspot.locate(DATA / "findings" / "watched_layers.trace.json.gz")
    (found,) = (one for one in report.findings if one.rule == "anomaly-mode")
    assert found.saves is not None
    assert found.saves.ns == pytest.approx(found.wall_ns, rel=0.05)


def test_what_a_step_may_be_for_has_no_price() -> None:
    report = backspot.locate(DATA / "findings" / "penalty_inputs.trace.json.gz")
    (found,) = (one for one in report.findings if one.rule == "second-backward")
    assert found.saves is None
    assert "they are needed" in found.remedy


def test_what_can_be_slower_in_another_form_has_no_price() -> None:
    report = backspot.locate(DATA / "h200" / "sync_in_backward.trace.json.gz")
    (found,) = (one for one in report.findings if one.rule == "sorted-indexing")
    assert found.saves is None
    assert "time x.index_select" in found.remedy


# Loops -------------------------------------------------------------------------------------------

Operators = Sequence[tuple[str, int]]
Shapes = Mapping[str, Sequence[Sequence[int]]]
OF_ALL = ("aten::max",)
"""What has another node with ``dim`` than without."""


def run(
    folder: Path,
    operators: Operators,
    nodes: Callable[[str], int] = lambda _: 0,
    steps: int = 3,
    shapes: Shapes = MappingProxyType({}),
) -> Report:
    """The report of a step on a CPU whose module ``scaled`` runs these operators, in nanoseconds.

    There are 5 µs of Python between two of them. Those for which ``nodes`` says so have a node, and
    ``shapes`` has the inputs of some.
    """
    trace, now, sequence = Trace(), 0, 0
    for step in range(steps):
        begin, made = now, []
        for name, ns in operators:
            takes = nodes(name)
            made_by = sequence if takes else None
            trace.operator(name, now, now + ns, seq=made_by, shapes=shapes.get(name, ()))
            if takes:
                node = f"{name[6:].title()}Backward{int(name in OF_ALL)}"
                made.append((node, sequence, takes))
                sequence += 1
            now += ns + 5 * US
        trace.forward("scaled", "Scaled", begin, now)
        for name, number, ns in reversed(made):
            trace.node(name, now, now + ns, seq=number, thread=1)
            now += ns
        trace.annotation(f"ProfilerStep#{step}", begin, now)
        now += 10 * US
    return backspot.locate(trace.save(folder / "trace.json"))


def loop(turns: int) -> Operators:
    return [("aten::select", 2 * US), ("aten::abs", 8 * US), ("aten::amax", 8 * US)] * turns


def cost(report: Report, rule: str) -> Finding | None:
    return next((one for one in report.findings if one.rule == rule), None)


TURN = (2 + 8 + 8 + 3 * 5) * US


def takes(name: str) -> int:
    return 4 * MS if name == "aten::linear" else 0


def test_a_loop_costs_its_own_time_and_not_that_of_the_product_beside_it(tmp_path) -> None:
    found = cost(run(tmp_path, [*loop(64), ("aten::linear", 2 * MS)], takes), "operator-loop")
    assert found is not None
    assert found.saves is not None
    assert 60 * TURN <= found.wall_ns <= 64 * TURN
    assert found.saves.ns <= 64 * TURN
    assert found.saves.at_best
    assert set(found.operators) == {"aten::abs", "aten::amax", "aten::select"}


def test_a_product_between_two_loops_is_part_of_neither(tmp_path) -> None:
    both = [*loop(40), ("aten::linear", 2 * MS), *loop(40)]
    found = cost(run(tmp_path, both, takes), "operator-loop")
    assert found is not None
    assert 76 * TURN <= found.wall_ns <= 80 * TURN
    assert found.nodes == ()


def test_the_nodes_that_a_loop_makes_are_its_cost_and_others_are_not(tmp_path) -> None:
    def each(name: str) -> int:
        return {"aten::linear": 4 * MS, "aten::abs": 10 * US}.get(name, 0)

    found = cost(run(tmp_path, [*loop(64), ("aten::linear", 2 * MS)], each), "operator-loop")
    assert found is not None
    assert 60 * (TURN + 10 * US) <= found.wall_ns <= 64 * (TURN + 10 * US)
    assert found.nodes == ("AbsBackward0",)


def test_a_loop_of_less_than_a_twentieth_of_the_step_is_no_finding(tmp_path) -> None:
    """Its module takes nearly all of the step."""
    assert (
        cost(run(tmp_path, [*loop(34), ("aten::linear", 30 * MS)], takes), "operator-loop") is None
    )


def test_operators_that_take_long_by_themselves_are_no_loop(tmp_path) -> None:
    parts = [("aten::abs", 40 * US)] * 64
    assert cost(run(tmp_path, parts, lambda _: 40 * US), "operator-loop") is None


CELL = "aten::lstm_cell"


@pytest.mark.parametrize(
    ("between", "gaps"),
    [([], 15), ([("aten::select", 5 * US)], 15), ([("aten::linear", MS)], 0)],
    ids=["Python", "a view", "a product"],
)
def test_the_python_between_cells_is_a_part_of_their_loop(tmp_path, between, gaps) -> None:
    parts = [("aten::mul", MS), *[(CELL, MS), *between] * 16]
    report = run(tmp_path, parts, lambda name: MS * (name == "aten::mul"))
    found = cost(report, "recurrent-cells")
    assert found is not None
    gap = 5 * US + sum(ns + 5 * US for _, ns in between)
    assert found.wall_ns == 16 * MS + gaps * gap


# A loss ------------------------------------------------------------------------------------------

SOFTMAX, ADD, LOG, PICK = "aten::softmax", "aten::add", "aten::log", "aten::gather"
SCORES = [64, 1000]
OF_ONE: Shapes = {
    SOFTMAX: [SCORES, [], []],
    ADD: [SCORES, [], []],
    "aten::clamp": [SCORES, [], []],
    "aten::view": [SCORES, []],
    LOG: [SCORES],
}


def loss(folder: Path, operators: Sequence[str], shapes: Shapes) -> Finding | None:
    parts = [("aten::linear", 20 * MS), *((name, MS) for name in operators)]
    return cost(run(folder, parts, lambda name: 3 * MS, shapes=shapes), "loss-passes")


@pytest.mark.parametrize(
    ("operators", "between"),
    [
        ((SOFTMAX, ADD, LOG, PICK), 2),
        ((SOFTMAX, "aten::clamp", "aten::view", LOG, "aten::view", PICK), 3),
        ((SOFTMAX, LOG), 1),
    ],
)
def test_the_logarithm_of_a_softmax_costs_what_comes_after_the_softmax(
    tmp_path, operators: Sequence[str], between: int
) -> None:
    found = loss(tmp_path, operators, OF_ONE)
    assert found is not None
    assert found.title == "The loss takes the logarithm of a softmax"
    assert found.form == "log_softmax"
    assert found.remedy.startswith("Use ")
    assert ("cross_entropy" in found.remedy) is (PICK in operators)
    assert ("cross_entropy" in found.link) is (PICK in operators)
    assert found.saves is not None
    assert found.saves.at_best
    assert found.saves.ns == pytest.approx(between * 4 * MS, rel=0.05)


@pytest.mark.parametrize(
    "operators",
    [("aten::relu", ADD, LOG, PICK), (SOFTMAX, "aten::bmm", LOG), (LOG, SOFTMAX), (SOFTMAX, ADD)],
)
def test_another_logarithm_or_another_softmax_is_no_loss(tmp_path, operators) -> None:
    parts = [("aten::linear", 2 * MS), *((name, MS) for name in operators)]
    assert cost(run(tmp_path, parts, lambda name: 3 * MS), "loss-passes") is None


def test_without_shapes_the_logarithm_may_be_of_another_tensor_and_has_no_price(tmp_path) -> None:
    found = loss(tmp_path, (SOFTMAX, ADD, LOG, PICK), {})
    assert found is not None
    assert found.saves is None
    assert found.remedy.startswith("If the logarithm is of the softmax, use ")


@pytest.mark.parametrize(
    "shapes",
    [
        {LOG: [[64, 64]]},
        {SOFTMAX: [[64, 4], [], []]},
        {ADD: [SCORES, SCORES, []]},
    ],
    ids=["another logarithm", "another softmax", "a sum of two"],
)
def test_a_logarithm_of_another_tensor_than_the_softmax_is_no_loss(tmp_path, shapes) -> None:
    assert loss(tmp_path, (SOFTMAX, ADD, LOG, PICK), {**OF_ONE, **shapes}) is None


@pytest.mark.parametrize(
    ("between", "is_found"),
    [
        ([], False),
        (["aten::linear"], False),
        (["aten::view", "aten::linear", "aten::linear"], False),
        (["aten::bmm", "aten::relu", "aten::linear"], True),  # the first one is of an attention
    ],
)
def test_two_softmaxes_before_a_sum_may_be_added(tmp_path, between, is_found) -> None:
    found = loss(tmp_path, (SOFTMAX, *between, SOFTMAX, ADD, LOG, PICK), {})
    assert (found is not None) is is_found


def test_the_score_that_is_picked_from_a_log_softmax_is_a_pass_of_the_loss(tmp_path) -> None:
    """By an index it is what ``nll_loss`` does: nothing is said to be gained by the other form."""
    parts = [("aten::linear", 2 * MS), ("aten::logsoftmax", MS), (PICK, MS)]
    found = cost(run(tmp_path, parts, lambda name: 3 * MS), "loss-passes")
    assert found is not None
    assert found.saves is None
    assert found.wall_ns == 8 * MS


# One node, and a product -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "backward", "found"),
    [
        ("aten::max", 20 * MS, True),
        ("aten::max", 4 * MS, False),
        ("aten::sum", 20 * MS, False),
        ("aten::embedding", 20 * MS, False),
        ("aten::mul", 20 * MS, False),
    ],
)
def test_a_node_that_takes_many_times_its_operator_is_found_beside_a_long_forward(
    tmp_path, operator: str, backward: int, found: bool
) -> None:
    """Sums, lookups and element-wise operators have a backward that writes what they only read."""
    parts = [("aten::linear", 20 * MS), (operator, MS)]
    report = run(tmp_path, parts, lambda name: 20 * MS if name == "aten::linear" else backward)
    one = cost(report, "slow-node")
    assert (one is not None) == found
    if one is not None:
        assert one.wall_ns == backward
        assert "flatten().max(0)" in one.remedy


def test_a_maximum_of_rows_does_not_get_the_advice_for_one_of_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(f"{__name__}.OF_ALL", ())
    parts = [("aten::linear", 20 * MS), ("aten::max", MS)]
    found = cost(run(tmp_path, parts, lambda _: 20 * MS), "slow-node")
    assert found is not None
    assert found.nodes == ("MaxBackward0",)
    assert "flatten" not in found.remedy


@pytest.mark.parametrize(("operator", "found"), [("aten::cumsum", True), ("aten::addmm", False)])
def test_a_product_of_matrices_that_is_held_up_on_a_cpu_has_no_slow_backward(
    tmp_path, operator: str, found: bool
) -> None:
    report = run(tmp_path, [(operator, MS)], lambda _: 20 * MS)
    assert (cost(report, "backward-ratio") is not None) is found


def function(folder: Path, within: Operators, forward: int = MS) -> Report:
    """The report of a product and of a Function in one module, with what its backward runs."""
    trace, now = Trace(), 0
    for step in range(3):
        begin = now
        trace.operator("aten::linear", now, now + 20 * MS, seq=2 * step)
        now += 20 * MS
        trace.operator("Reversed", now, now + forward, seq=2 * step + 1)
        now += forward
        trace.forward("mix", "Mix", begin, now)
        for name, seq, inside in (
            ("ReversedBackward", 2 * step + 1, within),
            ("LinearBackward0", 2 * step, [("aten::mm", 40 * MS)]),
        ):
            trace.node(name, now, now + sum(ns for _, ns in inside), seq=seq, thread=1)
            for operator, ns in inside:
                trace.operator(operator, now, now + ns)
                now += ns
        trace.annotation(f"ProfilerStep#{step}", begin, now)
        now += 10 * US
    return backspot.locate(trace.save(folder / "trace.json"))


def test_what_a_function_runs_again_in_its_backward_is_found_beside_a_product(tmp_path) -> None:
    report = function(tmp_path, [("aten::zeros", MS), *[("aten::matmul", 5 * MS)] * 4])
    found = cost(report, "backward-ratio")
    assert found is not None
    assert found.nodes == ("ReversedBackward",)
    assert found.wall_ns == 21 * MS
    assert found.saves is not None
    assert found.saves.at_best
    assert found.saves.ns == pytest.approx(15 * MS, rel=0.01)


@pytest.mark.parametrize(
    ("within", "forward"),
    [
        ([("aten::matmul", 10 * MS)] * 2, MS),  # the gradients of two inputs
        ([("aten::matmul", 5 * MS)] * 4, 5 * MS),
        ([("aten::mul", US)] * 4, MS),
    ],
    ids=["once for each input", "a long forward", "little"],
)
def test_a_function_with_an_ordinary_backward_is_not_found(tmp_path, within, forward) -> None:
    assert cost(function(tmp_path, within, forward), "backward-ratio") is None


def product(folder: Path, first: list[int], second: list[int], shapes: bool = True) -> Report:
    """The report of a step that multiplies two tensors by broadcasting, and sums the result."""
    whole = [max(a, b) for a, b in zip(first, second, strict=True)]
    trace, now = Trace(), 0
    for step in range(3):
        begin = now
        for number, (name, dims) in enumerate(
            (("aten::mul", [first, second]), ("aten::sum", [whole, [], []]))
        ):
            more = {"Input Dims": dims, "Input type": ["float"] * len(dims)} if shapes else {}
            numbers = {"Sequence number": 2 * step + number, "Fwd thread id": 0}
            trace.event("cpu_op", name, now, now + 5 * MS, **numbers, **more)
            now += 5 * MS
        trace.forward("mix", "Mix", begin, now)
        for number, name in ((1, "SumBackward1"), (0, "MulBackward0")):
            trace.node(name, now, now + 5 * MS, seq=2 * step + number, thread=1)
            now += 5 * MS
        trace.annotation(f"ProfilerStep#{step}", begin, now)
        now += 10 * US
    return backspot.locate(trace.save(folder / "trace.json"))


def test_a_product_of_matrices_that_is_written_out_is_found_by_its_shapes(tmp_path) -> None:
    report = product(tmp_path, [1024, 64, 1], [1, 64, 64])
    found = cost(report, "written-out-product")
    assert found is not None
    assert found.path == "mix"
    assert found.wall_ns == 20 * MS
    assert found.saves is not None
    assert found.saves.at_best


@pytest.mark.parametrize("second", [[1024, 64, 64], [1, 1, 64]], ids=["one shape", "a scale"])
def test_a_sum_of_products_that_need_no_larger_tensor_is_not_found(tmp_path, second) -> None:
    assert cost(product(tmp_path, [1024, 64, 64], second), "written-out-product") is None


def test_without_shapes_the_rule_says_what_it_needs(tmp_path) -> None:
    report = product(tmp_path, [1024, 64, 1], [1, 64, 64], shapes=False)
    assert report.rules["written-out-product"] == "needs shapes"


# The same again ----------------------------------------------------------------------------------


def tables(folder: Path, between: str = "") -> Report:
    """The report of four modules that make a table each, with 1 ms after each operator."""
    trace, now = Trace(), 0
    parts = ["aten::arange", "aten::mul", *[between][: len(between)], "aten::cos"]
    for step in range(3):
        begin = now
        for number in range(4):
            first = now
            for name in parts:
                trace.operator(name, now, now + 2 * MS)
                now += 3 * MS
            trace.operator("aten::linear", now, now + 2 * MS, seq=4 * step + number)
            now += 2 * MS
            trace.forward(f"blocks.{number}", "Block", first, now)
        for number in reversed(range(4)):
            trace.node("LinearBackward0", now, now + MS, seq=4 * step + number, thread=1)
            now += MS
        trace.annotation(f"ProfilerStep#{step}", begin, now)
    return backspot.locate(trace.save(folder / "trace.json"))


def test_tables_that_layers_make_again_cost_the_python_between_their_operators_too(
    tmp_path,
) -> None:
    """There the memory of what they no longer need is given back."""
    found = cost(tables(tmp_path), "repeated-work")
    assert found is not None
    assert found.wall_ns == 3 * (3 * 2 + 2 * 1) * MS
    assert found.saves is not None
    assert found.saves.ns == pytest.approx(found.wall_ns, rel=0.01)


def test_what_else_runs_between_the_operators_of_a_table_is_no_part_of_it(tmp_path) -> None:
    assert cost(tables(tmp_path, "aten::linear"), "repeated-work") is None
