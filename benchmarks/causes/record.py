"""Recording the planted causes: workers hold the GPU, and others trim the traces."""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import exit_code, join_ranks
from benchmarks.common import (
    Budget,
    CannotRunError,
    machine,
    record_trace,
    spread,
    synchronize,
    write_json,
)
from benchmarks.traces.trim import SUFFIX, trim_file
from benchmarks.workers import Handler, Job, Phase, Record, Stage, run, short, worker_command

if TYPE_CHECKING:
    from benchmarks.causes.case import Case

__all__ = ["record", "recording"]

_PART_BYTES = 15_000_000
"""How large each tar may become."""

_TIMEOUT_S = 75.0
"""After how long a case is taken to hang."""


# In the worker -----------------------------------------------------------------------------------


def recording(arguments: argparse.Namespace, cases: Mapping[str, Case]) -> Handler:
    """Return what records one case; join the other ranks first, if there are any."""
    from benchmarks.causes.case import Context, settings

    device, rank, world = join_ranks(arguments.device)

    def handle(job: Job, _: Stage) -> Record:
        settings()
        path = _raw(Path(job["folder"]), job["name"], rank)
        return _record_case(cases[job["name"]], Context(device, arguments.small, rank, world), path)

    return handle


def _raw(folder: Path, name: str, rank: int = 0) -> Path:
    return folder / "raw" / f"{name}.rank{rank}.json"


def _record_case(case: Case, context: Any, path: Path) -> Record:
    """Time a case's step, and record two (or one) with shapes after one of warm-up."""
    import torch

    import backspot

    began = time.monotonic()
    made = case.build(context)
    try:
        times = []
        for _ in range(3):
            made.step()
        synchronize(context.device)
        for _ in range(2):
            start = time.perf_counter()
            made.step()
            made.step()
            synchronize(context.device)
            times.append((time.perf_counter() - start) * 500)
        handles = [backspot.instrument(module, name=name) for module, name in made.modules]
        try:
            made.step()
            synchronize(context.device)
            record_trace(
                made.step,
                context.device,
                path,
                steps=case.steps,
                warmup=1,
                settled=1,
                record_shapes=True,
            )
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


def record(
    arguments: argparse.Namespace, cases: Mapping[str, Case], groups: Mapping[int, Sequence[str]]
) -> int:
    """Record the cases of ``groups``, named by the number of ranks; return the exit code."""
    folder: Path = arguments.out
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    budget, began = Budget(arguments.seconds), time.monotonic()
    results: dict[str, Record] = {}
    trimming: dict[str, Future[tuple[int, int]]] = {}
    processes = max(1, min(6, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:

        def ended(job: Job, record: Record) -> None:
            name = job["name"]
            results[name] = record
            if record["end"] == "done":
                paths = _raw(folder, name), folder / f"{name}{SUFFIX}"
                if arguments.jobs:
                    trimming[name] = pool.submit(trim_file, *paths)
                else:
                    record |= _trimmed(lambda: trim_file(*paths))

        try:
            for ranks, names in groups.items():
                if ranks > 1 and not arguments.jobs:
                    raise CannotRunError(f"cases of {ranks} ranks need worker processes: --jobs 1")
                records = run(
                    [{"name": name, "folder": str(folder)} for name in names],
                    worker_command("benchmarks.causes", arguments, "--set", arguments.set),
                    lambda: recording(arguments, cases),
                    [Phase(min(1, arguments.jobs), _TIMEOUT_S)],
                    seconds=budget.left,
                    ranks=ranks,
                    ended=ended,
                )
                results |= dict(zip(names, records, strict=True))
        finally:  # a run that is interrupted keeps what it has
            for name, future in trimming.items():
                results[name] |= _trimmed(lambda future=future: future.result(120))
            _write_facts(folder, results, arguments.device)
            for raw in (folder / "raw").iterdir():
                raw.unlink()
    good = sum(found["end"] == "done" for found in results.values())
    size = sum(found.get("bytes", 0) for found in results.values())
    spent = time.monotonic() - began
    print(f"{good} of {len(results)} recorded in {spent:.0f} s, {size / 1e6:.1f} MB")
    if arguments.tar:
        _pack(folder, arguments.tar)
    return exit_code(results.values())


def _trimmed(trim: Callable[[], tuple[int, int]]) -> Record:
    """What trimming a trace adds to a record."""
    try:
        events, size = trim()
    except Exception as error:
        return {"end": "error", "error": f"trimming: {short(error)}"}
    return {"events": events, "bytes": size}


def _write_facts(folder: Path, results: Mapping[str, Record], device: str) -> None:
    """Write what is known of each case, beside what earlier runs wrote."""
    facts = {}
    for name, record in results.items():
        end = "recorded" if record["end"] == "done" else record["end"]
        facts[name] = {"status": end, **{k: v for k, v in record.items() if k != "end"}}
    known = folder / "recorded.json"
    before = json.loads(known.read_text())["cases"] if known.exists() else {}
    write_json(known, {"hardware": machine(device), "cases": {**before, **facts}})


def _pack(folder: Path, base: Path) -> None:
    """Put the traces of ``folder`` into ``base``-0.tar, -1.tar … of at most ``_PART_BYTES``."""
    base.parent.mkdir(parents=True, exist_ok=True)
    parts: list[list[Path]] = [[]]
    held = 0
    for path in sorted([*folder.glob(f"*{SUFFIX}"), folder / "recorded.json"]):
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
