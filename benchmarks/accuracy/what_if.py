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

A step that waits for the host varies from one to the next by more than most changes, so each real
saving has a standard error (``real_error``, as a share of the step). A change that does nothing
says whether that is right. ``settled`` are the changes with an error of at most 2%. A range holds
a real saving (``in_range``; a measured saving below nothing counts as nothing), strictly, or within
twice its error (``near_range``). A model that cannot be measured, such as one whose step cannot be
captured as a graph, is in ``not done`` with the reason.

Not covered is the size of DDP's buckets, which needs several GPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Figures,
    Run,
    each,
    judged_again,
    recordings,
    write_json,
)
from benchmarks.measuring import Budget, milliseconds, usable_cores
from benchmarks.workers import Job, Record, Stage

_MISS = 0.06
_NOISE = 0.02  # of the step: by so much a change may exceed its bound
_KNOWN = 0.02  # of the step: the standard error of a real saving that is known
_EXACT = 0.003  # of the step: a standard error with which the rounds end
_GPU_S, _CPU_S = 1.2, 4.0  # for each step: a shorter turn of the evidence does fewer models instead
_EACH = 3  # changes, between which the unchanged step is measured


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of kept recordings."""
    judged_again(parser)


# Record and time ---------------------------------------------------------------------------------


Round = list[tuple[int, float]]  # which step, and milliseconds of it


def _times(
    steps: Sequence[Callable[[], None]], run: Run, ahead: Collection[int] = ()
) -> list[Round]:
    """Time steps in turn, in rounds, until each difference to the first is known, or time is up.

    After three steps the host waits for the device; where it runs ahead more than in the first step
    (``ahead``), after nine. Without a GPU these are the processor's times, of one thread: other
    programs on a machine move its clock by more than most changes. The first step comes several
    times in a round.
    """
    on_cpu, small = run.device == "cpu", run.small
    clock = time.process_time if on_cpu else time.perf_counter
    order: list[int] = []
    for place, index in enumerate(range(1, len(steps))):
        order += [index] if place % _EACH else [0, index]
    for step in steps:
        milliseconds(step, run.device, 2)
    gc.collect()
    gc.freeze()  # a collection of all that was made before can take as long as a step
    budget = Budget(len(steps) * (_CPU_S if on_cpu else _GPU_S))
    rounds: list[Round] = []
    while len(rounds) < 3 or not (small or budget.left <= 0 or _are_known(rounds)):
        found = []
        for index in order if len(rounds) % 2 == 0 else reversed(order):
            steps[index]()  # the first after a change pays for what the other left in caches
            inner = 1 if small else 9 if index in ahead else 3
            ms = milliseconds(steps[index], run.device, inner, clock)
            found.append((index, ms))
        rounds.append(found)
    gc.unfreeze()
    return rounds


def _are_known(rounds: Sequence[Round]) -> bool:
    step_ms, real = _real(rounds)
    return all(one["error"] <= _EXACT * step_ms for one in real)


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

    ahead = {at for at, one in enumerate(case.switches, 1) if one.kind == "no_waits"}
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
    stage("recorded", {"recorded_ms": report.recorded_step_ns / 1e6})
    facts = {
        "real_step_ns": report.unprofiled_step_ns,
        "real_steps_ns": report.unprofiled_step_ns_by_step,
        "changes": [
            {"about": switch.about, "kind": switch.kind, "asked": switch.asked}
            for switch in case.switches
        ],
        "times": _times(steps, run, ahead),
    }
    write_json(folder / f"{name}.real.json", facts)


def _real(rounds: Sequence[Round]) -> tuple[float, list[dict[str, float]]]:
    """Return milliseconds of the first step, and how much less each of the others takes.

    A host is slower in one round than in the next by a factor that is the same for all steps: it is
    fitted together with the steps. Each is a mean without the outer fifths, and comes with its
    standard ``error``.
    """
    index, ms = np.array([one for found in rounds for one in found]).T
    of_round = np.repeat(np.arange(len(rounds)), [len(found) for found in rounds])
    steps = [np.flatnonzero(index == one) for one in range(int(index.max()) + 1)]
    which, left = index.astype(int), np.log(ms)
    usual = np.zeros(len(steps))
    for _ in range(20):
        more = np.array([_middle(left[mine])[0] for mine in steps])
        left -= more[which]
        usual += more
        left -= np.array([_middle(left[of_round == one])[0] for one in range(len(rounds))])[
            of_round
        ]
    fitted = len(left) / max(1, len(left) - len(steps) - len(rounds) + 1)
    errors = [fitted**0.5 * _middle(left[mine])[1] for mine in steps]
    before, *after = np.exp(usual).tolist()
    return before, [
        {"ms": before - one, "error": one * (error**2 + errors[0] ** 2) ** 0.5, "n": len(mine)}
        for one, error, mine in zip(after, errors[1:], steps[1:], strict=True)
    ]


def _middle(values: Any) -> tuple[float, float]:
    """Return the mean without the outer fifths of the values, and its standard error."""
    ordered, outer = np.sort(values), len(values) // 5
    inner = ordered[outer : len(ordered) - outer]
    kept = np.clip(ordered, inner[0], inner[-1])
    deviation = kept.std(ddof=1) if len(kept) > 1 else 0.0
    return float(inner.mean()), float(deviation * len(kept) ** 0.5 / len(inner))


# Predict -----------------------------------------------------------------------------------------


def _judge(folder: Path, name: str) -> Record:
    """Predict the changes of a case from its recording, and compare."""
    from backspot.testing import Recording, Refusal, predict

    facts = json.loads((folder / f"{name}.real.json").read_text(encoding="utf-8"))
    recording, (step_ms, real) = Recording.read(folder / f"{name}.json"), _real(facts["times"])
    fitted, alone = (predict(recording, real) for real in (facts["real_step_ns"], None))
    bound = "host" if isinstance(alone, Refusal) or not alone.is_device_bound else "gpu"
    unchanged = None
    if not isinstance(alone, Refusal):
        unchanged = abs(alone.savings([])[0].ns / 1e6 / step_ms - 1)
    changes = [
        {"about": one["about"], "kind": one["kind"], "real_ms": found["ms"]}
        | {"real_error": found["error"] / step_ms, "rounds": found["n"]}
        | {"bound": bound, "step_ms": step_ms, "profiled_apart_ms": facts["real_step_ns"] / 1e6}
        | _said(fitted, one["asked"], found, step_ms)
        | {"alone": _said(alone, one["asked"], found, step_ms)}
        | {"unchanged_alone_error": unchanged}
        for one, found in zip(facts["changes"], real, strict=False)
    ]
    saves, error = (real[-1][key] / step_ms for key in ("ms", "error"))
    return {"changes": changes, "nothing": {"saves": saves, "real_error": error}}


def _said(prediction: Any, asked: dict[str, Any], real: dict[str, float], step_ms: float) -> Record:
    """What a prediction is of a change, against the real saving; only why not, if it refuses."""
    import backspot
    from backspot.testing import Prediction

    if not isinstance(prediction, Prediction):
        return {"refused": prediction.reason}
    try:
        found = prediction.what_if(asked)
    except backspot.UsageError as error:
        return {"refused": str(error)}
    whole, real_ms, noise = found.step_ns + found.saves_ns, real["ms"], 2 * real["error"]
    saves, low, high = (
        ns / whole * step_ms for ns in (found.saves_ns, found.low_ns, found.high_ns)
    )
    return {
        "saves_ms": saves,
        "saves_range_ms": [low, high],
        "in_range": low <= max(real_ms, 0.0) <= high,  # no range goes below nothing
        "strictly_in_range": low <= real_ms <= high,
        "near_range": low <= real_ms + noise and real_ms - noise <= high,
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
        "strictly_in_range": statistics.mean(one["strictly_in_range"] for one in known),
        "near_range": statistics.mean(one["near_range"] for one in known),
        "replayed_step_error": statistics.mean(one["replayed_error"] for one in known),
    }


def _by(records: Iterable[Record], key: str) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for one in records:
        found.setdefault(one[key], []).append(one)
    return found


def _summary(changes: Sequence[Record], nothing: Sequence[Record]) -> dict[str, Any]:
    if not changes:
        return {}
    summary: dict[str, Any] = {"all": _errors(changes)}
    summary["all"]["real_error"] = statistics.median(one["real_error"] for one in changes)
    summary["nothing changed"] = {
        "models": len(nothing),
        "median": statistics.median(abs(one["saves"]) for one in nothing),
        "worst": max(abs(one["saves"]) for one in nothing),
        "real_error": statistics.median(one["real_error"] for one in nothing),
    }
    for key in ("bound", "kind"):
        summary |= {kind: _errors(mine) for kind, mine in _by(changes, key).items()}
    settled = [one for one in changes if one["real_error"] <= _KNOWN]
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
        with ProcessPoolExecutor(min(16, usable_cores()), get_context("spawn")) as pool:
            for name, found in zip(names, pool.map(partial(_judge, folder), names), strict=True):
                cases[name] = cases.get(name, {"end": "done"}) | found
    changes = [
        {"case": name} | one for name, case in cases.items() for one in case.get("changes", ())
    ]
    shown = (
        "case", "about", "bound", "step_ms", "real_ms", "real_error", "saves_ms", "saves_range_ms",
        "error", "refused",
    )  # fmt: skip
    rows = [{key: one.get(key, "") for key in shown} for one in changes]
    nothing = [case["nothing"] for case in cases.values() if "nothing" in case]
    summary = _summary(changes, nothing)
    if summary:
        summary["not done"] = {
            name: case.get("error", case["end"])
            for name, case in cases.items()
            if case["end"] != "done"
        }
    judged = ("at_best", "in_range", "replayed_error")
    lines = [{key: one.get(key) for key in (*shown, *judged)} for one in changes]
    return {"cases": cases, "rows": rows, "lines": lines, "summary": summary}
