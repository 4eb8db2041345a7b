"""Traces recorded on H200 GPUs, and a plain reading of them to hold a report against."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from backspot import Report
from support import recordings
from support.choice import slow_except

DATA = Path(__file__).parents[1] / "data" / "h200"
NAMES = tuple(sorted(p.name.removesuffix(".trace.json.gz") for p in DATA.glob("*.trace.json.gz")))
WITH_BACKWARD = tuple(name for name in NAMES if name != "cuda_graph_step")
# One of each kind: checkpoints, compiled, several ranks, several devices, waits.
QUICK = (
    "compiled_whole",
    "fsdp2.rank0",
    "gpt2_checkpointed",
    "model_parallel",
    "sync_in_backward",
    "vit_patch_drop",
)
EACH_WITH_BACKWARD = slow_except(QUICK, WITH_BACKWARD)
EVALUATE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"

_OF_LINEAR = (
    "AddmmBackward0",
    "TBackward0",
    "RegisterPostBackwardFunctionBackward",
    ACCUMULATE,
)
_WORK = {"kernel": 0, "gpu_memcpy": 1, "gpu_memset": 1}
Interval = tuple[int, int]


def path_of(name: str) -> Path:
    return DATA / f"{name}.trace.json.gz"


def report_of(name: str) -> Report:
    return recordings.report_of(path_of(name))


@cache
def expected(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.expect.json").read_text())


@dataclass(frozen=True)
class Node:
    """One node's execution on the host; nanoseconds, on the trace's own clock."""

    name: str
    start: int
    end: int
    thread: int


@dataclass(frozen=True)
class Work:
    """A kernel, copy or memset; ``node`` is the innermost node around its launch."""

    name: str
    start: int
    end: int
    precedence: int
    device: int
    stream: int
    launch: int
    launched_by: str
    thread: int | None
    node: Node | None

    @property
    def duration(self) -> int:
        return self.end - self.start


class Plain:
    """What a loop over the events finds."""

    def __init__(self, name: str) -> None:
        self.document = json.loads(gzip.decompress(path_of(name).read_bytes()))
        self.events = [e for e in self.document["traceEvents"] if e.get("ph") == "X"]
        origin = min(e["ts"] for e in self.events)
        for event in self.events:
            event["start"] = round((event["ts"] - origin) * 1000)
            event["end"] = event["start"] + round(event["dur"] * 1000)
        self.nodes = sorted(
            (
                Node(e["name"].removeprefix(EVALUATE), e["start"], e["end"], e["tid"])
                for e in self.events
                if e["name"].startswith(EVALUATE)
            ),
            key=lambda node: (node.start, -node.end),
        )
        self._starts = [node.start for node in self.nodes]
        self.calls = [e for e in self.events if e["cat"] in ("cuda_runtime", "cuda_driver")]
        by_number = {e["args"].get("correlation"): e for e in self.calls}
        self.work = sorted(
            (
                self._work(e, by_number.get(e["args"]["correlation"]))
                for e in self.events
                if e["cat"] in _WORK
            ),
            key=lambda work: (work.start, work.end),
        )
        self.backward = [work for work in self.work if work.node]

    def in_optimizer(self, work: Work) -> bool:
        """Whether an optimizer's step launched it."""
        return any(
            e["start"] <= work.launch < e["end"] and e["tid"] == work.thread
            for e in self.named("Optimizer.")
        )

    def node_at(self, thread: int, time: int) -> Node | None:
        for node in reversed(self.nodes[: bisect_right(self._starts, time)]):
            if node.thread == thread and node.end > time:
                return node
        return None

    def _work(self, event: dict[str, Any], call: dict[str, Any] | None) -> Work:
        call = call or {"start": -1, "name": "", "tid": None}  # launched before the recording
        return Work(
            name=event["name"],
            start=event["start"],
            end=event["end"],
            precedence=2 if "nccl" in event["name"] else _WORK[event["cat"]],
            device=event["pid"],  # a copy between devices has no "device"
            stream=event["args"]["stream"],
            launch=call["start"],
            launched_by=call["name"],
            thread=call["tid"],
            node=self.node_at(call["tid"], call["start"]),
        )

    def named(self, prefix: str) -> list[dict[str, Any]]:
        found = [e for e in self.events if e["name"].startswith(prefix)]
        return sorted(found, key=lambda e: e["start"])

    def layer_of(self) -> dict[Node, str]:
        """Owners in an ``Mlp`` of linear layers: the last goes first, once in each pass."""
        starts = [e["end"] for e in self.named("ProfilerStep#")]
        owners: dict[Node, str] = {}
        for begin, end in zip([0, *starts], starts, strict=False):
            mine = [n for n in self.nodes if begin <= n.start < end]
            layer = sum(n.name == "AddmmBackward0" for n in mine)
            for node in mine:
                layer -= node.name == "AddmmBackward0"
                linear = node.name in _OF_LINEAR
                owners[node] = f"layers.{layer}" if linear else ""
        return owners


@cache
def plain_of(name: str) -> Plain:
    return Plain(name)


def spans_of(work: Iterable[Work]) -> list[Interval]:
    return [(w.start, w.end) for w in work]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Nanoseconds in which at least one of them holds."""
    return sum(end - start for start, end in union(intervals))


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Their parts inside ``window``."""
    parts = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in parts if end > start]


def passes_of(name: str) -> list[list[Node]]:
    """Each pass's nodes, of as many as the report counts in it."""
    nodes, at, passes = plain_of(name).nodes, 0, []
    for run in report_of(name).passes:
        passes.append(nodes[at : at + run.nodes])
        at += run.nodes
    return passes


def step_of(name: str) -> dict[Node, int]:
    """The step of each node."""
    passes = zip(report_of(name).passes, passes_of(name), strict=True)
    return {node: run.step for run, nodes in passes for node in nodes}


def by_step(name: str, work: Iterable[Work]) -> tuple[int, ...]:
    """How long this work of nodes runs in each step."""
    steps, spent = step_of(name), [0] * report_of(name).steps
    for one in work:
        spent[steps[one.node]] += one.duration
    return tuple(spent)


def windows(report: Report) -> list[Interval]:
    """When each pass began and ended."""
    return [(run.start_ns, run.start_ns + run.duration_ns) for run in report.passes]
