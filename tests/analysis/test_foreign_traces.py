"""Traces that other projects recorded, without a label of ours."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import backspot
from backspot.errors import NoBackwardError
from support.choice import slow_except
from support.sums import assert_adds_up, usual_count

DATA = Path(__file__).parents[1] / "data" / "foreign"
FOREIGN = ("hta_resnet", "hta_recommender_control", "hta_recommender_test")


@pytest.mark.parametrize("name", slow_except(["hta_resnet"], FOREIGN))
def test_every_node_is_counted_and_the_rows_sum_to_the_passes(name: str) -> None:
    path = DATA / f"{name}.json.gz"
    report = backspot.locate(path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    engine = [e for e in events if e["name"].startswith("autograd::engine::evaluate_function")]
    assert sum(p.nodes for p in report.passes) == len(engine)
    by_step: dict[str, list[int]] = {}
    started = sorted(engine, key=lambda e: (e["ts"], -e["dur"]))
    steps = [run.step for run in report.passes for _ in range(run.nodes)]
    for event, step in zip(started, steps, strict=True):
        name = event["name"].removeprefix("autograd::engine::evaluate_function: ")
        by_step.setdefault(name, [0] * report.steps)[step] += 1
    nodes = {o.name: o.count for o in report.operators if not o.name.startswith("(")}
    assert nodes == {name: usual_count(report, counts) for name, counts in by_step.items()}
    assert min(report.wall_ns, report.gpu_ns, report.cpu_ns) > 0
    assert_adds_up(report)
    assert report.source == "none"
    assert len(report.passes) == report.steps == 2
    assert report.step_unit == "profiler step"


@pytest.mark.parametrize("name", slow_except(["hta_resnet"], FOREIGN))
def test_every_nodes_forward_is_found(name: str) -> None:
    report = backspot.locate(DATA / f"{name}.json.gz")
    assert not any("no forward operator" in w for w in report.warnings)
    assert not any("more than one thread" in w for w in report.warnings)


def test_a_forward_only_trace_says_so() -> None:
    with pytest.raises(NoBackwardError, match="no backward pass") as caught:
        backspot.locate(DATA / "tracelens_qwen_forward_only.json.gz")
    assert caught.value.exit_code == 5
