"""What do stacks cost: the further steps, memory, and the size of the trace; and what ``run`` adds.

    python -m benchmarks stacks [--device cuda] [--cases tiny-vit,convnet]

Each model (``variants.py``) is profiled with and without stacks, in turn, in a process of its own.
A step is recorded by PyTorch's profiler as Backspot records it, plain and with stacks. Then a
script trains it for some steps: plain, under ``backspot run``, and with ``--stacks``, in turn; what
these add is the difference of the shortest times of whole processes.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Figures, Run, each
from benchmarks.measuring import milliseconds, profiling, record_trace
from benchmarks.workers import Job, Record, Stage

_SCRIPT = """
from benchmarks.cost.variants import CASES
from benchmarks.models import Context
import torch

torch.set_num_threads(1)
training = CASES[{name!r}].build(Context({device!r}, {small!r}))
for _ in range({steps}):
    training.step()
"""
_ROOT = Path(__file__).parents[2]
_WAYS = {
    "plain": (),
    "run": ("-m", "backspot", "run", "--force"),
    "run --stacks": ("-m", "backspot", "run", "--force", "--stacks"),
}


def _seconds(do: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


def _most_memory_mb() -> float:
    """Return the most memory that this process had so far."""
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _examine(job: Job, stage: Stage, run: Any) -> Record:
    import torch

    import backspot
    from benchmarks.cost.variants import CASES

    torch.set_num_threads(1)
    stage("build", {})
    training = CASES[job["name"]].build(run.context)
    record: Record = {"step_ms": round(milliseconds(training.step, run.device, 5), 2)}

    def profiled(stacks: bool) -> float:
        return _seconds(lambda: backspot.profile(training.step, training.model, stacks=stacks))

    stage("profile", record)
    profiled(stacks=False)
    before = _most_memory_mb()
    times = {stacks: [profiled(stacks)] for stacks in (False, True)}
    record["memory_mb"] = round(_most_memory_mb() - before)
    for _ in range(1 if run.small else 2):
        for stacks, found in times.items():
            found.append(profiled(stacks))
    record["profile_s"] = [round(min(found), 2) for found in times.values()]
    stage("trace", record)
    with tempfile.TemporaryDirectory() as folder, backspot.instrument(training.model):
        sizes, recorded = [], []
        for stacks in (False, True):
            path = Path(folder) / "trace.json"
            with_stack = {"with_stack": stacks}
            record_trace(training.step, run.device, path, steps=3, warmup=1, **with_stack)
            sizes.append(round(path.stat().st_size / 3e6, 2))
            recorded.append(round(_recorded_ms(training.step, run.device, **with_stack), 2))
    record |= {"recorded_ms": recorded, "trace_mb_a_step": sizes}
    stage("run", record)
    return record | _whole_runs(job["name"], run)


def _recorded_ms(step: Callable[[], object], device: str, **options: Any) -> float:
    with profiling(device, **options):
        step()
        return milliseconds(step, device, 3)


def _whole_runs(name: str, run: Any) -> Record:
    """Return what ``run`` adds to a training in all, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        known = {"name": name, "device": run.device, "small": run.small}
        script.write_text(_SCRIPT.format(**known, steps=run.steps), encoding="utf-8")
        times: dict[str, list[float]] = {way: [] for way in _WAYS}
        for _ in range(run.rounds):
            for way, options in _WAYS.items():
                out = ("-o", str(Path(folder) / "out")) if options else ()
                command = [sys.executable, *options, *out, str(script)]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}
                begin = time.perf_counter()
                subprocess.run(command, env=environment, check=True, capture_output=True)
                times[way].append(time.perf_counter() - begin)
    plain, *others = (min(found) for found in times.values())
    return {"training_s": round(plain, 2), "run_adds_s": [round(one - plain, 2) for one in others]}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="steps of the script (default: 60)")
    parser.add_argument("--rounds", type=int, help="runs of the script each way (default: 3)")


def answer(run: Run) -> Figures:
    """Measure each model; two numbers are without and with stacks."""
    run.steps = run.steps or 60
    run.rounds = run.rounds or (1 if run.small else 3)

    def known() -> dict[str, Any]:
        from benchmarks.cost.variants import CASES

        return {name: case.what for name, case in CASES.items() if case.device == run.device}

    small = ("tiny-vit",) if run.device == "cpu" else ("vit-launch",)
    return {"cases": each(run, known, lambda job, stage: _examine(job, stage, run), small=small)}
