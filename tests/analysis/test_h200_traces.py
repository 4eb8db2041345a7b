"""Real traces from H200 GPUs: what is true of each by construction."""

from __future__ import annotations

from collections import Counter

import pytest

import backspot
from backspot.errors import NoBackwardError
from support.h200 import (
    EACH_WITH_BACKWARD,
    NAMES,
    WITH_BACKWARD,
    by_step,
    expected,
    path_of,
    plain_of,
    report_of,
    step_of,
)
from support.sums import assert_adds_up, usual, usual_count

pytestmark = pytest.mark.xdist_group("h200")  # one worker reads them

LABELLED = tuple(name for name in WITH_BACKWARD if expected(name)["source"] == "backspot")
# Tiny models: the loss outside of the model is a larger part of so little device work.
EXCHANGES = ("(gradient exchange)", "(parameter gather)", "(communication)")
COVERED = {"gradient_accumulation": 0.96}


def having(key: str) -> list[str]:
    return [name for name in WITH_BACKWARD if key in expected(name)]


def test_all_recorded_traces_are_here() -> None:
    assert len(NAMES) == 28 - 2


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_the_rows_sum_to_the_passes_exactly(name: str) -> None:
    report = report_of(name)
    assert_adds_up(report)
    for run in report.passes:
        assert min(run.wall_ns, run.gpu_ns, run.cpu_ns) > 0


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_passes_and_steps_are_as_recorded(name: str) -> None:
    report, known = report_of(name), expected(name)
    assert len(report.passes) == known["passes"]
    assert report.steps == known["steps"]
    assert report.step_unit == "profiler step"
    assert report.source == known["source"]
    assert {run.step for run in report.passes} == set(range(known["steps"]))


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_every_node_is_counted_once_under_its_name(name: str) -> None:
    report, counted = report_of(name), expected(name)["counted"]
    assert sum(run.nodes for run in report.passes) == counted["evaluate_function_events"]
    executed: dict[str, list[int]] = {}
    for node, step in step_of(name).items():
        executed.setdefault(node.name, [0] * report.steps)[step] += 1
    assert {node: sum(counts) for node, counts in executed.items()} == counted["nodes"]
    found = {o.name: o.count for o in report.operators if not o.name.startswith("(")}
    assert found == {node: usual_count(report, counts) for node, counts in executed.items()}


@pytest.mark.parametrize("name", LABELLED)
def test_the_device_time_has_owners(name: str) -> None:
    report = report_of(name)
    exchanged = sum(sum(row.gpu_ns_by_step) for row in report.modules if row.path in EXCHANGES)
    share = exchanged / sum(report.gpu_ns_by_step)
    assert report.coverage.gpu + share >= COVERED.get(name, 0.97)


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_no_row_is_for_what_was_not_understood(name: str) -> None:
    paths = {row.path for row in report_of(name).modules}
    assert not paths & {"(forward not recorded)", "(ambiguous thread)", "(no launch record)"}


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_time_is_no_more_than_there_was(name: str) -> None:
    report, plain = report_of(name), plain_of(name)
    for row in report.modules:
        assert min(row.forward_ns_by_step) >= 0
    streams = len(expected(name)["counted"]["streams"])
    assert sum(report.gpu_ns_by_step) <= streams * sum(run.duration_ns for run in report.passes)
    begin, end = plain.nodes[0].start, max(w.end for w in plain.work)
    assert sum(run.duration_ns for run in report.passes) <= end - begin


@pytest.mark.parametrize("name", having("owners"))
def test_nodes_belong_to_the_modules_that_made_them(name: str) -> None:
    for node, paths in expected(name)["owners"].items():
        found = [row.path for row in report_of(name).modules for n in row.nodes if n.name == node]
        assert sorted(found) == sorted(paths)


@pytest.mark.parametrize("name", having("node_counts"))
def test_nodes_known_by_construction_are_all_there(name: str) -> None:
    found = Counter({o.name: o.count for o in report_of(name).operators})
    for node, count in expected(name)["node_counts"].items():
        assert found[node] * report_of(name).steps == count


@pytest.mark.parametrize("name", having("heaviest"))
def test_the_heaviest_module_comes_first(name: str) -> None:
    known = expected(name)
    for sort in (known["sort"], "wall"):
        top = report_of(name).top(len(known["heaviest"]), sort=sort)
        assert sorted(row.path for row in top) == sorted(known["heaviest"])


@pytest.mark.parametrize("name", having("calls"))
def test_calls_are_those_of_the_forward(name: str) -> None:
    for path, count in expected(name)["calls"].items():
        assert report_of(name)[path].row.recorded_calls == count


def test_patch_dropout_leads_the_deterministic_vit_by_far() -> None:
    first, second = report_of("vit_patch_drop").top(2)
    assert first.label == "patch_drop (PatchDropout)"
    assert first.nodes[0].name == "GatherBackward0"
    assert first.wall_ns > 5 * second.wall_ns
    assert first.gpu_ns > 5 * second.gpu_ns


def test_gradient_accumulation_has_three_passes_a_step() -> None:
    report = report_of("gradient_accumulation")
    assert [run.step for run in report.passes] == [0, 0, 0, 1, 1, 1]
    assert {row.calls for row in report.modules if row.is_module} == {3.0}


def test_a_second_pass_through_the_first_has_the_first_ones_owners() -> None:
    report = report_of("double_backward")
    assert [run.step for run in report.passes] == [0, 0, 1, 1]
    owners = {n.name: set() for row in report.modules for n in row.nodes}
    for row in report.modules:
        for node in row.nodes:
            owners[node.name].add(row.path)
    linear = {"layers.0", "layers.1", "layers.2"}
    assert owners["MmBackward0"] == owners["AddmmBackward0"] == linear
    assert owners["GeluBackwardBackward0"] == {""}
    assert owners["LinalgVectorNormBackward0"] == {"(outside model)"}


def test_each_cycle_of_a_schedule_stands_by_itself() -> None:
    first, second = report_of("scheduled.cycle0"), report_of("scheduled.cycle1")
    order = [f"layers.{index}" for index in (3, 2, 1, 0)]
    for report in (first, second):
        linear = [row.path for row in report.modules if row.class_name == "Linear"]
        assert linear == order, "the first layer needs no gradient of its input"
        assert {row.recorded_calls for row in report.modules if row.is_module} == {2}
    assert first.gpu_ns == pytest.approx(second.gpu_ns, rel=0.05)


def test_without_our_labels_the_profilers_names_of_modules_serve() -> None:
    report = report_of("python_stack")
    assert {row.path for row in report.modules if row.class_name == "Linear"} == {
        f"Mlp_0.Linear_{index}" for index in range(3)
    }
    assert any("backspot.instrument" in warning for warning in report.warnings)


def test_a_compiled_model_is_one_owner() -> None:
    report = report_of("compiled_whole")
    (row,) = (row for row in report.modules if row.is_module)
    assert row.path == ""
    plain = plain_of("compiled_whole")
    inside = by_step("compiled_whole", [w for w in plain.backward if "Compiled" in w.node.name])
    (node,) = (n for n in row.nodes if n.name == "CompiledFunctionBackward")
    assert node.gpu_ns == usual(report, inside)
    assert node.gpu_ns > 0.95 * report.gpu_ns


def test_a_replayed_graph_is_one_owner_with_all_of_its_kernels() -> None:
    report, plain = report_of("cuda_graph_part"), plain_of("cuda_graph_part")
    replayed = [w for w in plain.backward if w.node.name == "GraphedBackward"]
    assert sum("GraphLaunch" in w.launched_by for w in replayed) > 20
    (node,) = (n for n in report["graphed"].row.nodes if n.name == "GraphedBackward")
    assert node.gpu_ns == usual(report, by_step("cuda_graph_part", replayed))
    for path in expected("cuda_graph_part")["inside_graph"]:
        with pytest.raises(KeyError):
            report[path]


def test_a_whole_step_in_a_graph_is_told_as_such() -> None:
    with pytest.raises(NoBackwardError, match="replays of a captured graph") as caught:
        backspot.locate(path_of("cuda_graph_step"))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("name", having("recompute_within"))
def test_forward_work_run_again_belongs_to_the_checkpointed_blocks(name: str) -> None:
    report, blocks = report_of(name), expected(name)["recompute_within"]
    for path in blocks:
        row = report[path].row
        assert 0 < row.total_recompute_ns < row.total_wall_ns
        for part in ("attn.c_attn", "mlp.c_fc", "mlp.act", "ln_1"):
            inner = report[f"{path}.{part}"].row
            assert 0 < inner.recompute_ns < inner.wall_ns
            assert inner.recorded_calls == 2, "what runs again is no further call"
    elsewhere = [
        row.path
        for row in report.modules
        if row.recompute_ns and not row.path.startswith(tuple(blocks))
    ]
    assert elsewhere == []


@pytest.mark.parametrize("name", [n for n in LABELLED if not n.startswith("gpt2")])
def test_without_checkpointing_nothing_is_run_again(name: str) -> None:
    assert [row.path for row in report_of(name).modules if row.recompute_ns] == []
