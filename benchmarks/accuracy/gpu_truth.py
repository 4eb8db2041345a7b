"""Are Backspot's numbers true? Compares them with two independent measurements.

    python -m benchmarks gpu_truth

For each model: (a) the device time of every module against a second, plain count of its kernels
from the same trace (``traces/plain.py``), which must agree to the nanosecond; (b) the wall time of
every module above 2% of the backward against CUDA events recorded between the modules' backward
nodes in a run without profiler. Absolute where the GPU is the bottleneck, of the backward or of
that module; as shares where the host is, since the profiler slows the host. These are shares of
what the compared modules take together, because events count the engine's time between two nodes
as the first one's, and Backspot gives it a row of its own. There the events are measured twice: two
measurements of one thing differ, too. ``--cases
HOST`` takes the cases that wait for the host, and ResNet-50 at batch 128.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.module_clock import Tracker, fold, time_modules
from benchmarks.harness import Figures, Run, done, each, turn
from benchmarks.measuring import record_trace, spread
from benchmarks.traces.plain import Plain, busy, read_plain
from benchmarks.traces.trim import read_trace
from benchmarks.workers import Job, Record, Stage

_HEAVY = 0.02  # of the backward: what is compared
_FAR = 0.10  # what is explained
_GPU_BOUND = 0.9  # the GPU is busy for this share of the backward, or of the module's wall

Row = dict[str, Any]


# (a) The same nanoseconds ------------------------------------------------------------------------


def _compare_sums(trace: Path, plain: Plain, depth: int | None) -> Row:
    """Compare nanoseconds and nodes of every path.

    Where forward code runs again in backward, blocks are compared: code that a checkpointed block
    runs around its modules is the block's for Backspot, and the node's for the plain count.
    """
    import backspot

    report = backspot.locate(trace)
    ours: Counter[str] = Counter()
    theirs: Counter[str] = Counter()
    for row in report.modules:
        ours[fold(row.path, depth)] += sum(row.gpu_ns_by_step)
    for path, value in plain.gpu.items():
        theirs[fold(path, depth)] += value
    our_nodes = {
        (row.path, node.name): node.count * report.steps
        for row in report.modules
        for node in row.nodes
        if node.count and node.name != "(recompute)"
    }
    sums, nodes = _differing(ours, theirs), _differing(our_nodes, plain.nodes)
    return {
        "gpu_ns": ours.total(),
        "plain_gpu_ns": theirs.total(),
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


def _differing(ours: dict[Any, int], theirs: dict[Any, int]) -> list[Row]:
    return [
        {"what": key, "backspot": ours.get(key, 0), "plain": theirs.get(key, 0)}
        for key in sorted(set(ours) | set(theirs), key=str)
        if ours.get(key, 0) != theirs.get(key, 0)
    ]


# (b) The same times ------------------------------------------------------------------------------


def _measure(name: str, run: Run, trace: Path) -> Record:
    """What needs the device: the profile, and the events."""
    import torch

    import backspot
    from benchmarks.accuracy.truth_models import HOST, MODELS
    from benchmarks.models import training_step

    device = run.device
    torch.manual_seed(0)
    build = MODELS[name](run.context)
    optimizer = torch.optim.SGD(build.model.parameters(), lr=1e-6)
    step = training_step(build.model, build.loss, optimizer)
    with backspot.instrument(build.model, markers=False):
        for _ in range(3):
            step()
        # A host varies more than a GPU does.
        recorded = 3 if run.small or name not in HOST else 10
        record_trace(step, device, trace, steps=recorded, warmup=2, settled=2)
    report = backspot.locate(trace, depth=build.levels)
    plain = read_plain(read_trace(trace))
    # The report has a typical step; the intervals are of all that were recorded.
    backward_ns = max(1, report.recorded_wall_ns) * report.steps
    occupied = busy(plain.intervals) / backward_ns if report.has_gpu else 0.0
    gpu_bound = device == "cpu" or occupied >= _GPU_BOUND
    wall = report.wall_ns
    heavy = [row for row in report.modules if row.wall_ns >= _HEAVY * wall]
    result: Record = {
        "bound": "host" if device == "cpu" else "gpu" if gpu_bound else "launch",
        "busy": occupied,
        "kernel_ms": report.gpu_ns / 1e6,
        "depth": build.depth,
        "backward_ms": {"backspot": wall / 1e6, "events": None},
        "modules": [],
    }
    if not build.clock:
        return {**result, "clock": "kernels of two streams run at once: no events"}
    steps = 3 if run.small else 15
    tracker = Tracker(build.model)
    gc.collect()
    gc.disable()
    first: dict[str, Row] = {}
    second: dict[str, Row] = {}
    if gpu_bound:
        every = time_modules(build, tracker, device, steps, None, ahead=True)
        first = {row.path: every for row in heavy}
    else:  # one module at a time, so that the hooks cost the host next to nothing
        begin = time.monotonic()
        for found in (first, second):
            for row in heavy:
                if time.monotonic() - begin < 60:
                    only = row.path
                    found[only] = time_modules(build, tracker, device, steps, only, ahead=False)
    result["in_order"] = all(found["in_order"] for found in first.values())
    totals = [statistics.median(found["totals"]) for found in first.values()]
    result["backward_ms"]["events"] = statistics.median(totals)
    absolute = gpu_bound and device != "cpu"
    result["modules"] = list(_rows(heavy, first, second, wall, absolute=absolute))
    return result


def _rows(
    heavy: Sequence[Any],
    first: dict[str, Row],
    second: dict[str, Row],
    wall: float,
    *,
    absolute: bool,
) -> Iterator[Row]:
    seen = [row for row in heavy if row.path in first.get(row.path, {"times": ()})["times"]]
    for row in heavy:
        if row not in seen and (row.is_module or row.path == "(outside model)"):
            yield {"path": row.path, "difference": float("inf"), "note": "not seen by events"}
    shares = {row.path: statistics.median(first[row.path]["shares"][row.path]) for row in seen}
    of_events, ours = sum(shares.values()), sum(row.wall_ns for row in seen)
    for row in seen:
        path = row.path
        times = spread(first[path]["times"][path])
        in_ms = absolute or row.gpu_ns >= _GPU_BOUND * row.wall_ns
        share = shares[path] / of_events
        more: Row = {}
        if path in second and path in second[path]["times"]:
            kind = "times" if in_ms else "shares"
            one, other = (statistics.median(of[path][kind][path]) for of in (first, second))
            more["events_apart"] = other / one - 1
        off = row.wall_ms / times["median"] if in_ms else row.wall_ns / ours / share
        yield {
            **more,
            "path": path,
            "class": row.class_name,
            "difference": off - 1,
            "compared": "ms" if in_ms else "share",
            "backspot_ms": row.wall_ms,
            "backspot_steps_ms": [value / 1e6 for value in row.wall_ns_by_step],
            "backspot_share": row.wall_ns / wall,
            "events_ms": times,
            "events_share": shares[path],
            "gpu_ms": row.gpu_ns / 1e6,
            "cpu_ms": row.cpu_ns / 1e6,
            "heaviest_nodes": [(n.name, n.count, n.wall_ns / 1e6) for n in row.nodes[:3]],
        }


# The run -----------------------------------------------------------------------------------------


def _summary(cases: dict[str, Record]) -> dict[str, Any]:
    """Distribution of the differences, by what was compared."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in cases.values():
        for row in case.get("modules", ()):
            for key in ("difference", "events_apart"):
                if key in row and row["difference"] != float("inf"):
                    found[row["compared"]][key].append(abs(row[key]))
    distribution: dict[str, Any] = {}
    for compared, kinds in found.items():
        values = sorted(kinds["difference"])
        distribution[compared] = {
            "modules": len(values),
            "p90": values[int(0.9 * (len(values) - 1))],
            "above_10_percent": sum(value > _FAR for value in values),
            **{f"{key}_median": statistics.median(some) for key, some in kinds.items()},
            **{f"{key}_max": max(some) for key, some in kinds.items()},
        }
    return distribution


def _row(name: str, case: Record) -> Row:
    """A row of the table: what is equal, and how far times are apart."""
    row: Row = {"model": name, "end": case["end"]}
    if case["end"] != "done":
        return row
    off = [abs(module["difference"]) for module in case["modules"]]
    row |= {key: case[key] for key in ("bound", "busy")}
    row |= {key: case["sums"][key] for key in ("equal", "nodes", "nodes_equal")}
    row |= {f"backward ms, {key}": value for key, value in case["backward_ms"].items()}
    row |= {"modules": len(off), "above 10%": sum(one > _FAR for one in off)}
    row |= {"median off": statistics.median(off), "most": max(off)} if off else {}
    return row


def answer(run: Run) -> Figures:
    def handle(job: Job, stage: Stage) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            with turn("torch", "timm", "torchvision", "transformers"):
                result = _measure(job["name"], run, trace)
            stage("sums", result)
            plain = read_plain(read_trace(trace))
            result["sums"] = _compare_sums(trace, plain, result["depth"])
        return result | {"plain_busy": busy(plain.intervals) / max(1, plain.backward)}

    def known() -> dict[str, Any]:
        from benchmarks.accuracy.truth_models import HOST, MODELS

        if run.cases == "HOST":
            run.cases = ",".join(HOST)
        return MODELS

    cases = each(run, known, handle, small=("mlp_launch_bound", "lstm"))
    rows = [_row(name, case) for name, case in cases.items()]
    sums = [case["sums"]["equal"] for case in done(cases).values()]
    summary = {"models": len(sums), "equal to the nanosecond": sum(sums), **_summary(cases)}
    return {"cases": cases, "rows": rows, "lines": _lines(rows, cases), "summary": summary}


def _lines(rows: Sequence[Row], cases: dict[str, Record]) -> list[Row]:
    """What is kept: of each model the sums, and of each of its modules how far times are apart."""
    shown = ("model", "end", "bound", "busy", "nodes", "equal", "nodes_equal")
    apart = ("path", "compared", "difference", "events_apart")
    return [
        line
        for row in rows
        for line in (
            {key: row.get(key) for key in shown},
            *(
                {"model": row["model"], **{key: module.get(key) for key in apart}}
                for module in cases[row["model"]].get("modules", ())
            ),
        )
    ]
