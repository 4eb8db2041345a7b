"""Calls of allocators within steps: a real trace of a GPU, into which such calls are put.

Everything that is not on the device yet starts as much later as a call takes, so the trace stays
one that a GPU could have written.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import backspot
from backspot import Report
from backspot.results.findings import Finding

DATA = Path(__file__).parents[1] / "data" / "findings"

Event = dict[str, Any]
Moment = tuple[float, int]
"""A time and a thread."""


class Recorded:
    """A recorded trace; times are microseconds."""

    def __init__(self, name: str) -> None:
        text = gzip.decompress((DATA / f"{name}.trace.json.gz").read_bytes())
        self.document = json.loads(text)
        self.events: list[Event] = self.document["traceEvents"]

    def named(self, name: str) -> list[Event]:
        found = [one for one in self.events if one.get("ph") == "X" and one["name"] == name]
        return sorted(found, key=lambda one: one["ts"])

    def call(self, name: str, moment: Moment, us: float, *, beside: bool = False) -> Moment:
        """Let the program call the driver then; ``cudaFree`` first waits for the device.

        Args:
            us: how long it takes, without the wait.
            beside: whether it is on a thread beside the training, which goes on.

        Returns:
            When the call has returned.
        """
        at, thread = moment
        host = [one for one in self.events if "tid" in one and one.get("pid") != 0]
        launched = {
            one["args"]["correlation"]: one["ts"]
            for one in host
            if "correlation" in one.get("args", {})
        }
        work = [
            one for one in self.events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
        before = [one for one in work if launched.get(one["args"]["correlation"], at) < at]
        drained = max((one["ts"] + one["dur"] for one in before), default=at)
        until = (max(at, drained) if name == "cudaFree" else at) + us
        stays = {id(one) for one in before}
        if not beside:
            for one in self.events:
                if "ts" not in one or id(one) in stays:
                    continue
                if one["ts"] >= at:
                    one["ts"] += until - at
                elif one["ts"] + one.get("dur", 0) > at:
                    one["dur"] += until - at
        self.events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": name,
                "pid": host[0]["pid"],
                "tid": 4_711 if beside else thread,
                "ts": at,
                "dur": until - at,
                "args": {"correlation": 0},
            }
        )
        return until, thread

    def calls(self, names: Sequence[str], moment: Moment, us: float) -> None:
        for name in names:
            moment = self.call(name, moment, us)

    def report(self, folder: Path) -> Report:
        path = folder / "trace.json"
        path.write_text(json.dumps(self.document), encoding="utf-8")
        return backspot.locate(path)


def after_optimizer(trace: Recorded) -> list[Moment]:
    """The moments behind each step of the optimizer, the last one first."""
    marks = trace.named("Optimizer.step#AdamW.step")
    return [(one["ts"] + one["dur"] + 1, one["tid"]) for one in reversed(marks)]


def in_operator(trace: Recorded, name: str) -> list[Moment]:
    """A moment in the last operator of this name of each step, the last step first."""
    found = []
    for step in ("ProfilerStep#2", "ProfilerStep#1"):
        (mark,) = trace.named(step)
        inside = [one for one in trace.named(name) if 0 <= one["ts"] - mark["ts"] < mark["dur"]]
        found.append((inside[-1]["ts"] + 0.2, inside[-1]["tid"]))
    return found


def of_allocator(report: Report) -> Finding | None:
    return next((one for one in report.findings if one.rule == "allocator-calls"), None)


def test_an_emptied_cache_is_found_with_what_it_costs_and_who_asks_again(tmp_path):
    trace = Recorded("plain_gpt")
    before = trace.report(tmp_path)
    for at in in_operator(trace, "aten::embedding"):
        trace.calls(["cudaMalloc"] * 3, at, 1_000)
    for at in after_optimizer(trace):
        trace.calls(["cudaFree"] * 4, at, 500)
    report = trace.report(tmp_path)

    found = of_allocator(report)
    assert found is not None
    assert found.tier == "preview"
    assert "7 calls per step (cudaFree 8, cudaMalloc 6 in 2 steps)" in found.seen
    assert "empty_cache()" in found.remedy
    longer = report.step_ns - before.step_ns
    assert 0 < found.wall_ns <= longer
    assert {"(outside model)", "wpe"} == {place.path for place in found.places if place.wall_ns}
    assert found.saves is not None
    assert found.saves.ns == pytest.approx(longer, rel=0.25)


def test_what_the_gpu_computes_while_a_call_waits_for_it_costs_nothing(tmp_path):
    trace = Recorded("plain_gpt")
    before = trace.report(tmp_path)
    for at in after_optimizer(trace):
        trace.call("cudaFree", at, 2_000)
    report = trace.report(tmp_path)

    found = of_allocator(report)
    (wait,) = (one for one in report.waits if one.operator == "cudaFree")
    assert found is not None
    assert wait.wall_ns > 2 * found.wall_ns
    assert found.wall_ns <= 1.1 * (report.step_ns - before.step_ns)
    assert "host-waits" not in {one.rule for one in report.findings}


def test_where_memory_is_full_the_operator_that_asks_is_named(tmp_path):
    trace = Recorded("plain_gpt")
    for at in in_operator(trace, "aten::gelu_backward"):
        trace.calls(["cudaMalloc", "cudaFree", "cudaFree", "cudaMalloc"], at, 700)

    found = of_allocator(trace.report(tmp_path))

    assert found is not None
    assert "memory is full" in found.seen
    assert "expandable_segments:True" in found.remedy
    assert found.operators == ("aten::gelu_backward",)
    assert found.path.endswith("mlp.act") or "mlp" in found.path


def test_a_library_that_gives_each_piece_back_is_not_an_emptied_cache(tmp_path):
    trace = Recorded("plain_gpt")
    for name in ("aten::embedding", "aten::gelu_backward"):
        for at in in_operator(trace, name):
            trace.call("cudaFree", at, 900)
            trace.call("cudaMalloc", at, 900)

    found = of_allocator(trace.report(tmp_path))

    assert found is not None
    assert "piece by piece" in found.seen
    assert "PyTorch's allocator" in found.remedy


def test_one_release_beside_many_new_sizes_is_not_their_reason(tmp_path):
    trace = Recorded("plain_gpt")
    for at in after_optimizer(trace):
        trace.call("cudaFree", at, 100)
    for at in in_operator(trace, "aten::embedding"):
        trace.calls(["cudaMalloc"] * 5, at, 3_000)

    found = of_allocator(trace.report(tmp_path))

    assert found is not None
    assert "a few sizes" in found.remedy


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["cudaMalloc"] * 3, "a few sizes"),
        (["cudaHostAlloc"] * 3, "Keep pinned buffers"),
        (["hipMalloc", "hipMalloc", "hipHostMalloc"], "a few sizes"),
    ],
)
def test_new_blocks_in_each_step_are_for_sizes_that_were_not_seen(tmp_path, names, said):
    trace = Recorded("plain_gpt")
    for at in in_operator(trace, "aten::embedding"):
        trace.calls(names, at, 12_000)

    found = of_allocator(trace.report(tmp_path))

    assert found is not None
    assert said in found.remedy


def _first_step_alone(trace: Recorded) -> None:
    at = in_operator(trace, "aten::embedding")[-1]
    trace.calls(["cudaMalloc"] * 9, at, 1_000)


def _behind_the_gpu(trace: Recorded) -> None:
    for at in in_operator(trace, "aten::gelu_backward"):
        trace.call("cudaMalloc", at, 20)


def _on_a_thread_that_pins(trace: Recorded) -> None:
    for at in in_operator(trace, "aten::embedding"):
        trace.call("cudaHostAlloc", at, 5_000, beside=True)


def _from_a_pool_of_the_driver(trace: Recorded) -> None:
    for at in in_operator(trace, "aten::embedding"):
        trace.calls(["cudaMallocAsync", "cudaFreeAsync"], at, 5_000)


@pytest.mark.parametrize(
    "look_alike",
    [_first_step_alone, _behind_the_gpu, _on_a_thread_that_pins, _from_a_pool_of_the_driver],
)
def test_what_keeps_no_gpu_waiting_in_most_steps_is_no_finding(
    tmp_path, look_alike: Callable[[Recorded], None]
):
    trace = Recorded("plain_gpt")
    look_alike(trace)
    report = trace.report(tmp_path)
    assert report.rules["allocator-calls"] == "nothing"
