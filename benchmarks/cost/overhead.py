"""What Backspot costs on a training step, with the profiler off and on.

    python -m benchmarks.cost.overhead [--device cuda] [--seconds 240] [--cases vit,gpt2]
    python -m benchmarks.cost.overhead --variants "call, no markers" call "with_stack=True"
    python -m benchmarks.cost.overhead --pool overhead_node.json overhead_node_2.json

Every variant runs in every round, in a new random order, so that other work on the machine meets
all variants. In a round a variant is put on the model, takes one step to warm up, and then a few
steps in a row between two synchronisations, as in training: the host may run ahead of the GPU. With
the profiler on, these steps have a session of their own that starts and stops outside the timed
steps. Whether the host or the GPU decides a step's time is measured with and without profiler, as
the profiler slows the host. A round's number is the time divided by the number of steps. Numbers of
one round are compared: the result is the median ratio to the plain step of the same round, with a
95% interval from resampling the rounds. All rounds without profiler run before the first session.
Several runs can be pooled: their rounds are then judged as those of one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import (
    Budget,
    choose,
    command_line,
    parse,
    print_table,
    profiling,
    script,
    spread,
    synchronize,
    write_results,
)
from benchmarks.cost.overhead_models import (
    CASES,
    LABELS,
    PLAIN,
    VARIANTS,
    Case,
    Training,
    Variant,
)
from benchmarks.models import Context

_RESAMPLES = 4000
_FEWEST_ROUNDS = 3
_GPU_BOUND = 0.9  # the host has launched a step well before the GPU is through with it
_SHARE_OFF = 0.2  # of a case's time: rounds without profiler are the shorter ones
# A percentage of the plain step that a variant may add, by what decides the step's time.
_OFF = {"gpu": 1.0, "host": 1.0}
_TARGETS = {
    "off": dict.fromkeys(LABELS, _OFF),
    "on": {
        "call, no markers": {"gpu": 2.0, "host": 6.0},
        "call": {"gpu": 4.0, "host": 12.0},
    },
}
# Pairs of variants: with the profiler on, the first should cost no more than the second.
_ORDER = (
    ("call, no markers", "Lightning's labels"),
    ("call, no markers", "with_stack=True"),
    ("call, no markers", "node, no markers"),
    ("call", "node"),
)


def ratio_interval(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The median of paired ratios, in percent beyond 1, with its 95% interval by bootstrap."""
    ratios = (np.asarray(one) / np.asarray(other) - 1.0) * 100.0
    draw = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draw], axis=1), [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def session(variant: Variant, device: str, recorded: bool) -> AbstractContextManager[Any]:
    return profiling(device, **variant.profiler) if recorded and variant.profiled else nullcontext()


def timed_steps(
    training: Training, variant: Variant, device: str, *, recorded: bool, steps: int
) -> list[float]:
    """Milliseconds of a step of a variant, from several in a row."""
    with variant.around(training.model), session(variant, device, recorded):
        training.step()
        synchronize(device)
        gc.disable()  # a collection hits one step in many, and whichever it likes
        try:
            begin = time.perf_counter()
            for _ in range(steps):
                training.step()
            synchronize(device)
            return [(time.perf_counter() - begin) * 1e3 / steps]
        finally:
            gc.enable()


def measure(
    training: Training,
    device: str,
    *,
    recorded: bool,
    variants: Sequence[str],
    seconds: float,
    rounds: int,
    steps: int,
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """For each variant the steps of every round, and why those that failed did."""
    rotation = [name for name in variants if recorded or VARIANTS[name].without_profiler]
    times: dict[str, list[list[float]]] = {name: [] for name in rotation}
    failed: dict[str, str] = {}
    for name in list(rotation):  # a first round that does not count: caches fill, failures show
        try:
            timed_steps(training, VARIANTS[name], device, recorded=recorded, steps=1)
        except Exception as error:
            if name == PLAIN:
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            rotation.remove(name)
            del times[name]
    gc.collect()
    gc.freeze()
    budget = Budget(seconds)
    order = random.Random(0)
    try:
        for done in range(rounds):
            if budget.left <= 0 and done >= _FEWEST_ROUNDS:
                break
            order.shuffle(rotation)
            for name in rotation:
                times[name].append(
                    timed_steps(training, VARIANTS[name], device, recorded=recorded, steps=steps)
                )
            gc.collect()
    finally:
        gc.unfreeze()
    return times, failed


def judge(bound: str, mode: str, times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Each variant's times, and what it adds to the plain step of the same round."""
    rounds = {name: [statistics.median(each) for each in of] for name, of in times.items()}
    variants: dict[str, Any] = {}
    for name, numbers in rounds.items():
        added = ratio_interval(numbers, rounds[PLAIN]) if name != PLAIN else None
        variants[name] = {
            "step_ms": spread([step for each in times[name] for step in each]),
            "round_ms": [round(number, 4) for number in numbers],
            "added_percent": added,
        }
        if name in _TARGETS[mode] and added is not None:
            target = _TARGETS[mode][name][bound]
            variants[name]["target_percent"] = target
            variants[name]["met"] = added["median"] <= target
    compared = {}
    if mode == "on":
        for one, other in _ORDER:
            if one in rounds and other in rounds:
                compared[f"{one} against {other}"] = ratio_interval(rounds[one], rounds[other])
    return {"variants": variants, "compared": compared}


def pooled(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cases of several runs, judged as if all rounds were of one."""
    cases: dict[str, Any] = {}
    for name in documents[0]["cases"]:
        runs = [document["cases"][name] for document in documents]
        cases[name] = {"what": runs[0]["what"], "modules": runs[0]["modules"]}
        for mode in ("off", "on"):
            found = [run[mode] for run in runs]
            times = {
                variant: [[ms] for each in found for ms in each["variants"][variant]["round_ms"]]
                for variant in found[0]["variants"]
                if all(variant in each["variants"] for each in found)
            }
            launching = statistics.mean(each["launching"] for each in found)
            bound = _bound(launching)
            cases[name][mode] = {
                "bound": bound,
                "launching": launching,
                **judge(bound, mode, times),
                "failed": {name: why for each in found for name, why in each["failed"].items()},
                "rounds": sum(each["rounds"] for each in found),
            }
    return cases


def bound_by(training: Training, device: str, *, recorded: bool) -> tuple[str, float]:
    """Return what decides a plain step's time, and the share of it that launching takes."""
    shares = []
    with session(VARIANTS[PLAIN], device, recorded):
        training.step()
        synchronize(device)
        for _ in range(9):
            begin = time.perf_counter()
            training.step()
            launched = time.perf_counter() - begin
            synchronize(device)
            shares.append(launched / (time.perf_counter() - begin))
    share = statistics.median(shares)
    return _bound(share), share


def _bound(launching: float) -> str:
    return "gpu" if launching < _GPU_BOUND else "host"


def run_case(case: Case, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    budget = Budget(seconds)
    training = case.build(Context(case.device, options.small))
    for _ in range(5):
        training.step()
    synchronize(case.device)
    result: dict[str, Any] = {
        "what": case.what,
        "modules": len(list(training.model.modules())),
    }
    share = {"off": _SHARE_OFF, "on": 1.0}
    for mode in ("off", "on"):
        bound, launching = bound_by(training, case.device, recorded=mode == "on")
        times, failed = measure(
            training,
            case.device,
            recorded=mode == "on",
            variants=options.variants,
            seconds=budget.left * share[mode],
            rounds=options.rounds,
            steps=options.steps,
        )
        result[mode] = {
            "bound": bound,
            "launching": launching,
            **judge(bound, mode, times),
            "failed": failed,
        }
        result[mode]["rounds"] = len(times[PLAIN])
    return result


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name}: {result.get('what', '')}, {result.get('modules', 0)} modules")
    if "error" in result:
        print(f"failed: {result['error']}")
        return
    for mode in ("off", "on"):
        found = result[mode]
        print(
            f"{mode}: bound by the {found['bound']}; the host is through with launching "
            f"after {found['launching']:.0%} of a plain step"
        )
    rows = []
    measured = {name for mode in ("off", "on") for name in _measured(result[mode])}
    for variant in [name for name in VARIANTS if name in measured]:
        row: list[Any] = [variant]
        for mode in ("off", "on"):
            row += _cells(variant, result[mode])
        rows.append(row)
    head = []
    for mode in ("off", "on"):
        head += [f"{mode}: ms", "quartiles", "added % (95%)", "target"]
    print_table(["variant", *head], rows)
    print(f"rounds: {result['off']['rounds']} off, {result['on']['rounds']} on")
    for pair, ratio in result["on"]["compared"].items():
        print(f"{pair}, on: {percent(ratio)}")


def _measured(mode: dict[str, Any]) -> set[str]:
    return {*mode["variants"], *mode["failed"]}


def _cells(variant: str, mode: dict[str, Any]) -> list[str]:
    if variant in mode["failed"]:
        return ["failed", "", "", ""]
    found = mode["variants"].get(variant)
    if found is None:
        return ["—", "", "", ""]
    step, target = found["step_ms"], ""
    if "met" in found:
        verdict = "met" if found["met"] else "missed"
        target = f"≤ {found['target_percent']:g}: {verdict}"
    return [
        f"{step['median']:.2f}",
        f"{step['low']:.2f}–{step['high']:.2f}",
        percent(found["added_percent"]) if found["added_percent"] else "",
        target,
    ]


def percent(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:+.1f} ({ratio['low']:+.1f} to {ratio['high']:+.1f})"


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, out="overhead_{device}.json", seconds=240)
    parser.add_argument("--rounds", type=int, default=400, help="at most so many rounds a case")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a variant and round")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        default=list(VARIANTS),
        metavar="NAME",
        help=f"what to compare with {PLAIN!r} (default: {'; '.join(VARIANTS)})",
    )
    parser.add_argument("--pool", type=Path, nargs="+", help="show these runs as one; run nothing")
    options = parse(parser, argv)
    options.variants = list(dict.fromkeys([PLAIN, *options.variants]))
    if options.small:
        options.rounds, options.steps = 1, 1
    if options.pool:
        documents = [json.loads(path.read_text()) for path in options.pool]
        for name, result in pooled(documents).items():
            show(name, result)
        return 0
    known = {name: case.what for name, case in CASES.items() if case.device == options.device}
    names = choose(options, known, list(known)[:1])
    everything = Budget(options.seconds)
    warnings.filterwarnings("ignore")
    if options.device == "cpu":
        torch.set_num_threads(1)
    cases: dict[str, Any] = {}
    for number, name in enumerate(names):
        seconds = everything.left / (len(names) - number)
        try:
            cases[name] = run_case(CASES[name], options, seconds)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            traceback.print_exc()
            cases[name] = {"what": CASES[name].what, "error": f"{type(error).__name__}: {error}"}
        document = {"steps": options.steps, "cases": cases}
        write_results(options, document, last=number == len(names) - 1)
        show(name, cases[name])
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return 1 if any("error" in case for case in cases.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
