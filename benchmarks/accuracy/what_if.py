"""Does a step save what ``what_if`` says? Predicts real changes by replay, then makes them.

    python -m benchmarks what_if                        # records, times, predicts
    python -m benchmarks what_if --keep FOLDER          # keeps the recordings
    python -m benchmarks what_if judge FOLDER           # predicts again, anywhere

For each change of ``changes.py``: what a replay of one recording of the step before says of the
change, against the difference of the step times, measured without profiler in turn. Both are shares
of their own step, as the speed of a machine can change between the two. The same again by the trace
alone, as on a machine whose steps nobody timed. ``replayed_error`` is that of the step that a
replay predicts, as published replays state it: with the change, and of the unchanged step by the
trace alone. Where the change is a bound, it is asked whether the bound holds. One of the models is
compiled. The predictions come last: what else a host does moves the steps that wait for it.

A step that waits for the host varies from one to the next by more than most changes. So the summary
is also that of the changes whose real saving is known: its standard error, by the quartiles of the
differences, is at most 2% of the step (``settled``).

Not covered are the size of DDP's buckets, which needs several GPUs, and CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    Figures,
    Run,
    each,
    judged_again,
    recordings,
    write_json,
)
from benchmarks.measuring import Budget, milliseconds, spread, usable_cores
from benchmarks.workers import Job, Record, Stage

_MISS = 0.06
_NOISE = 0.02  # of the step: by so much a change may exceed its bound
_KNOWN = 0.02  # of the step: the standard error of a real saving that is known
_EACH = 3  # changes, between which the unchanged step is measured


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of kept recordings."""
    judged_again(parser)


# Record and time ---------------------------------------------------------------------------------


def _times(
    steps: Sequence[Callable[[], None]], device: str, small: bool, seconds: float
) -> list[tuple[int, float]]:
    """Time steps in turn: which one, and milliseconds; without a GPU the processor's, one thread's.

    The first is measured before and after every third of the others, as the speed of a host changes
    from one second to the next. Other programs on a machine move its clock by more than most
    changes.
    """
    rounds, inner = (3, 1) if small else (200, 3)
    clock = time.process_time if device == "cpu" else time.perf_counter
    for step in steps:
        milliseconds(step, device, 2)
    found, budget, others = [], Budget(seconds * len(steps)), range(1, len(steps))
    for number in range(rounds):
        order: list[int] = [0]
        for place, index in enumerate(others if number % 2 == 0 else reversed(others), 1):
            order += [index, 0] if place % _EACH == 0 else [index]
        for index in order if order[-1] == 0 else [*order, 0]:
            steps[index]()  # the first after a change pays for what the other left in caches
            found.append((index, milliseconds(steps[index], device, inner, clock)))
        if budget.left <= 0 and number >= 2:
            break
    return found


def _record(name: str, run: Run, folder: Path, stage: Stage) -> None:
    """Record the step of a case, and time it with and without each of its changes."""
    import backspot
    from benchmarks.accuracy.changes import CASES

    case = CASES[name](run.context)
    state = [False] * len(case.switches)

    def switched(number: int) -> Callable[[], None]:
        def step() -> None:
            for other, switch in enumerate(case.switches):
                if state[other] != (other == number):
                    state[other] = other == number
                    switch.set(state[other])
            case.step()

        return step

    # Before, with each change, and with a change that does nothing.
    steps = [switched(number) for number in range(-1, len(case.switches) + 1)]
    report = backspot.profile(
        steps[0],
        case.model,
        steps=run.steps or 10,
        stacks=False,
        trials="none",
        trace=folder / f"{name}.json",
        force=True,
    )
    stage("recorded", {"recorded_ms": report.step_ns / 1e6})
    times = _times(steps, run.device, run.small, 0.8 if run.device != "cpu" else 4.0)
    facts = {
        "real_step_ns": report.unprofiled_step_ns,
        "real_steps_ns": report.unprofiled_step_ns_by_step,
        "changes": [
            {"about": switch.about, "kind": switch.kind, "asked": switch.asked}
            for switch in case.switches
        ],
        "times": times,
    }
    write_json(folder / f"{name}.real.json", facts)


def _real(times: Sequence[tuple[int, float]]) -> tuple[float, list[dict[str, float]]]:
    """Return milliseconds of the step, and how much less each of the other steps takes.

    Each measurement is a share of the step before and after it, by its place between both.
    """
    before = [(at, ms) for at, (index, ms) in enumerate(times) if index == 0]
    step_ms = statistics.median(ms for _, ms in before)
    places = [at for at, _ in before]
    shares: dict[int, list[float]] = {}
    for at, (index, ms) in enumerate(times):
        if index:
            after = bisect(places, at)
            (first, a), (last, b) = before[after - 1], before[after]
            usual = a + (b - a) * (at - first) / (last - first)
            shares.setdefault(index, []).append((1 - ms / usual) * step_ms)
    return step_ms, [spread(shares[index]) for index in sorted(shares)]


# Predict -----------------------------------------------------------------------------------------


def _judge(folder: Path, name: str) -> Record:
    """Predict the changes of a case from its recording, and compare."""
    from backspot.analysis.recording import Recording
    from backspot.analysis.replay.predict import predict
    from backspot.analysis.replay.replayable import Refusal

    facts = json.loads((folder / f"{name}.real.json").read_text(encoding="utf-8"))
    recording, (step_ms, real) = Recording.read(folder / f"{name}.json"), _real(facts["times"])
    fitted, alone = (predict(recording, real) for real in (facts["real_step_ns"], None))
    bound = "host" if isinstance(alone, Refusal) or not alone.is_device_bound else "gpu"
    unchanged = None
    if not isinstance(alone, Refusal):
        unchanged = abs(alone.savings([])[0].ns / 1e6 / step_ms - 1)
    changes = [
        {"about": one["about"], "kind": one["kind"], "real_ms": spread_of}
        | {"bound": bound, "step_ms": step_ms, "profiled_apart_ms": facts["real_step_ns"] / 1e6}
        | _said(fitted, one["asked"], spread_of["median"], step_ms)
        | {"alone": _said(alone, one["asked"], spread_of["median"], step_ms)}
        | {"unchanged_alone_error": unchanged}
        for one, spread_of in zip(facts["changes"], real, strict=False)
    ]
    return {"changes": changes, "nothing": real[-1]}


def _said(prediction: Any, asked: dict[str, Any], real_ms: float, step_ms: float) -> Record:
    """What a prediction is of a change, against the real saving; only why not, if it refuses."""
    import backspot
    from backspot.analysis.replay.predict import Prediction

    if not isinstance(prediction, Prediction):
        return {"refused": prediction.reason}
    try:
        found = prediction.what_if(asked)
    except backspot.UsageError as error:
        return {"refused": str(error)}
    whole = found.step_ns + found.saves_ns
    saves, low, high = (
        ns / whole * step_ms for ns in (found.saves_ns, found.low_ns, found.high_ns)
    )
    return {
        "saves_ms": saves,
        "saves_range_ms": [low, high],
        "in_range": low <= real_ms <= high,
        "error": abs(saves - real_ms) / step_ms,
        "off": (saves - real_ms) / step_ms,
        "replayed_error": abs((step_ms - saves) / (step_ms - real_ms) - 1),
        "at_best": found.at_best,
        "bounded": real_ms <= saves + _NOISE * step_ms,
    }


# The summary -------------------------------------------------------------------------------------


def _errors(records: Sequence[Record]) -> dict[str, Any]:
    """How far the predictions of changes are off; of bounds, how many hold."""
    told = [one for one in records if "saves_ms" in one]
    known, bounds = ([one for one in told if one["at_best"] == best] for best in (False, True))
    found: dict[str, Any] = {"changes": len(known), "refused": len(records) - len(told)}
    if bounds:
        found |= {"bounds": len(bounds), "bounds_hold": sum(one["bounded"] for one in bounds)}
        found["median_slack"] = statistics.median(one["off"] for one in bounds)
    if not known:
        return found
    errors = sorted(one["error"] for one in known)
    return found | {
        "median_error": statistics.median(errors),
        "error_90": errors[min(len(errors) - 1, int(0.90 * len(errors)))],
        "error_95": errors[min(len(errors) - 1, int(0.95 * len(errors)))],
        "worst_error": errors[-1],
        "median_off": statistics.median(one["off"] for one in known),
        "in_range": statistics.mean(one["in_range"] for one in known),
        "replayed_step_error": statistics.mean(one["replayed_error"] for one in known),
    }


def _is_known(one: Record) -> bool:
    """Whether the median of the differences is known; a normal distribution's has this error."""
    real = one["real_ms"]
    deviation = (real["high"] - real["low"]) / 1.349
    return bool(1.2533 * deviation / real["n"] ** 0.5 <= _KNOWN * one["step_ms"])


def _by(records: Iterable[Record], key: str) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for one in records:
        found.setdefault(one[key], []).append(one)
    return found


def _summary(changes: Sequence[Record]) -> dict[str, Any]:
    if not changes:
        return {}
    summary: dict[str, Any] = {"all": _errors(changes)}
    for key in ("bound", "kind"):
        summary |= {kind: _errors(mine) for kind, mine in _by(changes, key).items()}
    settled = [one for one in changes if _is_known(one)]
    summary["settled"] = _errors(settled) | {"models": len({one["case"] for one in settled})}
    summary |= {f"settled {bound}": _errors(mine) for bound, mine in _by(settled, "bound").items()}
    summary["settled, trace alone"] = _errors([one["alone"] for one in settled])
    summary["trace alone"] = _errors([one["alone"] for one in changes])
    unchanged = {one["case"]: one["unchanged_alone_error"] for one in changes}
    known = [error for error in unchanged.values() if error is not None]
    if known:
        summary["trace alone"]["unchanged_step_error"] = statistics.mean(known)
    return summary | {
        "models": len(unchanged),
        "misses": [
            f"{one['case']}: {one['about']}"
            for one in changes
            if one.get("error", 0) > _MISS and not one["at_best"]
        ],
    }


def answer(run: Run) -> Figures:
    def handle(job: Job, stage: Stage) -> Record:
        import torch

        torch.manual_seed(0)
        if run.device == "cpu":
            torch.set_num_threads(1)
        _record(job["name"], run, Path(job["folder"]), stage)
        return {}

    def known() -> dict[str, Any]:
        from benchmarks.accuracy.changes import CASES

        return CASES

    with recordings(run) as (folder, record):
        small, again = ("vit_tiny", "trainer"), run.keep is not None
        cases: dict[str, Record] = {}
        if record:
            cases = each(
                run, known, handle, small=small, fresh=False, resumes=again, folder=str(folder)
            )
        names = [path.name.partition(".")[0] for path in sorted(folder.glob("*.real.json"))]
        with ProcessPoolExecutor(min(8, usable_cores()), get_context("spawn")) as pool:
            for name, found in zip(names, pool.map(partial(_judge, folder), names), strict=True):
                cases[name] = cases.get(name, {"end": "done"}) | found
    changes = [
        {"case": name} | one for name, case in cases.items() for one in case.get("changes", ())
    ]
    shown = ("case", "about", "bound", "step_ms", "saves_ms", "saves_range_ms", "error", "refused")
    rows = [
        {"real_ms": one["real_ms"]["median"], **{key: one.get(key, "") for key in shown}}
        for one in changes
    ]
    return {"cases": cases, "rows": rows, "summary": _summary(changes)}
