"""Answer every question that this machine can, and keep the answers.

    python -m benchmarks all [--minutes 10] [--device cpu] [--only NAME,NAME] [--skip NAME,NAME]

Each question of ``PLAN`` runs as its own command, in the order of the plan, for at most ``--turn``
seconds; what is not through then gets another turn after all others had one. Started again at the
same commit, it goes on where it stopped. ``results/<device>.json`` has the answer to each question
(``kept.py``), the options that it was asked with, and what did not run and why. Answers of an older
commit stay, with that commit, until they are measured again. All that was measured is in
``benchmarks/out``. ``claims.py`` makes the claims of the documents from the answers.

On several GPUs, what is timed has the first and a third of the cores to itself. On the second, what
is counted shares the GPU and the other cores; then comes what is timed on any GPU but bears no
other work on it. At last comes what needs two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from benchmarks.harness import OUT, RESULTS, commit
from benchmarks.kept import Answer, answer_of, path_of, read_evidence, write_evidence
from benchmarks.measuring import Budget, machine
from benchmarks.questions import QUESTIONS

PLAN = {
    "cuda": {
        "planted": "--trials 104 --jobs 8",
        "timm_sweep": "--jobs 8",
        "step_truth": "--jobs 4",
        "trial_truth": "",
        "gpu_truth": "--jobs 4",
        "price_truth": "--jobs 3 --keep {folder}/price_truth",
        "published_causes": "--jobs 2",
        "what_if": "--keep {folder}/what_if",
        "waits_truth": "--jobs 3",
        "planted_python": "--jobs 4",
        "steady_answer": "",
        "memory_truth": "--jobs 3",
        "overhead": "",
        "false_alarms": "--jobs 5 --keep {folder}/false_alarms",
        "causes": "record -o {folder}/causes --jobs 6 && judge {folder}/causes --jobs 8",
        "compiled_truth": "--jobs 4 --subset",
        "compare_runs": "--pairs 20 --jobs 4",
        "limit_truth": "--jobs 4",
        "planted_ranks": "",
        "planted_transfers": "",
        "memory_ranks": "",
        "overhead_ranks": "",
    },
    "cpu": {
        "planted": "--trials 104",
        "timm_sweep": "--models *tiny* --timeout 60",
        "leaks": "",
        "startup": "",
        "fuzz_reports": "",
        "fuzz_traces": "--count 2000",
        "read": "--sizes 30,300 --gzip 30 --patience 10 --repeat 3",
        "trial_truth": "",
        "limit_truth": "",
        "step_truth": "",
        "what_if": "",
        "ranks": "",
        "overhead": "",
        "compare_runs": "--pairs 20",
        "causes": "record -o {folder}/causes --jobs 1 && judge {folder}/causes --jobs 2",
        "false_alarms": "",
        "published_causes": "",
        "price_truth": "--jobs 3 --keep {folder}/price_truth",
        "steady_answer": "--busy 2",
        "published_jobs": "",
        "unedited": "",
    },
}
"""What answers on which device, the most important first, and the options of a full run."""

_TIMED = (
    "gpu_truth", "trial_truth", "price_truth", "what_if", "published_causes", "limit_truth",
    "steady_answer", "overhead",
)  # fmt: skip
_COUNTED = (
    ("timm_sweep",),
    ("waits_truth", "planted", "planted_python"),
    ("memory_truth", "compiled_truth"),
)
_ALONE = ("causes", "false_alarms", "compare_runs")
_TOGETHER = ("overhead_ranks", "planted_ranks", "planted_transfers", "memory_ranks")
"""On two GPUs: one after the other, beside each other, without others on the GPU, on both GPUs."""

_ENDS = {0: "done", 1: "done, with faults", 3: "in part", 4: "cannot run"}
_OVER = ("done", "done, with faults", "cannot run")
_GRACE_S = 30  # for a question to write what it has


def _run(command: Sequence[str], said: IO[str], seconds: float) -> int:
    """Run a command for so many seconds at most, then end it and what it has started."""
    process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    try:
        return process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
        return 3
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _path_of(device: str, folder: Path) -> Path:
    """Return where the answers go: to the project, or to a folder that was named."""
    return path_of(device, RESULTS if folder == OUT else folder)


def _known(device: str, folder: Path) -> Answer:
    """Return the answers that are there, to begin with those of the project."""
    path = _path_of(device, folder)
    return read_evidence(path if path.exists() else path_of(device))


def _ask(name: str, device: str, chosen: str, folder: Path, seconds: float) -> Answer:
    """Answer one question, for so many seconds at most; return what came of it."""
    question = QUESTIONS[name]
    out = folder / f"{name}_{device}.json"
    more = ["--device", device] * question.device
    more += ["--seconds", str(round(seconds))] * bool(question.seconds)
    begin, log = time.monotonic(), folder / f"{name}.log"
    code, parts = 0, chosen.format(folder=folder).split(" && ")
    parts[-1] += f" -o {out}"
    with log.open("w", encoding="utf-8") as said:
        for part in parts:
            command = [sys.executable, "-m", "benchmarks", name, *part.split(), *more]
            if code in (0, 1):
                code = _run(command, said, seconds + _GRACE_S - (time.monotonic() - begin))
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    hardware = machine(device)
    entry: Answer = {"question": name, "date": hardware["date"], "hardware": hardware}
    entry |= {"end": _ENDS.get(code, f"exit code {code}")}
    entry["seconds"] = round(time.monotonic() - begin)
    if code not in (0, 3):
        errors = [line for line in lines if line.startswith("error: ")]
        entry["why"] = (errors or lines or [""])[-1].removeprefix("error: ")[:300]
    if code not in _ENDS or code == 4:
        return entry
    log.unlink()
    document = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if document.get("commit") != commit():
        return {**entry, "end": "in part", "why": "nothing was through when the time was up"}
    return answer_of(document) | entry


def _keep(name: str, found: Answer, device: str, folder: Path) -> None:
    """Keep what came of a question, beside what another process has kept meanwhile."""
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        evidence = _known(device, folder)
        evidence["questions"][name] = found
        evidence |= {"commit": commit(), "date": machine(device)["date"]}
        write_evidence(_path_of(device, folder), evidence)
    finally:
        os.close(lock)


def collect(device: str, budget: Budget, turn: float, names: Sequence[str], folder: Path) -> bool:
    """Run what is not done yet at this commit, and keep what it gives; return whether all is."""
    now, known = commit(), _known(device, folder)["questions"]

    def is_over(name: str) -> bool:
        entry = known.get(name, {})
        return entry.get("commit") == now and entry.get("end") in _OVER

    while left := [name for name in names if not is_over(name)]:
        for name in left:
            if budget.left < min(turn, 20):
                return False
            print(f"{name}: {budget.left:.0f} s are left", flush=True)
            found = _ask(name, device, PLAN[device][name], folder, min(turn, budget.left))
            before = known.get(name, {})
            if before.get("commit") == now:
                found["seconds"] += before.get("seconds", 0)
            elif "summary" not in found and "summary" in before:
                found = {**before, "not again": found.get("why", found["end"])}
            found.setdefault("commit", now)
            known[name] = found
            _keep(name, found, device, folder)
            told = f"  {name}: {found['end']} {found.get('why', '')} {found.get('summary', '')}"
            print(f"{told[:600]}", flush=True)
            if "not again" in found:
                names = [other for other in names if other != name]
    return True


def side_by_side(
    device: str, budget: Budget, turn: float, names: Sequence[str], folder: Path
) -> bool:
    """Answer what is timed on one GPU and what is counted on another, then what needs both."""
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    cores = sorted(os.sched_getaffinity(0))
    quiet = len(cores) // 3
    command = [sys.executable, "-m", "benchmarks", "all", "--device", device, "--gpus", "1"]
    command += ["--turn", str(turn), "--folder", str(folder)]
    running = []

    def start(gpu: str, lane: Sequence[str], own: Sequence[int]) -> None:
        if only := [name for name in names if name in lane]:
            more = ["--minutes", str(budget.left / 60), "--only", ",".join(only)]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            running.append(subprocess.Popen([*command, *more], env=environment))
            os.sched_setaffinity(running[-1].pid, own or cores)

    try:
        others = {*names}.difference(_TIMED, *_COUNTED, _ALONE, _TOGETHER)
        for lane in (*_COUNTED, tuple(others)):
            start(gpus[1], lane, cores[quiet:])
        counted = [*running]
        start(gpus[0], _TIMED, cores[:quiet])
        for one in counted:
            one.wait()
        start(gpus[1], _ALONE, cores[quiet:])
        ends = [one.wait() for one in running]
    finally:
        for one in running:
            one.terminate()  # and with it what it has started
    together = [name for name in names if name in _TOGETHER]
    return not any(ends) and collect(device, budget, turn, together, folder)


def main(argv: list[str]) -> int:
    """Run the command; 3 if time ran out before all questions were through."""
    parser = argparse.ArgumentParser("python -m benchmarks all", description=__doc__)
    add = parser.add_argument
    add("--device", choices=tuple(PLAN), help="default: cuda if there is")
    add("--minutes", type=float, default=10, help="time of this run (default: 10)")
    add("--turn", type=float, default=90, help="seconds of a question in a row (default: 90)")
    add("--only", default="", help="comma-separated questions (default: all of the plan)")
    add("--skip", default="", help="comma-separated questions that are left out")
    add("--gpus", type=int, help="1: nothing side by side (default: all that there are)")
    add(
        "--folder",
        type=Path,
        default=OUT,
        help="where the results go; the answers, too, if it is named",
    )
    run = parser.parse_args(argv)
    if run.device != "cpu" and (run.device is None or run.gpus is None):
        import torch

        found = torch.cuda.device_count()
        run.device = run.device or ("cuda" if found else "cpu")
        run.gpus = run.gpus or found
    if not commit():
        print("error: no commit is known; BENCHMARKS_COMMIT can say it", file=sys.stderr)
        return 4
    run.folder.mkdir(parents=True, exist_ok=True)
    only, skip = (list(filter(None, text.split(","))) for text in (run.only, run.skip))
    if unknown := {*only, *skip} - set(PLAN[run.device]):
        print(f"error: not in the plan: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    names = [one for one in PLAN[run.device] if one in (only or [one]) and one not in skip]
    answer = side_by_side if (run.gpus or 0) > 1 else collect
    done = answer(run.device, Budget(60 * run.minutes), run.turn, names, run.folder)
    return 0 if done else 3
