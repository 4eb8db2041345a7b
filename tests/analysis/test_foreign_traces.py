"""Traces that other projects recorded, without a label of ours."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import backspot
from backspot.errors import NoBackwardError

DATA = Path(__file__).parents[1] / "data" / "foreign"
FOREIGN = ("hta_resnet", "hta_recommender_control", "hta_recommender_test")


@pytest.mark.parametrize("name", FOREIGN)
def test_every_node_is_counted_and_the_rows_sum_to_the_passes(name: str) -> None:
    path = DATA / f"{name}.json.gz"
    report = backspot.locate(path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    engine = [e for e in events if e["name"].startswith("autograd::engine::evaluate_function")]
    assert sum(p.nodes for p in report.passes) == len(engine)
    nodes = [o for o in report.operators if not o.name.startswith("(")]
    assert sum(o.count for o in nodes) == len(engine)
    for column in ("wall_ns", "gpu_ns", "cpu_ns"):
        total = getattr(report, column)
        assert total > 0
        assert sum(getattr(r, column) for r in report.modules) == total
        assert sum(getattr(p, column) for p in report.passes) == total
    assert report.source == "none"
    assert len(report.passes) == report.steps == 2
    assert report.step_unit == "profiler step"


@pytest.mark.parametrize("name", FOREIGN)
def test_every_nodes_forward_is_found(name: str) -> None:
    report = backspot.locate(DATA / f"{name}.json.gz")
    assert not any("no forward operator" in w for w in report.warnings)
    assert not any("more than one thread" in w for w in report.warnings)


def test_a_forward_only_trace_says_so() -> None:
    with pytest.raises(NoBackwardError, match="no backward pass") as caught:
        backspot.locate(DATA / "tracelens_qwen_forward_only.json.gz")
    assert caught.value.exit_code == 5
