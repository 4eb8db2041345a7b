"""Is the time of a step the training's? What `backspot run` says, and the training's own clock.

    python -m benchmarks step_truth --device cpu --jobs 12

Each training runs by itself and under `backspot run`, three times each, in turns. Its own clock
knows the mean step of the whole run. Equal runs differ where a machine is shared, so that a report
is also held against the clock in its own run: over the steps after Backspot was at work; on a CPU
its parts too, as these need no waiting. In one more run the clock waits for the
device around parts of the step: data, rollout, evaluation, optimizer. The shares of a report are
compared with these, unless waiting made the step longer by more than a twentieth.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Figures, done, each
from benchmarks.workers import Job, Record, Stage

_ROOT = Path(__file__).parents[2]
_TRAININGS = "benchmarks.accuracy.trainings"
_WITHIN, _POINTS = 0.05, 0.03
_UNDISTURBED = 0.05
"""Share by which the step may be longer in the run that waits around parts."""
_SMALL_SHARE = 0.12
_SHARES = ("data", "optimizer", "rollout", "scoring", "evaluation", "saving")
_ENOUGH = 20
"""Steps that a report must know more of than it recorded, to be of the whole training."""


@dataclass(frozen=True)
class Training:
    """A script in ``trainings``, its arguments, and what it needs beside torch."""

    script: str
    arguments: str = ""
    needs: tuple[str, ...] = ()


TRAININGS = {
    "perceptron": Training("mlp"),
    "convolutions": Training("cnn"),
    "lstm": Training("lstm"),
    "transformer": Training("transformer"),
    "images from 2 workers": Training("images"),
    "0 workers": Training("loading", "--batch-ms 4"),
    "1 worker never late": Training("loading", "--workers 1 --batch-ms 2"),
    "4 workers never late": Training("loading", "--workers 4 --batch-ms 8"),
    "12 workers never late": Training("loading", "--workers 12 --batch-ms 24 --epoch 300 "
                                       "--steps 600"),
    "1 worker always late": Training("loading", "--workers 1 --batch-ms 30 --steps 300"),
    "4 workers always late": Training("loading", "--workers 4 --batch-ms 80 --steps 300"),
    "4 workers late in bursts": Training("loading", "--workers 4 --batch-ms 8 --stall-ms 500"),
    "2 workers with a filled queue": Training("loading", "--workers 2 --prefetch 8 --batch-ms 60 "
                                        "--slow-first-s 2 --epoch 1000 --steps 200"),
    "4 workers in short epochs": Training("loading", "--workers 4 --batch-ms 60 --epoch 25 "
                                        "--steps 300 --persistent"),
    "2 workers started each epoch": Training("loading", "--workers 2 --batch-ms 8 --epoch 50"),
    "validation": Training("validation"),
    "checkpoints": Training("checkpoints"),
    "logging": Training("logged"),
    "ppo": Training("ppo"),
    "sac": Training("sac"),
    "grpo": Training("grpo"),
    "accumulation": Training("accumulation"),
    "gan": Training("gan"),
    "lbfgs": Training("lbfgs"),
    "own tensor and optimizer": Training("own_tensor"),
    "hugging face": Training("hf_trainer", needs=("transformers", "accelerate")),
    "lightning": Training("lightning_trainer", needs=("lightning",)),
    "averaged weights": Training("averaged"),
    "compiled": Training("compiled"),
    "compiled again": Training("compiled", "--lengths 2"),
    "compiled optimizer": Training("compiled_optimizer"),
    "compiled in the optimizer": Training("muon"),
    "slower and slower": Training("slower"),
}  # fmt: skip
SMALL = ("perceptron", "ppo")


class _FailedError(Exception):
    """A training failed, or had no report."""


# What a report says ------------------------------------------------------------------------------

_RARE_NAMES = {
    "rollout": ("rollout", "forward without gradients"),
    "scoring": ("scoring", "reference"),
    "evaluation": ("evaluation",),
    "saving": ("saving", "saving a checkpoint"),
}
_PHASES = {"scoring": ("scoring", "reference", "teacher")}


def said_share(report: Mapping[str, Any], part: str) -> tuple[float, str]:
    """Return what a report says of a part, as a share of the step, and where it says so.

    What comes in some steps only is a phase if it was recorded, else rare work of the whole
    training, which may have no name of its own.
    """
    training = report["training"]
    whole = report["step_ns"]
    names = _PHASES.get(part, (part,))
    phases = [phase for phase in report["phases"] if phase["name"] in names]
    if phases:
        return sum(phase["wall_ns"] for phase in phases) / whole, "phase"
    if part not in _RARE_NAMES:
        return 0.0, "nothing"
    rare = [work for work in training["rare"] if work["name"] in _RARE_NAMES[part]]
    if rare:
        return sum(work["share"] for work in rare), "rare"
    unnamed = [
        work["share"] for work in training["rare"] if work["name"].startswith("work outside")
    ]
    return (max(unnamed), "unnamed") if unnamed else (0.0, "nothing")


# Runs --------------------------------------------------------------------------------------------


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> None:
    """Run a command.

    Raises:
        _FailedError: If it fails or takes too long.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=_ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise _FailedError(f"took longer than {limit_s:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        lines = errors.strip().splitlines() or [""]
        raise _FailedError(f"exit code {process.returncode}: {lines[-1]}")


def _examine(job: Job, stage: Stage, run: Any) -> Record:
    training = TRAININGS[job["name"]]
    if lacks := [name for name in training.needs if importlib.util.find_spec(name) is None]:
        return {"left out": f"needs {', '.join(lacks)}"}
    known: Record = {"plain": [], "said": []}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        once = partial(_once, training, run, Path(folder))
        # In turns, so that what else the machine does meets both.
        turns = ("plain", "said", "said", "plain", "plain", "said")[: 2 * run.repeats]
        for number, turn in enumerate(turns, 1):
            stage(f"{turn} {number}", known)
            known[turn].append(once(turn))
        stage("parts", known)
        known["parts"] = once("parts")
    return known | judged(known)


def _once(training: Training, run: Any, folder: Path, turn: str) -> dict[str, Any]:
    """Return what a clock or a report says of one run."""
    out, reports = folder / "clock.json", folder / "backspot"
    environment = {
        "STEP_TRUTH_DEVICE": run.device,
        "STEP_TRUTH_OUT": str(out),
        "STEP_TRUTH_PARTS": str(int(turn == "parts" or (turn == "said" and run.device == "cpu"))),
        "STEP_TRUTH_SHARE": str(_SMALL_SHARE if run.small else 1.0),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = ["-m", f"{_TRAININGS}.{training.script}", *training.arguments.split()]
    if turn == "said":
        options = ["--trials", "none", "--force", "-o", str(reports)]
        command = ["-m", "backspot", "run", *options, *command]
    _run(command, environment, run.limit)
    clock: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if turn == "said":
        return _of_report(reports / "report.json", clock)
    return {name: clock[name] for name in ("step_ms", "steps", "parts")}


def _of_report(path: Path, clock: Mapping[str, Any]) -> dict[str, Any]:
    if not path.exists():
        raise _FailedError("no report")
    report = json.loads(path.read_text(encoding="utf-8"))
    training = report["training"]
    if training is None or training["steps"] < clock["steps"]:
        raise _FailedError("the report is not completed")
    own_ms, own_steps, own_parts = _undisturbed(clock, training["steps"] - training["counted"])
    return {
        "step_ms": report["step_ns"] / 1e6,
        "before_ms": statistics.mean(report["unprofiled_step_ns_by_step"] or [0]) / 1e6,
        "counted": training["counted"],
        "own_ms": own_ms,
        "own_steps": own_steps,
        "own_parts": own_parts,
        "log": {
            part: training[f"{part}_ns"] / training["step_ns"]
            for part in ("data", "forward", "backward", "optimizer")
        },
        "phases": {
            phase["name"]: phase["wall_ns"] / report["step_ns"] for phase in report["phases"]
        },
        "rare": [
            {key: work[key] for key in ("name", "period", "wall_ns", "share")}
            for work in training["rare"]
        ],
        "apart": training["apart"],
        "change": training["change"],
        "held_up": training["held_up"],
        "parts": {part: said_share(report, part) for part in _SHARES},
    }


def _undisturbed(clock: Mapping[str, Any], left_out: int) -> tuple[float, int, dict[str, float]]:
    """Return the mean step after Backspot was at work, of how many steps, and the parts' shares.

    The report is prepared beside the steps that follow the recorded ones. As many steps are left
    out as the report leaves out: of work that recurs, both have the same times.
    """
    by_step = clock["by_step"]
    recorded = [number for number, step in enumerate(by_step) if step["is_recorded"]]
    begin = max(recorded, default=-1) + 1 + max(left_out - len(recorded), 0)
    begin = min(max(begin, clock["first"]), len(by_step) - clock["period"])
    steps = [
        (step, before["parts_so_far"])
        for before, step in itertools.pairwise(by_step[begin - 1 :])
        if not step["comes_once"]
    ]
    seconds = sum(step["seconds"] for step, _ in steps)
    parts = {
        name: sum(step["parts_so_far"][name] - before.get(name, 0.0) for step, before in steps)
        for name in clock["parts"]
    }
    return (
        1e3 * seconds / len(steps),
        len(steps),
        {name: part / seconds for name, part in parts.items()},
    )


# The verdict -------------------------------------------------------------------------------------


def judged(known: Mapping[str, Any]) -> Record:
    """Return the row of a training: its step, true and said, and its parts."""
    plain = sorted(clock["step_ms"] for clock in known["plain"])
    said = [report["step_ms"] for report in known["said"]]
    true = statistics.median(plain)
    error = statistics.median(said) / true - 1
    in_its_own_run = statistics.median(
        report["step_ms"] / report["own_ms"] for report in known["said"]
    )
    longer = known["parts"]["step_ms"] / true - 1
    parts: dict[str, Any] = {}
    for part, share in known["parts"]["parts"].items():
        shares = [report["parts"][part] for report in known["said"] if part in report["parts"]]
        if not shares:
            continue
        middle = statistics.median(one for one, _ in shares)
        where = next(where for one, where in sorted(shares) if one >= middle)
        differences = [
            report["parts"][part][0] - report["own_parts"][part]
            for report in known["said"]
            if part in report["own_parts"]
        ]
        parts[part] = {
            "true": share,
            "said": middle,
            "points": 100 * (middle - share),
            "points_in_its_own_run": 100 * statistics.median(differences) if differences else None,
            "where": where,
            "judged": longer <= _UNDISTURBED,
        }
    return {
        "true_ms": true,
        "spread_percent": 100 * (plain[-1] - plain[0]) / true,
        "said_ms": statistics.median(said),
        "error_percent": 100 * error,
        "error_in_its_own_run_percent": 100 * (in_its_own_run - 1),
        "longer_with_parts_percent": 100 * longer,
        "shares": parts,
    }


def _own_run(points: float | None) -> str:
    return "" if points is None else f", {points:+.1f} in its own run"


def _row(name: str, record: Record) -> dict[str, Any]:
    if record.get("end", "done") != "done" or "left out" in record:
        said = record.get("error") or record.get("left out") or record["end"]
        return {"training": name, "true ms": said}
    parts = [
        f"{part} {said['true']:.1%}, {said['said']:.1%} ({said['points']:+.1f}"
        f"{_own_run(said['points_in_its_own_run'])}"
        f"{', ' + said['where'] if said['where'] in ('unnamed', 'nothing') else ''}"
        f"{'' if said['judged'] else ', not judged'})"
        for part, said in record["shares"].items()
    ]
    return {
        "training": name,
        "true ms": f"{record['true_ms']:.3f} (spread {record['spread_percent']:.1f}%)",
        "said ms": f"{record['said_ms']:.3f}",
        "error": f"{record['error_percent']:+.1f}%",
        "in its own run": f"{record['error_in_its_own_run_percent']:+.1f}%",
        "parts: true, said (points)": "; ".join(parts),
    }


def summary_of_lines(lines: Sequence[Mapping[str, Any]], _: str = "") -> dict[str, Any]:
    """Return how many steps and shares are right."""
    judged_here = [line for line in lines if line.get("true_ms") is not None]
    summary: dict[str, Any] = {
        "trainings": len(judged_here),
        "left_out": len(lines) - len(judged_here),
    }
    if not judged_here:
        return summary
    worst = max(judged_here, key=lambda line: abs(line["error_percent"]))
    errors = [abs(line["error_percent"]) for line in judged_here]
    own = [abs(line["in_its_own_run_percent"]) for line in judged_here]
    parts = [
        (line["training"], part, *line[part])
        for line in judged_here
        for part in _SHARES
        if line.get(part)
    ]
    points = [
        (abs(100 * (said - true)), f"{part} of {training}")
        for training, part, true, said, _, is_judged in parts
        if is_judged
    ]
    own_points = [abs(off) for *_, off, _ in parts if off is not None]
    return summary | {
        "within_5_percent": sum(error <= 100 * _WITHIN for error in errors),
        "within_5_percent_or_spread": sum(
            abs(line["error_percent"]) <= max(100 * _WITHIN, line["spread_percent"])
            for line in judged_here
        ),
        "median_percent": statistics.median(errors),
        "median_spread_percent": statistics.median(line["spread_percent"] for line in judged_here),
        "within_5_percent_in_own_run": sum(error <= 100 * _WITHIN for error in own),
        "median_percent_in_own_run": statistics.median(own),
        "worst": f"{worst['training']}: {worst['error_percent']:+.1f}%",
        "own_parts": len(own_points),
        "own_parts_within_3_points": sum(one <= 100 * _POINTS for one in own_points),
        "parts": len(points),
        "parts_within_3_points": sum(one <= 100 * _POINTS for one, _ in points),
        "worst_part": "{1}: {0:.1f} points".format(*max(points)) if points else "",
    }


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--repeats", type=int, choices=(1, 2, 3), default=3, help="runs of each kind (default: 3)")
    add("--limit", type=float, default=120, help="seconds for each run of a script (default: 120)")


def answer(run: Any) -> Figures:
    """Run the trainings."""
    if run.small:
        run.repeats = 1
    known = {
        name: f"{training.script}.py {training.arguments}".strip()
        for name, training in TRAININGS.items()
    }
    handle = partial(_examine, run=run)
    cases = each(
        run, lambda: known, handle, small=SMALL, timeout_s=run.limit * (2 * run.repeats + 1)
    )
    rows = [_row(name, record) for name, record in cases.items()]
    lines = [_line(name, record) for name, record in cases.items()]
    summary = summary_of_lines([_line(name, record) for name, record in done(cases).items()])
    return {"cases": cases, "rows": rows, "lines": lines, "summary": summary}


def _line(name: str, record: Record) -> dict[str, Any]:
    """What is kept of a training; of each part the share, true and said, and whether it counts."""
    shown = ("true_ms", "spread_percent", "said_ms", "error_percent")
    parts = {
        part: [said["true"], said["said"], said["points_in_its_own_run"], said["judged"]]
        for part, said in record.get("shares", {}).items()
    }
    own = record.get("error_in_its_own_run_percent")
    known = {key: record.get(key) for key in shown} | {"in_its_own_run_percent": own}
    return {"training": name, **known, **parts}
