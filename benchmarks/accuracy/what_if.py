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
from benchmarks.measuring import interleaved, spread, usable_cores
from benchmarks.workers import Job, Record, Stage

_MISS = 0.06
_NOISE = 0.02  # of the step: by so much a change may exceed its bound
_KNOWN = 0.02  # of the step: the standard error of a real saving that is known


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of kept recordings."""
    judged_again(parser)


# Record and time ---------------------------------------------------------------------------------


def _times(steps: Sequence[Callable[[], None]], device: str, small: bool) -> list[list[float]]:
    """Milliseconds of each step, in turn; without a GPU those of the processor, of one thread.

    Other programs on a machine move its clock by more than most changes.
    """
    rounds, inner = (3, 1) if small else (30, 3)
    seconds = (0.8 if device != "cpu" else 4.0) * len(steps)
    clock = time.process_time if device == "cpu" else time.perf_counter
    return interleaved(
        steps, device, rounds=rounds, inner=inner, warmup=2, seconds=seconds, clock=clock
    )


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

    steps = [switched(number) for number in range(-1, len(case.switches))]
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
    before, *others = _times(steps, run.device, run.small)
    for switch in case.switches:
        switch.set(False)
    changes = [
        {
            "about": switch.about,
            "kind": switch.kind,
            "asked": switch.asked,
            "real_ms": spread([a - b for a, b in zip(before, after, strict=True)]),
        }
        for switch, after in zip(case.switches, others, strict=True)
    ]
    facts = {
        "step_ms": statistics.median(before),
        "real_step_ns": report.unprofiled_step_ns,
        "changes": changes,
    }
    write_json(folder / f"{name}.real.json", facts)


# Predict -----------------------------------------------------------------------------------------


def _judge(folder: Path, name: str) -> Record:
    """Predict the changes of a case from its recording, and compare."""
    from backspot.analysis.recording import Recording
    from backspot.analysis.replay.predict import predict
    from backspot.analysis.replay.replayable import Refusal

    facts = json.loads((folder / f"{name}.real.json").read_text(encoding="utf-8"))
    recording, step_ms = Recording.read(folder / f"{name}.json"), facts["step_ms"]
    fitted, alone = (predict(recording, real) for real in (facts["real_step_ns"], None))
    bound = "host" if isinstance(alone, Refusal) or not alone.is_device_bound else "gpu"
    unchanged = None
    if not isinstance(alone, Refusal):
        unchanged = abs(alone.savings([])[0].ns / 1e6 / step_ms - 1)
    changes = [
        {key: one[key] for key in ("about", "kind", "real_ms")}
        | {"bound": bound, "step_ms": step_ms, "profiled_apart_ms": facts["real_step_ns"] / 1e6}
        | _said(fitted, one["asked"], one["real_ms"]["median"], step_ms)
        | {"alone": _said(alone, one["asked"], one["real_ms"]["median"], step_ms)}
        | {"unchanged_alone_error": unchanged}
        for one in facts["changes"]
    ]
    return {"changes": changes}


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
