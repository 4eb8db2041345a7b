"""Bottlenecks planted at random: does the ranked list name the module that was made slow?

    python -m benchmarks planted --device cpu --trials 300 --jobs 12
    python -m benchmarks planted --device cuda --trials 104 --jobs 8
    python -m benchmarks planted --device cpu --trials 104 --busy 2

Each trial draws one call of one module, leaf or container, and runs its output through a node whose
backward spins (on the host, or on the GPU), made within the module's forward. As many steps are
profiled as ``backspot.profile`` records; a hit is a first row that names exactly this module. The
node has the name of the node before it, as a slow backward in practice is one of many of its kind.

The spin takes 30% of the plain backward, and at least 1.5 times what the heaviest other row
typically takes without it, so that the module is the slowest in truth; the table says in how many
trials this made it longer. ``--busy`` keeps cores busy with other processes meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.harness import Figures, Run, each, turn
from benchmarks.measuring import profile_default, profiling, synchronize
from benchmarks.workers import NO_TIME, Job, Phase, Record, Stage

_SHARE = 0.3
_OVER_HEAVIEST = 1.5
_VERDICTS = ("hit", "crash", "wrong", "none")


# One trial ---------------------------------------------------------------------------------------


def _turn(device: str) -> AbstractContextManager[None]:
    """Have a GPU alone; on a CPU, workers record side by side."""
    return turn() if device == "cuda" else nullcontext()


class Trial:
    """A model with its steps; what is planted comes and goes."""

    def __init__(self, job: Job, device: str, cycles_per_ms: float) -> None:
        from benchmarks.accuracy import architectures, steps

        self.device = device
        self.cycles_per_ms = cycles_per_ms
        self.seed = steps.seed
        self.number = job["seed"]
        self.steps = job["steps"]
        self.model, self.forward = architectures.build(job["architecture"], device)
        self.modules = dict(self.model.named_modules())
        self.plant: Any = None

    def forward_and_time_backward(self) -> float:
        """One step; seconds that its backward took."""
        self.seed(self.number)
        if self.plant is not None:
            self.plant.begin_step()
        self.model.zero_grad(set_to_none=True)
        loss = self.forward()
        synchronize(self.device)
        begin = time.perf_counter()
        loss.backward()
        synchronize(self.device)
        return time.perf_counter() - begin

    def step(self) -> None:
        """One step as users take it, with no wait in between."""
        self.seed(self.number)
        if self.plant is not None:
            self.plant.begin_step()
        self.model.zero_grad(set_to_none=True)
        self.forward().backward()

    def profile(self) -> Any:
        """A warm-up step, then the recorded ones, with no collection of garbage between."""
        self.step()
        gc.collect()
        gc.disable()
        try:
            with _turn(self.device), profiling(self.device) as profiler:
                for _ in range(self.steps):
                    self.step()
        finally:
            gc.enable()
        return profiler

    def choose(self) -> tuple[str, int, str]:
        """Draw a call whose output the backward goes through: path, number, kind."""
        from benchmarks.accuracy.plants import find_calls, planted

        calls = find_calls(self.model, self.step)
        random.Random(self.number).shuffle(calls)
        for path, call in calls:
            module = self.modules[path]
            with planted(module, call, lambda: None) as self.plant:
                self.step()
                ran = self.plant.ran
            self.plant = None
            if ran:
                return path, call, "container" if any(module.children()) else "leaf"
        raise RuntimeError("the backward goes through no module's output")

    def spin(self, milliseconds: float) -> Callable[[], None]:
        """What takes that long, on the device."""
        from benchmarks.accuracy.plants import spin_for

        return spin_for(milliseconds, self.device, self.cycles_per_ms)


def examine(job: Job, stage: Stage, device: str, cycles_per_ms: float) -> Record:
    """Plant one bottleneck and rank the modules by each technique.

    Args:
        job: ``architecture``, ``seed``, and how many ``steps`` to record.
        stage: takes what begins and what is known so far.
        device: ``cpu`` or ``cuda``.
        cycles_per_ms: of ``torch.cuda._sleep``.
    """
    import backspot
    from benchmarks.accuracy.plants import planted

    record: Record = {"architecture": job["architecture"]}
    stage("plain", record)
    began = time.monotonic()
    trial = Trial(job, device, cycles_per_ms)
    trial.step()
    trial.step()
    with _turn(device):
        backward_ms = statistics.median(trial.forward_and_time_backward() for _ in range(5)) * 1e3
    path, call, kind = trial.choose()
    record |= {"path": path, "call": call, "kind": kind, "backward_ms": round(backward_ms, 3)}
    stage("backspot", record)
    with backspot.instrument(trial.model):
        natural = backspot.locate(trial.profile())
    others = [row.wall_ms for row in natural.top() if row.path != path]
    milliseconds = max(_SHARE * backward_ms, _OVER_HEAVIEST * max(others, default=0.0))
    own = [row for row in natural.modules if row.path == path]
    record |= {
        "planted_ms": round(milliseconds, 3),
        "enlarged": milliseconds > 1.001 * _SHARE * backward_ms,
        "natural_share": round(natural.share(own[0]), 4) if own else 0.0,
    }
    with planted(trial.modules[path], call, trial.spin(milliseconds)) as trial.plant:
        with backspot.instrument(trial.model):
            report = backspot.locate(trial.profile())
        record |= {"node": trial.plant.node_name, "coverage_wall": report.coverage.wall}
        # As the list shows them: rows that are no module are below the modules.
        ranked = [row for row in report.top() if row.is_module]
        record["backspot"] = _verdict([row.path for row in ranked[:1]], path)
        record["rows"] = [[r.label, round(r.wall_ms, 3)] for r in ranked[:3]]
    record["seconds"] = round(time.monotonic() - began, 2)
    return record


def _verdict(named: list[str], path: str) -> Record:
    """What it means that these modules were named first."""
    if len(named) != 1:
        return {"verdict": "none", "modules": len(named)}
    if named[0] == path:
        return {"verdict": "hit"}
    return {"verdict": "wrong", "named": named[0]}


# Summary -----------------------------------------------------------------------------------------


def _summary(records: Sequence[Record]) -> Record:
    # What took too long says something of the machine; it is left out, and the run has failed.
    trials = [r for r in records if "planted_ms" in r or r.get("stage") not in ("start", "plain")]
    trials = [r for r in trials if r["end"] != "timeout"]
    summary: Record = {
        "trials": len(trials),
        "architectures": len({r["architecture"] for r in trials}),
        "kinds": dict(Counter(r["kind"] for r in trials)),
        "enlarged": sum(r.get("enlarged", False) for r in trials),
        "left_out": {r["name"]: r["error"] for r in records if r not in trials},
    }
    # A worker that died while Backspot looked crashed by it.
    verdicts = Counter(r.get("backspot", {"verdict": "crash"})["verdict"] for r in trials)
    summary |= {verdict: verdicts[verdict] for verdict in _VERDICTS}
    summary["misses"] = [
        {k: r.get(k) for k in ("name", "path", "call", "planted_ms", "rows", "stage", "error")}
        for r in trials
        if r.get("backspot", {}).get("verdict") != "hit"
    ]
    return summary


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trials", type=int, help="how many (default: 300; with --small 1)")
    add("--first", type=int, default=0, help="number of the first trial")
    add("--steps", type=int, help="steps to record (default: that of profile)")
    add("--timeout", type=float, default=90, help="seconds for one trial")
    add("--host-gib", type=float, default=8, help="memory of a worker at most")


def answer(run: Run) -> Figures:
    def known() -> dict[str, Job]:
        import timm  # noqa: F401 - every trial needs it

        from benchmarks.accuracy.architectures import NAMES, SMALL

        names, jobs = SMALL if run.small else NAMES, {}
        count = run.trials or (1 if run.small else 300)
        steps = run.steps or profile_default("steps")
        for number in range(run.first, run.first + count):
            architecture = names[number % len(names)]
            job = {"architecture": architecture, "seed": number, "steps": steps}
            jobs[f"{number:04}-{architecture}"] = job
        return jobs

    @functools.cache
    def cycles() -> float:
        from benchmarks.accuracy.plants import cycles_per_millisecond

        return cycles_per_millisecond() if run.device == "cuda" else 0.0

    def set_up(workers: int) -> None:
        from benchmarks.accuracy.steps import set_up as prepare

        prepare(run.device, 0.9 / max(1, workers))
        with _turn(run.device):
            cycles()

    crowds = [run.jobs] + ([1] if run.jobs > 1 else [])
    cases = each(
        run,
        known,
        lambda job, stage: examine(job, stage, run.device, cycles()),
        phases=[Phase(workers, run.timeout, run.host_gib) for workers in crowds],
        set_up=set_up,
        fresh=False,
    )
    ended = [{"name": name, **case} for name, case in cases.items() if case["end"] != NO_TIME]
    lines = [_line(case) for case in ended]
    return {"busy": run.busy or 0, "cases": cases, "lines": lines, "summary": _summary(ended)}


def _line(case: Record) -> Record:
    """What is kept of a trial."""
    known = {key: case.get(key) for key in ("path", "kind", "backward_ms", "planted_ms")}
    verdict = case.get("backspot", {}).get("verdict", case["end"])
    first = next(iter(case.get("rows", ())), [None])[0]
    return {"case": case["name"], "verdict": verdict, "first": first, **known}
