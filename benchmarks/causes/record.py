"""Recording the planted causes: workers that hold the GPU, and others that trim what they write."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Budget, machine, spread, synchronize, write_json
from benchmarks.traces.trim import read_trace, trim, write_trace
from benchmarks.workers import rank_environments, resolve_device

if TYPE_CHECKING:
    from benchmarks.causes.case import Case, Context

__all__ = ["add_recording_arguments", "record", "work"]

_PART_BYTES = 15_000_000
"""How large each tar may become."""

_SILENCE = 75.0
"""Seconds without a word after which a worker is taken to hang."""


# In the worker ------------------------------------------------------------------------------------


def _profile(modules: list[Any], step: Any, path: Path, device: str, *, steps: int) -> None:  # noqa: ANN401
    """Record ``steps`` steps, each marked, with shapes, after one of warm-up; and export."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    import backspot

    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    handles = [backspot.instrument(module, name=name) for module, name in modules]
    try:
        step()
        synchronize(device)
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps),
            on_trace_ready=lambda prof: prof.export_chrome_trace(str(path)),
            record_shapes=True,
        ) as prof:
            for number in range(1 + steps):
                step()
                if number == 0:  # what was warmed up is not part of the first step
                    synchronize(device)
                prof.step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
    finally:
        for handle in handles:
            handle.remove()


def work(arguments: argparse.Namespace, cases: Mapping[str, Case], *, steps: int = 2) -> None:
    """Record those named of ``cases``, one after another; tell the driver of each in a file."""
    import torch

    from benchmarks.causes.case import Context, settings

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = arguments.device
    if world > 1:
        import torch.distributed as dist

        if device.startswith("cuda"):
            device = f"cuda:{rank}"
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    with (arguments.out / f"status.{os.getpid()}.jsonl").open("a") as told:

        def tell(**facts: Any) -> None:  # noqa: ANN401
            if rank == 0:
                print(json.dumps(facts), file=told, flush=True)

        tell(hardware=machine(device))
        for name in arguments.cases.split(","):
            tell(case=name, status="begun")
            settings()
            path = arguments.out / "raw" / f"{name}.rank{rank}.json"
            try:
                context = Context(device, arguments.small, rank, world)
                facts = _record_case(cases[name], context, path, steps)
            except Exception:
                if world > 1:
                    traceback.print_exc()
                tell(case=name, status="failed", error=traceback.format_exc(limit=-4))
            else:
                tell(case=name, status="recorded", **facts)
            gc.collect()
            if device.startswith("cuda"):
                torch.cuda.empty_cache()


def _record_case(case: Case, context: Context, path: Path, steps: int) -> dict[str, Any]:
    import torch

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
        _profile(made.modules, made.step, path, context.device, steps=steps)
    finally:
        made.close()
    on_gpu = context.device.startswith("cuda")
    return {
        "step_ms": spread(times)["median"],
        "memory_gb": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0,
        "seconds": time.monotonic() - began,
    }


# In the driver ------------------------------------------------------------------------------------


def add_recording_arguments(parser: argparse.ArgumentParser, *, seconds: int) -> None:
    parser.add_argument("-o", "--out", type=Path, required=True, help="a folder for the traces")
    parser.add_argument("--device", default="", help="cuda or cpu (default: cuda where there is)")
    parser.add_argument("--small", "--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--seconds", type=float, default=seconds, help="time for the whole run")
    parser.add_argument("--tar", type=Path, help="pack the traces into TAR-0.tar, TAR-1.tar …")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def _trim_file(raw: Path, target: Path) -> tuple[int, int]:
    document = trim(read_trace(raw))
    size = write_trace(document, target)
    raw.unlink()
    return len(document["traceEvents"]), size


class Recorder:
    """Runs workers over cases until each is recorded, has failed, or no time is left."""

    def __init__(self, module: str, arguments: argparse.Namespace) -> None:
        self.module, self.arguments = module, arguments
        self.budget = Budget(arguments.seconds)
        self.began = time.monotonic()
        self.results: dict[str, dict[str, Any]] = {}
        self.hardware: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}
        workers = max(1, min(6, (os.cpu_count() or 2) - 2))
        self.pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))

    def run(self, names: list[str], ranks: int) -> None:
        """Record ``names``; a worker that dies or hangs loses one case."""
        left = list(names)
        while left and self.budget.left > 5:
            environments = rank_environments(ranks) if ranks > 1 else [{}]
            command = [sys.executable, "-u", "-m", self.module, "record", "--child"]
            command += ["--device", self.arguments.device, "-o", str(self.arguments.out)]
            command += ["--cases", ",".join(left), *(["--small"] if self.arguments.small else [])]
            with (self.arguments.out / "worker.log").open("a") as log:
                processes = [
                    subprocess.Popen(
                        command, env={**os.environ, **more}, stdout=log, stderr=subprocess.STDOUT
                    )
                    for more in environments
                ]
                done = self._watch(processes, left)
            if not done and not self.results.get(left[0]):
                self._tell(left[0], {"status": "failed", "error": "the worker died: worker.log"})
            left = [name for name in left if name not in self.results]
        for name in left:
            self._tell(name, {"status": "no time left"})

    def _watch(self, processes: list[subprocess.Popen[bytes]], names: list[str]) -> bool:
        """Follow a worker to its end; whether it told of anything."""
        told = self.arguments.out / f"status.{processes[0].pid}.jsonl"
        position, heard, begun, any_told = 0, time.monotonic(), "", False
        while True:
            ended = processes[0].poll() is not None
            lines = told.read_text()[position:] if told.exists() else ""
            for line in lines.splitlines(keepends=True):
                if not line.endswith("\n"):
                    break
                position += len(line)
                heard = time.monotonic()
                facts = json.loads(line)
                self.hardware = facts.get("hardware", self.hardware)
                if facts.get("status") == "begun":
                    begun = facts["case"]
                elif "case" in facts:
                    any_told, begun = True, ""
                    self._tell(facts.pop("case"), facts)
            late = time.monotonic() - heard > _SILENCE or self.budget.left <= 0
            if not ended and not late:
                time.sleep(0.1)
                continue
            for process in processes:
                if process.poll() is None and (late or processes[0].returncode):
                    process.kill()
                process.wait()
            told.unlink(missing_ok=True)
            if begun:
                why = "no time left" if self.budget.left <= 0 else "the worker died or hung"
                self._tell(begun, {"status": "failed", "error": f"{why}: see worker.log"})
            return any_told or bool(begun)

    def _tell(self, name: str, facts: dict[str, Any]) -> None:
        self.results[name] = facts
        seconds = time.monotonic() - self.began
        more = f" {facts['step_ms']:.1f} ms a step" if "step_ms" in facts else ""
        print(f"[{seconds:5.0f} s] {name}: {facts['status']}{more}", flush=True)
        if "error" in facts:
            print(facts["error"], flush=True)
        if facts["status"] == "recorded":
            raw = self.arguments.out / "raw" / f"{name}.rank0.json"
            target = self.arguments.out / f"{name}.trace.json.gz"
            self.waiting[name] = self.pool.submit(_trim_file, raw, target)

    def finish(self) -> None:
        """Wait for the trimming; write what is known of each case; pack."""
        for name, future in self.waiting.items():
            try:
                self.results[name]["events"], self.results[name]["bytes"] = future.result(120)
            except Exception as error:
                self.results[name] |= {"status": "failed", "error": f"trimming: {error!r}"}
                print(f"{name}: trimming failed: {error!r}")
        self.pool.shutdown(cancel_futures=True)
        out = self.arguments.out
        known = out / "recorded.json"
        before = json.loads(known.read_text())["cases"] if known.exists() else {}
        recorded = {"hardware": self.hardware, "cases": {**before, **self.results}}
        write_json(known, recorded)
        for raw in (out / "raw").iterdir():
            raw.unlink()
        size = sum(path.stat().st_size for path in out.glob("*.gz"))
        good = sum(facts["status"] == "recorded" for facts in self.results.values())
        print(
            f"{good} of {len(self.results)} recorded in {time.monotonic() - self.began:.0f} s, "
            f"{size / 1e6:.1f} MB"
        )
        if self.arguments.tar:
            pack(out, self.arguments.tar)


def record(module: str, arguments: argparse.Namespace, groups: dict[int, list[str]]) -> None:
    """Record the cases of ``groups``, named by how many ranks they need."""
    resolve_device(arguments)
    (arguments.out / "raw").mkdir(parents=True, exist_ok=True)
    recorder = Recorder(module, arguments)
    try:
        for ranks, names in groups.items():
            recorder.run(names, ranks)
    finally:
        recorder.finish()


def pack(folder: Path, base: Path) -> None:
    """Put the traces of ``folder`` into ``base``-0.tar, -1.tar … of at most ``_PART_BYTES``."""
    base.parent.mkdir(parents=True, exist_ok=True)
    parts: list[list[Path]] = [[]]
    held = 0
    for path in sorted([*folder.glob("*.trace.json.gz"), folder / "recorded.json"]):
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
