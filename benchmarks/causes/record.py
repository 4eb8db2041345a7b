"""Recording cases: workers take turns on the GPU, and trim while another one records."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.causes.judge import recorded_facts
from benchmarks.harness import Run, commit, turn, write_json
from benchmarks.measuring import (
    Budget,
    machine,
    milliseconds,
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
    from benchmarks.causes.case import Case
    from benchmarks.models import Context

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
            raw = Path(scratch) / "trace.json"
            # Ranks record together: only their driver's other jobs could be in the way.
            with turn("torch", "torch._dynamo", "torchvision") if world == 1 else nullcontext():
                record = _record_case(case, context, raw)
            if rank == 0:
                path = folder / f"{job['name']}{SUFFIX}"
                record["bytes"] = write_trace(trim(read_trace(raw)), path)
        if world > 1:
            import torch

            torch.distributed.barrier()  # the driver ends all once the first has answered
        return record

    return handle


def _record_case(case: Case, context: Context, path: Path) -> Record:
    """Time a case's step, and record two; return what was measured."""
    import torch

    import backspot
    from backspot.testing import unread_marked

    began = time.monotonic()
    made = case.build(context)
    try:
        for _ in range(3):
            made.step()
        times = [milliseconds(made.step, context.device, 2) for _ in range(2)]
        handles = [
            backspot.instrument(module, name=name, markers=False) for module, name in made.modules
        ]
        try:
            made.step()
            synchronize(context.device)
            how = {"steps": 2, "warmup": 1, "settled": 1, "record_shapes": True}
            with unread_marked():
                record_trace(made.step, context.device, path, **how)
        finally:
            for handle in handles:
                handle.remove()
    finally:
        made.close()
    on_gpu = context.device.startswith("cuda")
    return {
        "step_ms": spread(times)["median"],
        "memory_gb": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0,
        "seconds": time.monotonic() - began,
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
    if not run.cases:  # a run that was cut off goes on
        known = recorded_facts(folder)
        there = known["cases"] if known.get("commit") == commit() else {}
        names = [one for one in names if there.get(one, {}).get("status") != "recorded"]
    for ranks, group in _groups(names, cases, run).items():
        records = run_jobs(
            [{"name": name, "folder": str(folder.resolve())} for name in group],
            worker_command(run),
            lambda: _recording(run, cases),
            [Phase(min(run.jobs, 1 if ranks > 1 else run.jobs), _TIMEOUT_S)],
            seconds=budget.left,
            ranks=ranks,
        )
        results |= dict(zip(group, records, strict=True))
        _write_facts(folder, results, run.device)  # a run that is cut off keeps what it has
    good = sum(found["end"] == "done" for found in results.values())
    size = sum(found.get("bytes", 0) for found in results.values())
    spent = time.monotonic() - began
    print(f"{good} of {len(results)} recorded in {spent:.0f} s, {size / 1e6:.1f} MB")
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
        turns[name] = seen[kind]
    # Unasked, a GPU leaves out what is sized for a CPU, and a CPU what is sized for a GPU.
    asked = bool(run.cases) or run.small
    gpus = run.gpus if asked or run.device.startswith("cuda") else 0
    groups: dict[int, list[str]] = {}
    for name in sorted(names, key=turns.__getitem__):
        case = cases[name]
        if (max(1, case.gpus) if asked else case.gpus) != gpus:
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
    cases = {**recorded_facts(folder)["cases"], **facts}
    about = {"commit": commit(), "hardware": machine(device)}
    write_json(folder / "recorded.json", {**about, "cases": cases})
