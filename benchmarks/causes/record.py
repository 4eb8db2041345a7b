"""Recording cases: workers take turns on the GPU, and trim while another one records."""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Run, turn, write_json
from benchmarks.measuring import (
    Budget,
    machine,
    milliseconds,
    profiling,
    record_trace,
    spread,
    synchronize,
)
from benchmarks.traces.trim import SUFFIX, read_trace, trim, write_trace
from benchmarks.workers import (
    NO_TIME,
    Handler,
    Job,
    Phase,
    Record,
    Stage,
    run_jobs,
    serve,
    worker_command,
)

if TYPE_CHECKING:
    from benchmarks.causes.case import Built, Case
    from benchmarks.models import Context

_EVALUATE = "autograd::engine::evaluate_function: "
_PART_BYTES = 15_000_000
"""How large each tar may become."""
_TIMEOUT_S = 240.0
"""After how long a case is taken to hang."""


# In the worker -----------------------------------------------------------------------------------


def join_ranks(device: str) -> tuple[str, int, int]:
    """Join the other ranks of this job, if there are any.

    Returns:
        This rank's device, the rank, and the number of ranks.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return device, rank, world
    import torch
    import torch.distributed as dist

    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device, rank, world


def _recording(run: Run, cases: Mapping[str, Case]) -> Handler:
    """Return what records one case; join the other ranks first, if there are any."""
    from benchmarks.causes.case import settings
    from benchmarks.models import Context

    device, rank, world = join_ranks(run.device)

    def handle(job: Job, _: Stage) -> Record:
        case, folder = cases[job["name"]], Path(job["folder"])
        settings()
        context = Context(device, run.small, rank, world)
        with tempfile.TemporaryDirectory() as scratch:
            # Ranks record together: only their driver's other jobs could be in the way.
            with turn("torch", "torch._dynamo", "torchvision") if world == 1 else nullcontext():
                record, expect = _record_case(case, context, Path(scratch))
            traces = sorted(Path(scratch).iterdir(), key=lambda path: path.stat().st_mtime_ns)
            for number, raw in enumerate(traces):
                suffix = f".rank{rank}" if world > 1 and not case.rule else ""
                suffix += f".cycle{number}" if len(traces) > 1 else ""
                if not case.rule:
                    known = {"case": job["name"], **expect, "counted": _counts(raw)}
                    write_json(folder / f"{job['name']}{suffix}.expect.json", known)
                if rank == 0 or not case.rule:
                    path = folder / f"{job['name']}{suffix}{SUFFIX}"
                    record["bytes"] = write_trace(trim(read_trace(raw)), path)
        if world > 1:
            import torch

            torch.distributed.barrier()  # the driver ends all once the first has answered
        return record

    return handle


def _record_case(case: Case, context: Context, folder: Path) -> tuple[Record, dict[str, Any]]:
    """Time a case's step, and record two; return what was measured, and what is known of it."""
    import torch

    import backspot

    began = time.monotonic()
    made = case.build(context)
    try:
        for _ in range(made.warmup):
            made.step()
        times = [milliseconds(made.step, context.device, 2) for _ in range(2)]
        stack = made.how == "stack"
        handles = [] if stack else [backspot.instrument(m, name=name) for m, name in made.modules]
        try:
            made.step()
            synchronize(context.device)
            _profile(made, context.device, folder, record_shapes=case.shapes, with_stack=stack)
        finally:
            for handle in handles:
                handle.remove()
    finally:
        made.close()
    on_gpu = context.device.startswith("cuda")
    record = {
        "step_ms": spread(times)["median"],
        "memory_gb": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0,
        "seconds": time.monotonic() - began,
    }
    expect = {"steps": 2, "passes": 2, "source": "backspot", "hardware": machine(context.device)}
    expect |= {"rank": context.rank, "world": context.world}
    expect["labelled_modules"] = sum(len(handle.paths) for handle in handles)
    return record, {**expect, **made.expect}


def _profile(made: Built, device: str, folder: Path, **options: bool) -> None:
    """Profile two steps, or two cycles of two, and export them to the folder."""
    if made.how != "scheduled":
        path = folder / "trace.json"
        record_trace(made.step, device, path, steps=2, warmup=1, settled=1, **options)
        return
    from torch.profiler import schedule, tensorboard_trace_handler

    with profiling(
        device,
        schedule=schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=tensorboard_trace_handler(str(folder), worker_name="worker", use_gzip=True),
        **options,
    ) as prof:
        for _ in range(8):
            made.step()
            prof.step()


def _counts(path: Path) -> dict[str, Any]:
    """What the whole trace holds, counted plainly."""
    document = read_trace(path)
    events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    names = [e["name"] for e in events]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    nodes = Counter(name.removeprefix(_EVALUATE) for name in names if name.startswith(_EVALUATE))
    marks = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    return {
        "evaluate_function_events": nodes.total(),
        "nodes": dict(nodes.most_common()),
        "device_work": dict(Counter(e["cat"] for e in work)),
        "devices": sorted({e["args"].get("device", 0) for e in work}),
        "streams": sorted({e["args"].get("stream", 0) for e in work}),
        "steps": sum(name.startswith("ProfilerStep#") for name in marks),
        "forward_labels": sum(name.startswith("forward: ") for name in names),
        "backward_markers": sum(name.startswith("backward: ") for name in names),
        "flows": sum(e.get("cat") == "fwdbwd" and e["ph"] == "s" for e in document["traceEvents"]),
        "events": len(events),
    }


# In the driver -----------------------------------------------------------------------------------


def record(run: Run, cases: Mapping[str, Case], names: Sequence[str], folder: Path) -> int:
    """Record the named cases that this machine's GPUs are meant for; return the exit code.

    In a worker, this serves the driver and ends.
    """
    if run.worker:
        serve(_recording(run, cases))
        raise SystemExit(0)
    folder.mkdir(parents=True, exist_ok=True)
    budget, began = Budget(run.seconds), time.monotonic()
    results: dict[str, Record] = {}
    for ranks, group in _groups(names, cases, run).items():
        records = run_jobs(
            [{"name": name, "folder": str(folder.resolve())} for name in group],
            worker_command(run),
            lambda: _recording(run, cases),
            [Phase(min(run.jobs, 1 if ranks > 1 else run.jobs), _TIMEOUT_S)],
            seconds=budget.left,
            ranks=ranks,
            fresh=not cases[group[0]].rule,
        )
        results |= dict(zip(group, records, strict=True))
        _write_facts(folder, results, run.device)  # a run that is cut off keeps what it has
    good = sum(found["end"] == "done" for found in results.values())
    size = sum(found.get("bytes", 0) for found in results.values())
    spent = time.monotonic() - began
    print(f"{good} of {len(results)} recorded in {spent:.0f} s, {size / 1e6:.1f} MB")
    if run.tar:
        _pack(folder, run.tar)
    ends = {found["end"] for found in results.values()}
    return 3 if NO_TIME in ends else int(bool(ends - {"done"}))


def _groups(names: Sequence[str], cases: Mapping[str, Case], run: Run) -> dict[int, list[str]]:
    """The cases for the GPUs of this run, by their number of ranks.

    The first case of each rule comes first, then the second: a run that is cut short has something
    of each.
    """
    seen: Counter[tuple[str, bool]] = Counter()
    turns = {}
    for name in names:
        kind = cases[name].rule, cases[name].planted
        seen[kind] += 1
        turns[name] = seen[kind] if cases[name].rule else 0
    groups: dict[int, list[str]] = {}
    for name in sorted(names, key=turns.__getitem__):
        case = cases[name]
        on_gpus = run.device == "cuda" or case.rule or case.ranks > 1 or not case.gpus
        if max(1, case.gpus) != run.gpus or not on_gpus:
            continue
        if case.ranks > 1 and not run.jobs:
            print(f"{name}: left out, its ranks need worker processes: --jobs 1")
        else:
            groups.setdefault(case.ranks, []).append(name)
    return groups


def _write_facts(folder: Path, results: Mapping[str, Record], device: str) -> None:
    """Write what is known of each case, beside what earlier runs wrote."""
    facts = {}
    for name, found in results.items():
        end = "recorded" if found["end"] == "done" else found["end"]
        facts[name] = {"status": end, **{k: v for k, v in found.items() if k != "end"}}
    known = folder / "recorded.json"
    before = json.loads(known.read_text())["cases"] if known.exists() else {}
    write_json(known, {"hardware": machine(device), "cases": {**before, **facts}})


def _pack(folder: Path, base: Path) -> None:
    """Put the files of ``folder`` into ``base``-0.tar, -1.tar … of at most ``_PART_BYTES``."""
    base.parent.mkdir(parents=True, exist_ok=True)
    parts: list[list[Path]] = [[]]
    held = 0
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".gz", ".json")):
        size = path.stat().st_size + 2048
        if parts[-1] and held + size > _PART_BYTES:
            parts.append([])
            held = 0
        parts[-1].append(path)
        held += size
    for number, paths in enumerate(parts):
        with tarfile.open(f"{base}-{number}.tar", "w") as archive:
            for path in paths:
                archive.add(path, arcname=path.name)
    print(f"packed into {len(parts)} files: {base}-*.tar")
