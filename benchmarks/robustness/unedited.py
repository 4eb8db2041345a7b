"""Is `backspot run` right on public training scripts that nobody wrote for it?

    python -m benchmarks.robustness.unedited --checkouts FOLDER

FOLDER holds checkouts of public repositories as `owner/name`; `--list` prints which, and at which
commit. Each script runs three times plainly and three times under `backspot run`, beside busy
processes:

- same: what it prints and its exit code do not change, and each run has its report;
- where: the first row is the module whose backward takes longest by a second clock, which shares
  no code with Backspot;
- advice: each finding's remedy that a patch can apply is applied, and the steps with and without
  it are timed in turn.

A full run writes a table beside the JSON file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import backspot
from backspot import Report
from benchmarks.common import (
    CannotRunError,
    choose,
    command_line,
    machine,
    parse,
    print_table,
    script,
    write_results,
)
from benchmarks.load import add_busy, busy
from benchmarks.robustness import toy_data
from benchmarks.robustness.public_scripts import COMMITS, SCRIPTS, Script
from benchmarks.robustness.second_clock import OUTSIDE

CLOCK = Path(__file__).with_name("second_clock.py")
TIMINGS = (r"\d+(\.\d+)? ?(ms|s|sec|seconds|it/s|img/s|/s)\b",)
"""What no two runs print alike."""

TIE = 0.8
"""A row that takes this much of the slowest module's time may come first."""

REMEDIES = {
    "optimizer-kernels": ("foreach=True", "fused=True"),
    "waiting-for-data": ("num_workers=2",),
    "zero-grad-fill": ("set_to_none=True",),
    "gradient-accumulation": ("set_to_none=True",),
    "layout-copies": ("channels_last",),
    "launch-bound": ("torch.compile",),
    "small-batch": ("torch.compile",),
    "no-tensor-cores": ("matmul precision",),
    "attention-math": ("fused attention",),
}
"""The remedies of ``second_clock.py`` that a rule may ask for."""


# One run -----------------------------------------------------------------------------------------


@dataclass
class Done:
    """How a run ended."""

    code: int
    output: str
    errors: str


class Place:
    """The folder in which a script runs: a copy of its checkout with toy data."""

    def __init__(self, what: Script, checkouts: Path, folder: Path, device: str) -> None:
        self.what, self.device = what, device
        self.clean, self.used = folder / "clean", folder / "used"
        source = checkouts / what.repository
        if not source.is_dir():
            raise CannotRunError(f"no checkout of {what.repository} in {checkouts}")
        shutil.copytree(source, self.clean, ignore=shutil.ignore_patterns(".git"))
        for data in what.data:
            toy_data.make(self.clean / what.folder, data)

    def run(self, *before: str, seconds: float = 400) -> Done:
        """Run the script in a fresh copy, always at the same place.

        Args:
            before: what stands between Python and the script.
            seconds: when it is killed.
        """
        shutil.rmtree(self.used, ignore_errors=True)
        shutil.copytree(self.clean, self.used)
        cwd = self.used / self.what.folder
        paths = [Path(backspot.__file__).parents[1], *(cwd / path for path in self.what.path)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(os.path.normpath, paths)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.used / "hf_home"),
            "TORCH_HOME": str(cwd / "torch_home"),
            "WANDB_MODE": "disabled",
            "MPLBACKEND": "agg",
        }
        if self.device == "cpu":
            environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            [sys.executable, *before, self.what.file, *self.what.arguments],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        errors: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
        reader.start()
        killer = threading.Timer(seconds, lambda: os.killpg(process.pid, signal.SIGKILL))
        killer.start()
        output = []
        pressed = not self.what.interrupt
        for line in process.stdout:
            if not pressed or not self.what.interrupt:
                output.append(line)
            if not pressed and self.what.interrupt in line:
                pressed = True
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.wait()
        killer.cancel()
        reader.join(10)
        return Done(process.returncode, "".join(output), "".join(errors))

    def measured(self, mode: str) -> Any:
        """Return what the second clock measured, ``None`` if the script failed."""
        out = self.used.parent / "clock.json"
        out.unlink(missing_ok=True)
        done = self.run(str(CLOCK), str(out), mode)
        if not out.exists():
            print(f"    {mode}: {last_line(done.errors)}", flush=True)
            return None
        return json.loads(out.read_text()) or None


def last_line(text: str) -> str:
    """Return the last line of a text; empty for none."""
    return (text.strip().splitlines() or [""])[-1]


# Same --------------------------------------------------------------------------------------------


def difference(plain: Sequence[str], observed: str, timings: Sequence[str]) -> tuple[str, float]:
    """Compare what runs printed.

    A word that plain runs print differently is no ground to judge.

    Args:
        plain: of each plain run.
        observed: of a run under Backspot.
        timings: regular expressions of what the script says about its own speed.

    Returns:
        The first difference, ``""`` if there is none; and the share of words that was compared.
    """

    def words(text: str) -> list[str]:
        for timing in (*timings, *TIMINGS):
            text = re.sub(timing, "TIME", text)
        return re.split(r"\s+", text)

    texts = [words(text) for text in plain]
    mine = words(observed)
    if len({len(text) for text in texts}) > 1:
        return "", 0.0
    fixed = [len(set(column)) == 1 for column in zip(*texts, strict=True)]
    share = sum(fixed) / len(fixed)
    if len(mine) != len(fixed):
        return f"{len(mine)} words in place of {len(fixed)}", share
    for number, (word, expected, judge) in enumerate(zip(mine, texts[0], fixed, strict=True)):
        if judge and word != expected:
            return f"word {number} is {word!r}, not {expected!r}", share
    return "", share


# Where -------------------------------------------------------------------------------------------


Clocked = list[tuple[str, str, str, float]]
"""Path, class, class of the outermost module, and seconds of each module by the second clock."""


def true_share(report: Report, clocked: Clocked) -> float:
    """Return the time of the report's first row by the second clock, as a share of the longest."""
    row = report.modules[0]
    longest = clocked[0][3]
    if not row.is_module:
        return sum(s for path, *_, s in clocked if path == row.path == OUTSIDE) / longest
    relative = row.path
    if row.root:
        relative = row.path.removeprefix(row.root).removeprefix(".")
    matches = [
        (len(os.path.commonprefix([path[::-1], relative[::-1]])), seconds)
        for path, kind, _, seconds in clocked
        if kind == row.class_name
        and (f".{path}".endswith(f".{relative}") or f".{relative}".endswith(f".{path}"))
    ]
    return max(matches)[1] / longest if matches else 0.0


# Advice ------------------------------------------------------------------------------------------


def compared(place: Place, remedy: str, rounds: int) -> tuple[str, str]:
    """Time a script's steps with and without a remedy, in turn.

    Returns:
        ``helps``, ``hurts`` or ``undecided``, by the 95% interval of the difference between
        processes; and the numbers.
    """
    column = 0 if place.device == "cuda" or "workers" in remedy else 1
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            steps = place.measured("steps" if not which else f"steps:{remedy}")
            if steps is None:
                return "not judged", f"{remedy} cannot be applied here"
            times[which].append(statistics.median(step[column] for step in steps) * 1e3)
    saved = [a - b for a, b in zip(*times, strict=True)]
    middle = statistics.mean(saved)
    student = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}[rounds]
    half = student * statistics.stdev(saved) / math.sqrt(rounds)
    before = statistics.mean(times[0])
    said = f"{remedy}: {before:.2f} ms a step, saves {middle:.2f} ± {half:.2f}"
    if middle - half > 0.01 * before:
        return "helps", said
    return ("hurts" if middle + half < -0.01 * before else "undecided"), said


# A script ----------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What was found of one script."""

    same: str = ""
    compared: float = 1.0
    first: list[str] = field(default_factory=list)
    where: list[float] = field(default_factory=list)
    slowest: str = ""
    findings: list[str] = field(default_factory=list)
    advice: dict[str, tuple[str, str]] = field(default_factory=dict)


def judge(what: Script, place: Place, arguments: argparse.Namespace) -> Verdict:
    """Run a script plainly and observed, and judge its reports."""
    found = Verdict()
    with busy(arguments.busy):
        plain = [place.run() for _ in range(arguments.repeats)]
        if any(done.code != plain[0].code for done in plain) or (
            plain[0].code and not what.interrupt
        ):
            found.same = f"the script itself fails: {last_line(plain[0].errors)}"
            return found
        reports = []
        for _ in range(arguments.repeats):
            done = place.run("-m", "backspot", "run", *what.options)
            told, share = difference([d.output for d in plain], done.output, what.timings)
            found.compared = min(found.compared, share)
            if done.code != plain[0].code:
                told = f"exit code {done.code}, not {plain[0].code}: {last_line(done.errors)}"
            files = sorted((place.used / what.folder).glob("backspot/report*.json"))
            if not files:
                lines = [line for line in done.errors.splitlines() if "backspot" in line]
                told = told or f"no report: {last_line(chr(10).join(lines) or done.errors)}"
            reports += [Report.load(path) for path in files]
            found.same = found.same or told
    clocked = place.measured("modules") if reports else None
    for report in reports:
        row = report.modules[0]
        found.first.append(f"{row.label} {row.wall_ns / max(1, report.wall_ns):.0%}")
        if clocked:
            found.where.append(round(true_share(report, clocked), 2))
    if clocked:
        path, kind, _, seconds = clocked[0]
        share = seconds / sum(entry[3] for entry in clocked)
        found.slowest = f"{path} ({kind}) {share:.0%}" if kind else f"{path} {share:.0%}"
    for finding in {f.rule: f for report in reports for f in report.findings}.values():
        times = sum(finding.rule == f.rule for report in reports for f in report.findings)
        found.findings.append(f"{finding.rule} ({times}×): {finding.remedy}")
        for remedy in REMEDIES.get(finding.rule, ()) if arguments.rounds else ():
            found.advice[f"{finding.rule}: {remedy}"] = compared(place, remedy, arguments.rounds)
        if finding.rule not in REMEDIES:
            found.advice[finding.rule] = ("not judged", finding.remedy)
    return found


def row_of(name: str, found: Verdict) -> tuple[str, ...]:
    """Return a row of the table."""
    right = sum(share >= TIE for share in found.where)
    where = f"{right} of {len(found.where)}" if found.where else "not judged"
    first = max(found.first, key=found.first.count) if found.first else "no report"
    advice = "; ".join(f"{rule}: {verdict}" for rule, (verdict, _) in found.advice.items())
    same = found.same or f"yes ({found.compared:.0%})"
    return name, same, where, first, found.slowest, advice or "no finding"


HEAD = ("script", "same (compared)", "where true", "first row", "by the second clock", "advice")


def missing(what: Script) -> list[str]:
    """Return the packages that are missing here."""
    return [name for name in ("torch", *what.needs) if importlib.util.find_spec(name) is None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this benchmark alone has."""
    parser.add_argument("--checkouts", type=Path, help="folder with the checkouts")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--rounds", type=int, default=4, help="of timing a remedy (default: 4)")
    add_busy(parser)


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Run the scripts."""
    parser = command_line(__doc__, out="unedited_{device}.json", seconds=7200)
    add_options(parser)
    arguments = parse(parser, argv)
    known = {
        name: f"{what.repository} at {COMMITS[what.repository][:12]}"
        for name, what in SCRIPTS.items()
        if arguments.device in what.devices or arguments.list
    }
    names = choose(arguments, known)
    if arguments.checkouts is None:
        raise CannotRunError("--checkouts FOLDER is needed: --list prints what it has to hold")
    rows, cases, wrong = [], {}, 0
    for name in names:
        what = SCRIPTS[name]
        if lacks := missing(what):
            rows.append((name, f"needs {', '.join(lacks)}", "", "", "", ""))
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = Place(what, arguments.checkouts.resolve(), Path(folder), arguments.device)
            found = judge(what, place, arguments)
        rows.append(row_of(name, found))
        print(" | ".join(rows[-1]), flush=True)
        wrong += bool(found.same) or any(share < TIE for share in found.where)
        wrong += any(verdict == "hurts" for verdict, _ in found.advice.values())
        cases[name] = {
            "repository": what.repository,
            "commit": COMMITS[what.repository],
            "command": " ".join([what.file, *what.arguments]),
            "stubbed": what.stubbed,
            **vars(found),
        }
        write_results(arguments, {"cases": cases}, last=False)
    print_table(HEAD, rows)
    write_results(arguments, {"cases": cases})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
