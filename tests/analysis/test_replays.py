"""Until a node replays a CUDA graph the GPU idles, which is no work of the node's."""

from __future__ import annotations

from pathlib import Path

import backspot
from support.synthetic import Trace

TICK = 10_000
ENGINE = 2
REPLAY = "(before a graph's replay)"


def training() -> Trace:
    """The node takes 60 ticks on the host until it launches; the graph runs 10, with a gap of 2."""
    trace = Trace()
    trace.annotation("ProfilerStep#1", 0, 200 * TICK)
    trace.forward("a", "A", TICK, 9 * TICK)
    trace.operator("CompiledFunction", 2 * TICK, 3 * TICK, seq=0)
    trace.operator("aten::sum", 10 * TICK, 11 * TICK, seq=1)
    trace.node("SumBackward0", 20 * TICK, 30 * TICK, seq=1)
    trace.kernel(25 * TICK, 31 * TICK, launch=24 * TICK, launch_thread=ENGINE)
    trace.node("CompiledFunctionBackward", 31 * TICK, 110 * TICK, seq=0)
    trace.kernel(95 * TICK, 99 * TICK, launch=91 * TICK, launch_thread=ENGINE)
    launch = next(e for e in trace.events if e.get("cat") == "cuda_runtime" and e["ts"] == 910)
    launch |= {"name": "cudaGraphLaunch", "dur": 20.0}
    trace.kernel(101 * TICK, 107 * TICK, launch=None)
    trace.events[-1]["args"]["correlation"] = launch["args"]["correlation"]
    return trace


def report_of(trace: Trace, folder: Path) -> backspot.Report:
    return backspot.locate(trace.save(folder / "trace.json"))


def said(report: backspot.Report) -> str:
    return " ".join(str(report).split())


def test_the_gpu_idle_before_a_replay_stands_apart_from_its_node(tmp_path: Path) -> None:
    report = report_of(training(), tmp_path)
    nodes = {node.name: node for node in report["a"].row.nodes}
    assert nodes[REPLAY].wall_ns == 64 * TICK
    assert nodes["CompiledFunctionBackward"].wall_ns == (4 + 2 + 6 + 3) * TICK
    assert nodes["CompiledFunctionBackward"].gpu_ns == 10 * TICK
    assert nodes[REPLAY].count == nodes[REPLAY].gpu_ns == 0
    assert sum(node.wall_ns for node in nodes.values()) == report["a"].row.wall_ns
    assert "mostly GPU idle time before a CUDA graph's replay" in said(report)


def test_without_labels_the_answer_is_the_idle_time_too(tmp_path: Path) -> None:
    trace = training()
    trace.events = [e for e in trace.events if not e["name"].startswith("forward:")]
    report = report_of(trace, tmp_path)
    assert "GPU idle time before a CUDA graph's replay takes" in said(report)


def test_nobody_is_told_to_replay_graphs_that_does(tmp_path: Path) -> None:
    report = report_of(training(), tmp_path)
    (finding,) = [f for f in report.findings if f.rule == "launch-bound"]
    assert "reduce-overhead" not in finding.remedy
    assert "longer CUDA graphs" in finding.remedy
