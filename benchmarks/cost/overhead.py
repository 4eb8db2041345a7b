"""What Backspot costs on a training step, with the profiler off and on.

    python -m benchmarks overhead [--device cuda] [--seconds 240] [--cases vit,gpt2]
    python -m benchmarks overhead --variants default call "with_stack=True"
    python -m benchmarks overhead_ranks

Every variant runs in every round, in a new random order, so that other work on the machine meets
all variants. In a round a variant is put on the model, takes one step to warm up, and then a few
steps in a row between two synchronisations, as in training: the host may run ahead of the GPU. With
the profiler on, these steps have a session of their own that starts and stops outside the timed
steps. Whether the host or the GPU decides a step's time is measured with and without profiler, as
the profiler slows the host. Numbers of one round are compared: the result is the median ratio to
the plain step of the same round, with a 95% interval from resampling the rounds. All rounds without
profiler run before the first session. On two ranks, the order is the same on both, both record, and
a round's number is that of the slower rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cost.variants import (
    CASES,
    LABELS,
    PLAIN,
    UNPROFILED,
    VARIANTS,
    Case,
    Training,
    Variant,
)
from benchmarks.harness import Figures, Run, write_results
from benchmarks.measuring import Budget, milliseconds, profiling, spread, synchronize
from benchmarks.models import Context

_RESAMPLES = 4000
_FEWEST_ROUNDS = 3
_GPU_BOUND = 0.9  # the host has launched a step well before the GPU is through with it
_SHARES = {"off": 0.2, "on": 1.0}  # of a case's time: rounds without profiler are the shorter ones
# A percentage of the plain step that a variant may add, by what decides the step's time.
_TARGETS = {
    "off": {name: {"gpu": 1.0, "host": 1.0} for name in LABELS},
    "on": {
        "call, no markers": {"gpu": 2.0, "host": 6.0},
        "call": {"gpu": 4.0, "host": 12.0},
        "default": {"gpu": 6.0, "host": 6.0},
        "default, depth=2": {"gpu": 2.0, "host": 2.0},
    },
}
_ON_RANKS = (
    PLAIN, UNPROFILED, "call, no markers", "call", "default", "node, no markers",
    "Lightning's labels", "with_stack=True",
)  # fmt: skip


def _ratio(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The median of paired ratios, in percent beyond 1, with its 95% interval by bootstrap."""
    ratios = (np.asarray(one) / np.asarray(other) - 1.0) * 100.0
    draw = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draw], axis=1), [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def _session(variant: Variant, device: str, recorded: bool) -> AbstractContextManager[Any]:
    return profiling(device, **variant.profiler) if recorded and variant.profiled else nullcontext()


def _timed(
    training: Training, variant: Variant, device: str, *, recorded: bool, steps: int
) -> float:
    """Milliseconds of a step of a variant, from several in a row."""
    with variant.around(training.model), _session(variant, device, recorded):
        training.step()
        synchronize(device)
        gc.disable()  # a collection hits one step in many, and whichever it likes
        try:
            return milliseconds(training.step, device, steps)
        finally:
            gc.enable()


def _measure(
    training: Training, device: str, options: argparse.Namespace, *, recorded: bool, seconds: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """For each variant the step of every round, and why those that failed did."""
    rotation = [name for name in options.variants if recorded or VARIANTS[name].without_profiler]
    failed: dict[str, str] = {}
    for name in list(rotation):  # a first round that does not count: caches fill, failures show
        try:
            _timed(training, VARIANTS[name], device, recorded=recorded, steps=1)
        except Exception as error:
            if name == PLAIN:
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            rotation.remove(name)
    times: dict[str, list[float]] = {name: [] for name in rotation}
    gc.collect()
    gc.freeze()
    budget, order = Budget(seconds), random.Random(0)
    try:
        for done in range(options.rounds):
            if budget.left <= 0 and done >= _FEWEST_ROUNDS:
                break
            order.shuffle(rotation)
            for name in rotation:
                steps, variant = options.steps, VARIANTS[name]
                times[name].append(
                    _timed(training, variant, device, recorded=recorded, steps=steps)
                )
            gc.collect()
    finally:
        gc.unfreeze()
    return times, failed


def _variants(times: dict[str, list[float]]) -> dict[str, Any]:
    """Each variant's times, and what it adds to the plain step of the same round."""
    return {
        name: {
            "step_ms": spread(rounds),
            "round_ms": [round(number, 4) for number in rounds],
            "added_percent": _ratio(rounds, times[PLAIN]) if name != PLAIN else None,
        }
        for name, rounds in times.items()
    }


def _judge(
    mode: str, launching: float, times: dict[str, list[float]], failed: dict[str, str]
) -> dict[str, Any]:
    bound = "gpu" if launching < _GPU_BOUND else "host"
    variants = _variants(times)
    for name, found in variants.items():
        if name in _TARGETS[mode] and found["added_percent"]:
            target = _TARGETS[mode][name][bound]
            found |= {"target_percent": target, "met": found["added_percent"]["median"] <= target}
    found = {"bound": bound, "launching": launching, "variants": variants, "failed": failed}
    return {**found, "rounds": len(times[PLAIN])}


def _launching(training: Training, device: str, *, recorded: bool, steps: int) -> float:
    """Return the share of a plain step's time after which the host has launched it."""
    shares = []
    with _session(VARIANTS[PLAIN], device, recorded):
        training.step()
        synchronize(device)
        for _ in range(steps):
            begin = time.perf_counter()
            training.step()
            launched = time.perf_counter() - begin
            synchronize(device)
            shares.append(launched / (time.perf_counter() - begin))
    return statistics.median(shares)


def _run_case(case: Case, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    budget = Budget(seconds)
    training = case.build(Context(case.device, options.small))
    for _ in range(1 if options.small else 5):
        training.step()
    synchronize(case.device)
    result: dict[str, Any] = {"what": case.what, "modules": len(list(training.model.modules()))}
    for mode, share in _SHARES.items():
        recorded = mode == "on"
        steps = 1 if options.small else 9
        launching = _launching(training, case.device, recorded=recorded, steps=steps)
        left = budget.left * share
        found = _measure(training, case.device, options, recorded=recorded, seconds=left)
        result[mode] = _judge(mode, launching, *found)
    return result


def _row(variant: str, mode: dict[str, Any]) -> dict[str, Any]:
    """A variant's cells of the table: the step, and what it adds."""
    found = mode["variants"].get(variant)
    if found is None:
        return {"ms": "failed" if variant in mode["failed"] else None}
    added = found["added_percent"] or {}
    interval = [added.get(key) for key in ("median", "low", "high")] if added else None
    step = [found["step_ms"][key] for key in ("median", "low", "high")]
    return {"ms": step, "added %": interval, "met": found.get("met")}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="rounds a case (default: 400 at most; ranks 20)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a variant and round")
    told = f"what to compare with {PLAIN!r} (default: {'; '.join(VARIANTS)})"
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME",
        help=told.replace("%", "%%"),
    )  # fmt: skip


def answer(run: Run) -> Figures:
    run.variants = list(dict.fromkeys([PLAIN, *run.variants]))
    run.rounds = run.rounds or 400
    if run.small:
        run.rounds, run.steps = 1, 1
    known = {name: case.what for name, case in CASES.items() if case.device == run.device}
    names = run.choose(known, list(known)[:1])
    everything = Budget(run.seconds)
    warnings.filterwarnings("ignore")
    if run.device == "cpu":
        torch.set_num_threads(1)
    cases: dict[str, Any] = {}
    for number, name in enumerate(names):
        try:
            cases[name] = _run_case(CASES[name], run, everything.left / (len(names) - number))
        except ModuleNotFoundError:
            raise
        except Exception as error:
            traceback.print_exc()
            cases[name] = {"what": CASES[name].what, "error": f"{type(error).__name__}: {error}"}
        write_results(run, {"steps": run.steps, "cases": cases})
        gc.collect()
        if run.device == "cuda":
            torch.cuda.empty_cache()
    rows = [
        {"case": name, "variant": variant, **{f"{mode}: {k}": v for mode in _SHARES
         for k, v in _row(variant, case[mode]).items()}}
        for name, case in cases.items() if "error" not in case
        for variant in run.variants
    ]  # fmt: skip
    wrong = any("error" in case for case in cases.values())
    summary = summary_of_lines(rows)
    return {"steps": run.steps, "cases": cases, "rows": rows, "summary": summary, "wrong": wrong}


MERGED_BY = ("case", "variant")
"""``--variants`` chooses some of the lines of a case."""


def summary_of_lines(lines: Sequence[Mapping[str, Any]], _: str = "") -> dict[str, Any]:
    """What each variant adds, in percent, over the models, with the profiler off and on."""
    added: dict[str, dict[str, list[float]]] = {mode: {} for mode in _SHARES}
    for line in lines:
        for mode, by_variant in added.items():
            if interval := line.get(f"{mode}: added %"):
                by_variant.setdefault(line["variant"], []).append(interval[0])
    return {
        mode: {
            name: {"least": min(some), "most": max(some), "models": len(some)}
            for name, some in by_variant.items()
        }
        for mode, by_variant in added.items()
    }


# Ranks -------------------------------------------------------------------------------------------


def _train(
    rank: int, kind: str, folder: str, names: Sequence[str], rounds: int, small: bool
) -> None:
    """What each of the two processes does; rank 0 writes the times of the slower one."""
    import torch.distributed as dist

    from benchmarks.ranks import RANKS, member, training

    found: dict[str, dict[str, list[float]]] = {}
    with member(rank, kind, folder) as device:
        for name in names:
            trained = Training(*training(name, device, small))
            order, random_order, steps = list(_ON_RANKS), random.Random(0), 1 if small else 4
            times: dict[str, list[float]] = {variant: [] for variant in order}
            for done in range(rounds + 1):  # in the first round caches fill
                for variant in order:
                    dist.barrier()
                    mine = _timed(trained, VARIANTS[variant], kind, recorded=True, steps=steps)
                    every = [0.0] * RANKS
                    dist.all_gather_object(every, mine)
                    if done:
                        times[variant].append(max(every))
                random_order.shuffle(order)
            found[name] = times
            del trained
        if rank == 0:
            (Path(folder) / "records.json").write_text(json.dumps(found))


def of_ranks(run: Run) -> Figures:
    """Compare the variants on two ranks."""
    from benchmarks.ranks import CASES, run_ranks

    names = run.choose(CASES, ("ddp",))
    rounds = 1 if run.small else run.rounds or 20
    records = json.loads(run_ranks(_train, run.device, names, rounds, run.small))
    cases = {name: _variants(times) for name, times in records.items()}
    rows = [
        {"case": name, "variant": variant, **_row(variant, {"variants": variants, "failed": {}})}
        for name, variants in cases.items()
        for variant in variants
    ]
    summary = {
        name: {variant: (found["added_percent"] or {}).get("median")
               for variant, found in variants.items()}
        for name, variants in cases.items()
    }  # fmt: skip
    return {"cases": cases, "rows": rows, "summary": summary, "rounds": rounds}
