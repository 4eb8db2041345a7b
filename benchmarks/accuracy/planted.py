"""Bottlenecks planted at random: does the ranked list name the module that was made slow?

    python -m benchmarks planted --device cpu --trials 300 --jobs 12
    python -m benchmarks planted --device cuda --trials 120 --jobs 2
    python -m benchmarks planted --device cpu --trials 104 --busy 2 --only backspot

Each trial draws one call of one module, leaf or container, and runs its output through a node whose
backward spins (on the host, or on the GPU), made within the module's forward. As many steps are
profiled as ``backspot.profile`` records; a hit is a first row that names exactly this module. The
node has the name of the node before it, as a slow backward in practice is one of many of its kind.

The spin takes 30% of the plain backward, and at least 1.5 times what the heaviest other row
typically takes without it, so that the module is the slowest in truth; the table says in how many
trials this made it longer. ``--busy`` keeps cores busy with other processes meanwhile.

Two older techniques are compared with Backspot. *Label ranges*: full backward hooks write "before"
and "after"; the module whose ranges hold the most time, less what is nested in them, comes first
(on the GPU: the most kernel time launched within them). *Node names*: ``key_averages()`` ranks the
nodes by name; that names a module only if a single one has nodes of the first name.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Figures, Run, each
from benchmarks.measuring import profile_default, profiling, synchronize
from benchmarks.workers import NO_TIME, Job, Phase, Record, Stage, short

_SHARE = 0.3
_OVER_HEAVIEST = 1.5
_VERDICTS = ("hit", "crash", "wrong", "none")
_TECHNIQUES = {"backspot": "Backspot", "ranges": "label ranges", "names": "node names"}


# One trial ---------------------------------------------------------------------------------------


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
            with profiling(self.device) as profiler:
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
        job: ``architecture``, ``seed``, how many ``steps`` to record, and which technique ``only``
            (``""``: all).
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
        if not job["only"]:
            stage("ranges", record)
            record["ranges"] = _ask_ranges(trial, path)
            stage("names", record)
            record["names"] = _ask_names(trial, path, report)
    record["seconds"] = round(time.monotonic() - began, 2)
    return record


def _verdict(named: list[str], path: str) -> Record:
    """What it means that these modules were named first."""
    if len(named) != 1:
        return {"verdict": "none", "modules": len(named)}
    if named[0] == path:
        return {"verdict": "hit"}
    return {"verdict": "wrong", "named": named[0]}


def _ask_ranges(trial: Trial, path: str) -> Record:
    import backspot

    try:
        with backspot.instrument(trial.model, hooks="module"):
            profiler = trial.profile()
    except RuntimeError as error:
        return {"verdict": "crash", "error": short(error, 120)}
    ranked = rank_ranges(profiler)
    return _verdict(ranked[:1], path) | {"labelled": len(ranked)}


def _ask_names(trial: Trial, path: str, report: Any) -> Record:
    from backspot.trace.names import EVALUATE_FUNCTION

    key = "device_time_total" if trial.device == "cuda" else "cpu_time_total"
    nodes = [e for e in trial.profile().key_averages() if e.key.startswith(EVALUATE_FUNCTION)]
    name = max(nodes, key=lambda event: getattr(event, key)).key.removeprefix(EVALUATE_FUNCTION)
    owners = [
        row.path
        for row in report.modules
        if row.is_module and any(node.name == name for node in row.nodes)
    ]
    return _verdict(owners, path) | {"node": name}


def rank_ranges(profiler: Any) -> list[str]:
    """Module paths by the time between their labels, less what is nested in it, most first."""
    import numpy as np

    from backspot.analysis.attribution.ownership import attribute
    from backspot.trace import Category, read_events
    from backspot.trace.labels import Kind, parse_label

    events = read_events(profiler)
    labels = [parse_label(name) for name in events.names]
    ours = np.array(
        [label is not None and label.kind in (Kind.BACKWARD, Kind.BACKWARD_END) for label in labels]
    )
    index = events.of(Category.OPERATOR, Category.ANNOTATION)
    index = index[ours[events.name[index]]]
    index = index[np.argsort(events.start[index], kind="stable")]
    # Pairs first: a range that never ends is none.
    begun: dict[tuple[int, str], list[int]] = {}
    ends: dict[int, int] = {}
    for event in index.tolist():
        label = labels[events.name[event]]
        key = (int(events.thread[event]), label.path)
        if label.kind is Kind.BACKWARD:
            begun.setdefault(key, []).append(event)
        elif begun.get(key):
            ends[event] = begun[key].pop()
    begins = set(ends.values())
    # Then every moment to the range that began last.
    costs: Counter[str] = Counter()
    running: list[int] = []
    borders: list[int] = []
    owners: list[str | None] = []
    for event in index.tolist():
        if event in begins:
            running.append(event)
        elif event in ends:
            running.remove(ends[event])
            costs[labels[events.name[event]].path] += 0
        else:
            continue
        borders.append(int(events.start[event]))
        owners.append(labels[events.name[running[-1]]].path if running else None)
    work = attribute(events).work
    if len(work.start):
        at = np.searchsorted(borders, work.launch, side="right") - 1
        for place, run_of, length in zip(at, work.run, work.end - work.start, strict=True):
            if place >= 0 and run_of >= 0 and owners[place] is not None:
                costs[owners[place]] += int(length)
    else:
        for place, (begin, end) in enumerate(itertools.pairwise(borders)):
            if owners[place] is not None:
                costs[owners[place]] += end - begin
    return [path for path, _ in costs.most_common()]


# Summary -----------------------------------------------------------------------------------------


def _summary(records: Sequence[Record]) -> Record:
    trials = [r for r in records if "planted_ms" in r or r.get("stage") not in ("start", "plain")]
    summary: Record = {
        "trials": len(trials),
        "architectures": len({r["architecture"] for r in trials}),
        "kinds": dict(Counter(r["kind"] for r in trials)),
        "enlarged": sum(r.get("enlarged", False) for r in trials),
        "left_out": {r["name"]: r["error"] for r in records if r not in trials},
    }
    for key, title in _TECHNIQUES.items():
        # A worker that died within a technique crashed by it.
        verdicts = Counter(
            r[key]["verdict"] if key in r else "crash"
            for r in trials
            if key in r or r.get("stage") == key
        )
        asked = verdicts.total()
        summary[title] = {
            "trials": asked,
            **{v: verdicts[v] for v in _VERDICTS},
            "hit_rate": round(verdicts["hit"] / asked, 4) if asked else None,
        }
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
    add("--only", choices=("backspot",), default="", help="no other technique")
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
            jobs[f"{number:04}-{architecture}"] = {**job, "only": run.only}
        return jobs

    @functools.cache
    def cycles() -> float:
        from benchmarks.accuracy.plants import cycles_per_millisecond

        return cycles_per_millisecond() if run.device == "cuda" else 0.0

    def set_up(workers: int) -> None:
        from benchmarks.accuracy.steps import set_up as prepare

        prepare(run.device, 0.9 / max(1, workers))
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
    return {"busy": run.busy or 0, "cases": cases, "summary": _summary(ended)}
