"""Are Backspot's numbers true? Compares them with two independent measurements.

    python -m benchmarks.accuracy.gpu_truth

For each model: (a) the device time of every module against a second, plain count of its kernels
from the same trace (``traces/plain.py``), which must agree to the nanosecond; (b) the wall time of
every module above 2% of the backward against CUDA events recorded between the modules' backward
nodes in a run without profiler. Absolute where the GPU is the bottleneck, of the backward or of
that module; as shares where the host is, since the profiler slows the host. These are shares of
what the compared modules take together, because events count the engine's time between two nodes
as the first one's, and Backspot gives it a row of its own. There the events are measured twice: two
measurements of one thing differ, too. Beside the recorded wall time stands the
one that a replay corrects by the profiler's cost, which is fitted to the step without profiler.

    python -m benchmarks.accuracy.gpu_truth --cases HOST

takes the cases that wait for the host, and ResNet-50 at batch 128.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backspot.analysis.replay.cost import MEASURED
from backspot.analysis.replay.replay import replay
from benchmarks.accuracy.module_clock import Tracker, fold, time_modules
from benchmarks.accuracy.replayed import corrected_rows, cost_of, read_recording
from benchmarks.cases import exit_code, run_cases, turn
from benchmarks.common import (
    choose,
    command_line,
    interleaved,
    parse,
    print_table,
    record_trace,
    script,
    spread,
)
from benchmarks.traces.plain import Plain, busy, read_plain
from benchmarks.traces.trim import read_trace
from benchmarks.workers import Handler, Job, Record, Stage, serve

_HEAVY = 0.02  # of the backward: what is compared
_FAR = 0.10  # what is explained
_GPU_BOUND = 0.9  # the GPU is busy for this share of the backward, or of the module's wall


def _compare_sums(trace: Path, plain: Plain, depth: int | None) -> dict[str, Any]:
    """(a): the same nanoseconds and the same nodes for every path.

    Where forward code runs again in backward, blocks are compared: code that a checkpointed block
    runs around its modules is the block's for Backspot, and the node's for the plain count.
    """
    import backspot

    report = backspot.locate(trace)
    ours: Counter[str] = Counter()
    theirs: Counter[str] = Counter()
    for row in report.modules:
        ours[fold(row.path, depth)] += row.recorded_gpu_ns
    for path, value in plain.gpu.items():
        theirs[fold(path, depth)] += value
    our_nodes = {
        (row.path, node.name): node.count * report.steps
        for row in report.modules
        for node in row.nodes
        if node.count and node.name != "(recompute)"
    }

    def differing(first: dict[Any, int], second: dict[Any, int]) -> list[Any]:
        return [
            {"what": key, "backspot": first.get(key, 0), "plain": second.get(key, 0)}
            for key in sorted(set(first) | set(second), key=str)
            if first.get(key, 0) != second.get(key, 0)
        ]

    sums, nodes = differing(ours, theirs), differing(our_nodes, dict(plain.nodes))
    return {
        "gpu_ns": sum(ours.values()),
        "plain_gpu_ns": sum(theirs.values()),
        "paths": len(+ours | +theirs),
        "lost": plain.lost,
        "nodes": sum(our_nodes.values()),
        "equal": not sums,
        "nodes_equal": not nodes,
        "differing": sums[:20],
        "nodes_differing": nodes[:20],
        "coverage": {"wall": report.coverage.wall, "gpu": report.coverage.gpu},
        "warnings": list(report.warnings),
    }


def _measuring(arguments: argparse.Namespace) -> Handler:
    def handle(job: Job, stage: Stage) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            with turn("torch", "timm", "torchvision", "transformers"):
                result = _measure(job["name"], arguments, trace)
            stage("sums", result)
            plain = read_plain(read_trace(trace))
            result["sums"] = _compare_sums(trace, plain, result["depth"])
        return result | {"plain_busy": busy(plain.intervals) / max(1, plain.backward)}

    return handle


def _describe(result: Record) -> Iterator[str]:
    sums, backward = result["sums"], result["backward_ms"]
    yield f"kernels equal: {sums['equal']}, nodes equal: {sums['nodes_equal']} of {sums['nodes']}"
    for entry in (*sums["differing"][:5], *sums["nodes_differing"][:5]):
        yield f"  {entry}"
    yield (
        f"{result['bound']}-bound, backward {backward['backspot']:.2f} ms "
        f"(events {backward['events'] or 0:.2f}); {len(result['modules'])} modules"
    )
    for row in result["modules"]:
        if abs(row["difference"]) > _FAR:
            yield f"  far: {_say(row)}"


def _say(row: dict[str, Any]) -> str:
    if "events_ms" not in row:
        return f"{row['path']}: {row['note']}"
    events = row["events_ms"]
    return (
        f"{row['path']}: {row['difference']:+.1%}, Backspot {row['backspot_ms']:.3f} ms "
        f"(gpu {row['gpu_ms']:.3f}), events {events['median']:.3f} "
        f"[{events['low']:.3f}, {events['high']:.3f}], {row['heaviest_nodes'][:2]}"
    )


def _measure(name: str, arguments: argparse.Namespace, trace: Path) -> dict[str, Any]:
    """What needs the device: the profile, and (b)."""
    import torch

    import backspot
    from benchmarks.accuracy.truth_models import HOST, MODELS
    from benchmarks.models import Context, training_step

    device = arguments.device
    torch.manual_seed(0)
    build = MODELS[name](Context(device, arguments.small))
    steps = 3 if arguments.small else 15
    optimizer = torch.optim.SGD(build.model.parameters(), lr=1e-6)
    step = training_step(build.model, build.loss, optimizer)
    with backspot.instrument(build.model):
        for _ in range(3):
            step()
        # A host varies more than a GPU does.
        recorded = 3 if arguments.small or name not in HOST else 10
        record_trace(step, device, trace, steps=recorded, warmup=2, settled=2)
    report = backspot.locate(trace, depth=build.levels)
    occupied = _occupied(report, trace)
    gpu_bound = device == "cpu" or occupied >= _GPU_BOUND
    wall = report.wall_ns
    heavy = [row for row in report.modules if row.wall_ns >= _HEAVY * report.wall_ns]
    result: dict[str, Any] = {
        "bound": "host" if device == "cpu" else "gpu" if gpu_bound else "launch",
        "busy": occupied,
        "kernel_ms": report.gpu_ns / 1e6,
        "depth": build.depth,
        "backward_ms": {"backspot": wall / 1e6, "events": None},
        "modules": [],
    }
    if not build.clock:
        return {**result, "clock": "kernels of two streams run at once: no events"}
    corrected, result["replay"] = _corrected(report, trace, step, device, build.levels)
    tracker = Tracker(build.model)
    gc.collect()
    gc.disable()
    measured: dict[str, dict[str, Any]] = {}
    again: dict[str, dict[str, Any]] = {}
    if gpu_bound:
        every = time_modules(build, tracker, device, steps, None, ahead=True)
        measured = {row.path: every for row in heavy}
    else:  # one module at a time, so that the hooks cost the host next to nothing
        begin = time.monotonic()
        for found in (measured, again):
            for row in heavy:
                if time.monotonic() - begin < 60:
                    found[row.path] = time_modules(
                        build, tracker, device, steps, row.path, ahead=False
                    )
    result["in_order"] = all(found["in_order"] for found in measured.values())
    result["backward_ms"]["events"] = statistics.median(
        statistics.median(found["totals"]) for found in measured.values()
    )
    result["modules"] = list(
        _rows(heavy, corrected, measured, again, wall, absolute=gpu_bound and device != "cpu")
    )
    return result


def _corrected(
    report: Any, trace: Path, step: Callable[[], None], device: str, depth: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows without the profiler's cost, by path, and how they were found."""
    (times,) = interleaved([step], device, rounds=15, inner=2, seconds=4)
    real = statistics.median(times)
    recorded = report.step_ns / 1e6
    said: dict[str, Any] = {"real_ms": real, "recorded_ms": recorded}
    try:
        recording = read_recording(trace)
    except RuntimeError as refusal:
        return {}, said | {"refused": str(refusal)}
    cost, refused = cost_of(recording, real * 1e6)
    rows = {row.path: row for row in corrected_rows(recording, cost, depth)}
    steps = replay(recording, cost).step_ns
    usual = replay(recording, MEASURED).step_ns
    said |= {"replayed_ms": statistics.median(steps) / 1e6, "refused": refused}
    said |= {"unfitted_ms": statistics.median(usual) / 1e6, "cost": asdict(cost)}
    return rows, said


def _occupied(report: Any, trace: Path) -> float:
    """The share of the backward in which the GPU is busy with it."""
    if not report.has_gpu:
        return 0.0
    plain = read_plain(read_trace(trace))
    return busy(plain.intervals) / max(1, report.recorded_wall_ns)


def _rows(
    heavy: Sequence[Any],
    corrected: dict[str, Any],
    measured: dict[str, dict[str, Any]],
    again: dict[str, dict[str, Any]],
    wall: float,
    *,
    absolute: bool,
) -> Iterator[dict[str, Any]]:
    seen = [row for row in heavy if row.path in measured.get(row.path, {"times": ()})["times"]]
    for row in heavy:
        if row not in seen and (row.is_module or row.path == "(outside model)"):
            yield {"path": row.path, "difference": float("inf"), "note": "not seen by events"}
    shares = {row.path: statistics.median(measured[row.path]["shares"][row.path]) for row in seen}
    of_events, ours = sum(shares.values()), sum(row.wall_ns for row in seen)
    theirs = sum(corrected[row.path].wall_ns for row in seen if row.path in corrected)
    for row in seen:
        found = measured[row.path]
        times = spread(found["times"][row.path])
        in_ms = absolute or row.gpu_ns >= _GPU_BOUND * row.wall_ns
        share = shares[row.path] / of_events
        more: dict[str, Any] = {}
        if row.path in corrected:
            ns = corrected[row.path].wall_ns
            real = times["median"] * 1e6 / ns if in_ms else share * theirs / ns
            more = {"corrected_ms": ns / 1e6, "corrected_difference": 1 / real - 1}
        if row.path in again and row.path in again[row.path]["times"]:
            kind = "times" if in_ms else "shares"
            first, second = (of[row.path][kind][row.path] for of in (measured, again))
            more["events_apart"] = statistics.median(second) / statistics.median(first) - 1
        yield {
            **more,
            "path": row.path,
            "class": row.class_name,
            "difference": row.wall_ms / times["median"] - 1
            if in_ms
            else row.wall_ns / ours / share - 1,
            "compared": "ms" if in_ms else "share",
            "backspot_ms": row.wall_ms,
            "backspot_steps_ms": [value / 1e6 for value in row.wall_ns_by_step],
            "backspot_share": row.wall_ns / wall,
            "events_ms": times,
            "events_share": shares[row.path],
            "gpu_ms": row.gpu_ms,
            "cpu_ms": row.cpu_ms,
            "heaviest_nodes": [(n.name, n.count, n.wall_ns / 1e6) for n in row.nodes[:3]],
        }


def _summarise(cases: dict[str, Any]) -> dict[str, Any]:
    """Distribution of the differences and the outliers, over all cases so far."""
    groups: dict[str, list[float]] = defaultdict(list)
    corrected: dict[str, list[float]] = defaultdict(list)
    apart: dict[str, list[float]] = defaultdict(list)
    outliers = []
    for name, case in cases.items():
        for row in case.get("modules", ()):
            if row["difference"] != float("inf"):
                groups[row["compared"]].append(abs(row["difference"]))
                if "corrected_difference" in row:
                    corrected[row["compared"]].append(abs(row["corrected_difference"]))
                if "events_apart" in row:
                    apart[row["compared"]].append(abs(row["events_apart"]))
            if abs(row["difference"]) > _FAR:
                outliers.append({"case": name, "bound": case["bound"], **row})
    distribution = {}
    for compared, values in groups.items():
        values.sort()
        distribution[compared] = {
            "modules": len(values),
            "median": statistics.median(values),
            "p90": values[int(0.9 * (len(values) - 1))],
            "max": values[-1],
            "above_10_percent": sum(value > _FAR for value in values),
        }
        if after := corrected[compared]:
            distribution[compared] |= {
                "corrected_median": statistics.median(after),
                "corrected_max": max(after),
            }
        if repeated := apart[compared]:
            distribution[compared] |= {
                "events_apart_median": statistics.median(repeated),
                "events_apart_max": max(repeated),
            }
    return {"distribution": distribution, "outliers": outliers}


_SMALL = ("mlp_launch_bound", "lstm")


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(command_line(__doc__, out="gpu_truth.json", seconds=520, jobs=2), argv)
    if arguments.worker:
        serve(_measuring(arguments))
        return 0
    from benchmarks.accuracy.truth_models import HOST, MODELS

    if arguments.cases == "HOST":
        arguments.cases = ",".join(HOST)
    cases = run_cases(
        __spec__.name,
        choose(arguments, dict.fromkeys(MODELS, ""), _SMALL),
        arguments,
        lambda: _measuring(arguments),
        summarise=_summarise,
        describe=_describe,
    )
    head = ("model", "bound", "busy", "kernels equal", "nodes", "equal", "backward ms", "events ms",
            "modules > 2%", "median diff %", "max diff %", "> 10%", "step ms", "recorded",
            "replayed", "corrected median %", "max %")  # fmt: skip
    rows = []
    for name, case in cases.items():
        if "sums" not in case:
            rows.append((name, case["end"], *([None] * 15)))
            continue
        sums = case["sums"]
        differences = [abs(row["difference"]) * 100 for row in case["modules"]] or [float("nan")]
        found = case.get("replay", {})
        after = [abs(row["corrected_difference"]) * 100
                 for row in case["modules"] if "corrected_difference" in row]  # fmt: skip
        rows.append((
            name, case["bound"], case["busy"], str(sums["equal"]), sums["nodes"],
            str(sums["nodes_equal"]), case["backward_ms"]["backspot"],
            case["backward_ms"]["events"], len(case["modules"]), statistics.median(differences),
            max(differences), sum(value > _FAR * 100 for value in differences),
            *(found.get(key) for key in ("real_ms", "recorded_ms", "replayed_ms")),
            statistics.median(after) if after else None, max(after) if after else None,
        ))  # fmt: skip
    print_table(head, rows)
    print(_summarise(cases)["distribution"])
    return exit_code(cases.values())


if __name__ == "__main__":
    sys.exit(main())
