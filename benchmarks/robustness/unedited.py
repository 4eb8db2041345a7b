"""Is `backspot run` right on public training scripts that nobody wrote for it?

    python -m benchmarks unedited --checkouts FOLDER

FOLDER holds checkouts of public repositories as `owner/name`; `--list` prints which, and at which
commit. Each script runs three times plainly and three times under `backspot run`, beside busy
processes:

- same: what it prints and its exit code do not change, and each run has its report;
- where: the first row is the module whose backward takes longest by a second clock, which shares
  no code with Backspot;
- advice: each finding's remedy that a patch can apply is applied, and the steps with and without
  it are timed in turn.
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
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import backspot
from backspot import Report
from backspot.testing import quantile
from benchmarks.harness import CannotRunError, Figures, Run, write_results
from benchmarks.measuring import Budget, busy
from benchmarks.robustness import toy_data
from benchmarks.robustness.public_scripts import COMMITS, SCRIPTS, Script
from benchmarks.robustness.second_clock import OUTSIDE
from benchmarks.workers import NO_TIME

CLOCK = Path(__file__).with_name("second_clock.py")
TIMES = (r"\d+(\.\d+)? ?(ms|s|sec|seconds|it/s|img/s|/s)\b",)
"""Times and speeds, which no two runs of any script print alike."""

TIE = 0.8
"""A row that takes this much of the slowest module's time may come first."""

VERDICTS = ("helps", "hurts", "undecided", "fails")
"""What is said of a remedy that was tried."""

REMEDIES = {
    "optimizer-kernels": ("foreach=True", "fused=True"),
    "waiting-for-data": ("num_workers=2",),
    "zero-grad-fill": ("set_to_none=True",),
    "gradient-accumulation": ("set_to_none=True",),
    "layout-copies": ("channels_last", "torch.compile"),
    "launch-bound": ("torch.compile",),
    "small-batch": ("torch.compile",),
    "no-tensor-cores": ("matmul precision",),
    "attention-math": ("fused attention",),
}
"""The remedies of ``second_clock.py`` that a rule may ask for."""


# One run -----------------------------------------------------------------------------------------


class NotMeasuredError(Exception):
    """The second clock has measured nothing.

    Args:
        why: in a few words.
        fails: the script has ended with an exception, or an exit code.
    """

    def __init__(self, why: str, *, fails: bool = False) -> None:
        super().__init__(why)
        self.fails = fails


@dataclass
class Done:
    """How a run ended."""

    code: int
    output: str
    errors: str


class Place:
    """The folder in which a script runs: a copy of its checkout with toy data.

    Attributes:
        patches: files from the checkout that have another text in the following runs.
    """

    def __init__(self, what: Script, checkouts: Path, folder: Path, device: str) -> None:
        self.what, self.device = what, device
        self.patches: Mapping[Path, str] = {}
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
        for path, text in self.patches.items():
            (self.used / path).write_text(text, encoding="utf-8")
        cwd = self.used / self.what.folder
        paths = [Path(backspot.__file__).parents[1], *(cwd / path for path in self.what.path)]
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(os.path.normpath, paths), *filter(None, given)]),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.used / "hf_home"),
            "TORCH_HOME": str(cwd / "torch_home"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.used.parent / "inductor"),
            "WANDB_MODE": "disabled",
            "MPLBACKEND": "agg",
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # for scripts older than the new default
        }
        environment |= dict(one.split("=", 1) for one in self.what.environment)
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
        assert process.stdout
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
        reader.start()
        killer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        killer.start()
        output = []
        try:
            for line in process.stdout:
                output.append(line)
                if self.what.interrupt and self.what.interrupt in line:
                    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                    break
            if self.what.interrupt:  # what is printed from now on is chance
                process.stdout.read()
            process.wait()
        finally:
            killer.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        reader.join(10)
        return Done(process.returncode, "".join(output), "".join(errors))

    def measured(self, mode: str, seconds: float = 400) -> Any:
        """Return what the second clock measured.

        Args:
            mode: of ``second_clock.py``.
            seconds: when the script is killed.

        Raises:
            NotMeasuredError: If the script fails, takes too long, makes too few steps, or has
                nothing that a remedy changes.
        """
        out = self.used.parent / "clock.json"
        out.unlink(missing_ok=True)
        done = self.run(str(CLOCK), str(out), mode, seconds=seconds)
        if out.exists():
            if found := json.loads(out.read_text()):
                return found
            why = NotMeasuredError("it changes nothing in the script, or this makes too few steps")
        elif done.code == -signal.SIGKILL:
            why = NotMeasuredError(f"the script was killed, as it is after {seconds:.0f} s")
        else:
            why = NotMeasuredError(f"the script fails: {last_line(done.errors)}", fails=True)
        print(f"    {mode}: {why}", flush=True)
        raise why


def last_line(text: str) -> str:
    """Return the last line of a text; empty for none."""
    return (text.strip().splitlines() or [""])[-1]


# Same --------------------------------------------------------------------------------------------


def difference(
    plain: Sequence[str], observed: str, varies: Sequence[str], *, together: bool = False
) -> tuple[str, bool]:
    """Compare what runs printed.

    Where plain runs differ, the script draws numbers without a seed: then numbers are left out, and
    nothing is compared if there are not equally many words.

    Args:
        plain: of each plain run.
        observed: of a run under Backspot.
        varies: regular expressions of what no two runs print alike, as the script's speed.
        together: compare the words in alphabetical order, as they come in any.

    Returns:
        The first difference, ``""`` if there is none; and whether numbers were compared.
    """

    def words(text: str, numbers: bool = True) -> list[str]:
        for pattern in (*varies, *TIMES, *(() if numbers else (r"-?\d[\d.]*(e[-+]\d+)?",))):
            text = re.sub(pattern, "#", text)
        return sorted(text.split()) if together else text.split()

    exact = len({tuple(words(text)) for text in plain}) == 1
    texts = {tuple(words(text, exact)) for text in plain}
    if len(texts) > 1:
        return "", False
    (expected,), mine = texts, words(observed, exact)
    for number, (word, other) in enumerate(zip(mine, expected, strict=False)):
        if word != other:
            return f"word {number} is {word!r}, not {other!r}", exact
    ends = "" if len(mine) == len(expected) else f"{len(mine)} words in place of {len(expected)}"
    return ends, exact


# Where -------------------------------------------------------------------------------------------


Clocked = list[tuple[str, str, str, float]]
"""Path, class, class of the outermost module, and seconds of each module by the second clock."""


def true_share(report: Report, clocked: Clocked) -> float:
    """Return the time of the report's first place by the second clock, as a share of the longest.

    The second clock has no row for the engine's own time, which is no place in a model.
    """
    row = next(row for row in report.modules if row.is_module or row.path == OUTSIDE)
    longest = clocked[0][3]
    if not row.is_module:
        return sum(s for path, *_, s in clocked if path == row.path == OUTSIDE) / longest
    relative = row.path
    if row.root:
        relative = row.path.removeprefix(row.root).removeprefix(".")
    named = [(_unwrapped(path), s) for path, kind, _, s in clocked if kind == row.class_name]
    return _closest(_unwrapped(relative), named) / longest


def _unwrapped(path: str) -> list[str]:
    """Return the parts of a path without the private names by which a wrapper has its module."""
    *parts, last = path.split(".")
    return [part for part in parts if not part.startswith("_")] + ([last] if last else [])


def _closest(path: list[str], named: Sequence[tuple[list[str], float]]) -> float:
    """Return the time of the module whose path ends as this one, from whatever root; else 0.

    A whole model is called by no name, or by that which a wrapper has for it.
    """
    if not path:
        return min(named, key=lambda one: len(one[0]), default=(path, 0.0))[1]
    matches = [
        (same, seconds)
        for other, seconds in named
        if (same := min(len(path), len(other))) and path[-same:] == other[-same:]
    ]
    return max(matches, default=(0, 0.0))[1]


# Advice ------------------------------------------------------------------------------------------


def is_advised(remedy: str, text: str) -> bool:
    """Whether a finding's text names a remedy, and not as what does not help."""
    code = remedy.partition("=")[0] + "=" * ("=" in remedy)
    return " " in remedy or (code in text and f"{remedy} does not help" not in text)


def compared(place: Place, remedies: Collection[str], rounds: int) -> dict[str, tuple[str, str]]:
    """Time a script's steps as they are and with each of some remedies, in turn.

    Returns:
        By remedy, ``helps``, ``hurts`` or ``undecided``, by the 95% interval of the difference
        between processes; and the numbers. ``fails`` where the script fails with
        it and not without it, ``not judged`` where nothing was measured; and why.
    """
    times: dict[str, list[list[float]]] = {remedy: [] for remedy in ("", *remedies)}
    found: dict[str, tuple[str, str]] = {}
    for number in range(rounds):
        for remedy in sorted(times, reverse=number % 2 == 1):
            try:
                steps = place.measured(f"steps:{remedy}" if remedy else "steps")
            except NotMeasuredError as why:
                if not remedy:
                    return dict.fromkeys(remedies, ("not judged", f"without it, {why}"))
                del times[remedy]
                found[remedy] = ("fails" if why.fails else "not judged", str(why))
            else:
                times[remedy].append([statistics.median(c) * 1e3 for c in zip(*steps, strict=True)])
    bare = times.pop("")
    for remedy, with_it in times.items():
        column = 0 if place.device == "cuda" or "workers" in remedy else 1
        saved = [a[column] - b[column] for a, b in zip(bare, with_it, strict=True)]
        middle = statistics.mean(saved)
        half = quantile(0.05, rounds - 1) * statistics.stdev(saved) / math.sqrt(rounds)
        before = statistics.mean(one[column] for one in bare)
        helps, hurts = middle - half > 0.01 * before, middle + half < -0.01 * before
        said = f"{before:.2f} ms a step, saves {middle:.2f} ± {half:.2f}"
        found[remedy] = ("helps" if helps else "hurts" if hurts else "undecided", said)
    return found


# A script ----------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What was found of one script; ``end`` is ``done`` once that is all."""

    end: str = NO_TIME
    same: str = ""
    seeded: bool = True
    rows: list[list[str]] = field(default_factory=list)
    where: list[float] = field(default_factory=list)
    clocked: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    advice: dict[str, tuple[str, str]] = field(default_factory=dict)


def run_script(place: Place, repeats: int) -> tuple[Verdict, list[Report]]:
    """Run a script plainly and observed; return what differs, and the reports."""
    found, reports, what = Verdict(), [], place.what
    plain = [place.run() for _ in range(repeats)]
    # Python ends an interrupted script in either of two ways, by chance.
    codes = {1, -signal.SIGINT} if what.interrupt else {0}
    for done in plain:
        if done.code not in codes:
            said = last_line(done.errors)
            found.same = f"the script itself fails, exit code {done.code}: {said}"
            return found, []
    for _ in range(repeats):
        done = place.run("-m", "backspot", "run", *what.options)
        told, exact = difference(
            [d.output for d in plain], done.output, what.varies, together=what.together
        )
        found.seeded &= exact
        if done.code not in codes:
            told = f"exit code {done.code}, not {plain[0].code}: {last_line(done.errors)}"
        files = sorted((place.used / what.folder).glob("backspot/report*.json"))
        if not files:
            lines = [line for line in done.errors.splitlines() if line.startswith("backspot: ")]
            told = told or f"no report: {(lines or [last_line(done.errors)])[-1]}"
        reports += [Report.load(path) for path in files]
        found.same = found.same or told
    for report in reports:
        whole, first = max(1, report.wall_ns), report.modules[:4]
        found.rows.append([f"{row.label} {row.wall_ns / whole:.0%}" for row in first])
    return found, reports


def judge_places(place: Place, found: Verdict, reports: Sequence[Report]) -> None:
    """Judge the first rows by the second clock."""
    clocked = None
    if not place.what.compiled:
        with suppress(NotMeasuredError):
            clocked = place.measured("modules")
    found.where = [round(true_share(report, clocked), 2) for report in reports if clocked]
    whole = sum(seconds for *_, seconds in clocked or ())
    found.clocked = [
        f"{path or kind} ({kind}) {seconds / whole:.0%}" for path, kind, _, seconds in clocked or ()
    ][:4]


def judge_advice(place: Place, found: Verdict, reports: Sequence[Report], rounds: int) -> None:
    """Judge the findings by real steps with their remedies, unless ``rounds`` is 0."""
    every = [finding for report in reports for finding in report.findings]
    asked: dict[str, str] = {}
    for rule, finding in {finding.rule: finding for finding in every}.items():
        times = sum(finding.rule == rule for finding in every)
        found.findings.append(f"{rule} ({times}×): {finding.seen} {finding.remedy}")
        remedies = [one for one in REMEDIES.get(rule, ()) if is_advised(one, finding.remedy)]
        asked |= {f"{rule}: {one}": one for one in remedies if rounds}
        if not remedies or not rounds:
            found.advice[rule] = ("not judged", finding.remedy)
    timed = compared(place, set(asked.values()), rounds) if asked else {}
    found.advice |= {name: timed[remedy] for name, remedy in asked.items()}


def row_of(name: str, found: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    right = sum(share >= TIE for share in found["where"])
    first = [rows[0] for rows in found["rows"]] or ["—"]
    advice = (f"{rule}: {verdict}" for rule, (verdict, _) in found["advice"].items())
    nothing = NO_TIME if found["end"] == NO_TIME else "—"
    return {
        "script": name,
        "same": found["same"] or ("yes" if found["seeded"] else "yes, without a seed"),
        "where true": f"{right} of {len(found['where'])}" if found["where"] else nothing,
        "first row": max(first, key=first.count),
        "by the second clock": (found["clocked"] or [nothing])[0],
        "advice true": "; ".join(advice) or nothing,
    }


def is_wrong(found: Mapping[str, Any]) -> bool:
    """Whether a script showed a fault."""
    return bool(
        found["same"]
        or any(share < TIE for share in found["where"])
        or any(verdict in ("hurts", "fails") for verdict, _ in found["advice"].values())
    )


def missing(what: Script) -> list[str]:
    """Return the packages that are missing here."""
    return [name for name in ("torch", *what.needs) if importlib.util.find_spec(name) is None]


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkouts", type=Path, help="folder with the checkouts")
    add("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    add("--rounds", type=_rounds, default=4, help="of timing a remedy; 0: none (default: 4)")


def _rounds(text: str) -> int:
    number = int(text)
    if number < 0 or number == 1:
        raise argparse.ArgumentTypeError("0, or at least 2: one round has no spread")
    return number


def run_all(names: Sequence[str], run: Any, save: Callable[[str, Verdict], None]) -> Iterator[str]:
    """Judge scripts, some at a time; on a GPU the second clock has it to itself.

    What began is compared and its places are judged; remedies are timed while there is time.

    Args:
        names: of the scripts.
        run: as the command line says.
        save: gets what is known of a script, whenever that is more.

    Yields:
        The name of each script that is done with.
    """
    budget, jobs = Budget(run.seconds), max(1, run.jobs)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

        def first(name: str) -> tuple[str, Place, Verdict, list[Report]]:
            place = Place(SCRIPTS[name], run.checkouts, Path(folder, name), run.device)
            found, reports = run_script(place, run.repeats) if budget.left else (Verdict(), [])
            save(name, found)
            return name, place, found, reports

        def second(ran: tuple[str, Place, Verdict, list[Report]]) -> str:
            name, place, found, reports = ran
            if reports:
                judge_places(place, found, reports)
                save(name, found)
                judge_advice(place, found, reports, run.rounds if budget.left else 0)
            if reports or found.same:
                found.end = "done"
            save(name, found)
            return name

        with busy(run.busy), ThreadPoolExecutor(jobs) as pool:
            if run.device == "cuda":
                for start in range(0, len(names), jobs):
                    yield from map(second, [*pool.map(first, names[start : start + jobs])])
                return
            for done in as_completed([pool.submit(lambda n: second(first(n)), n) for n in names]):
                yield done.result()


def answer(run: Run) -> Figures:
    """Run the scripts."""
    known = {
        name: f"{what.repository} at {COMMITS[what.repository][:12]}"
        for name, what in SCRIPTS.items()
        if run.device in what.devices or run.listed
    }
    names = run.choose(known)
    if run.checkouts is None:
        raise CannotRunError("--checkouts FOLDER is needed: --list prints what it has to hold")
    run.checkouts = run.checkouts.resolve()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has what it runs in the background ignore it, and the scripts would do so, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cases: dict[str, Any] = {}
    alone = threading.Lock()

    def save(name: str, found: Verdict) -> None:
        what = SCRIPTS[name]
        with alone:
            cases[name] = {
                "repository": what.repository,
                "commit": COMMITS[what.repository],
                "command": " ".join([what.file, *what.arguments]),
                "stubbed": what.stubbed,
                **vars(found),
            }
            write_results(run, {"cases": cases})

    for name in names:
        if lacks := missing(SCRIPTS[name]):
            print(f"{name} needs {', '.join(lacks)}", flush=True)
    for name in run_all([n for n in names if not missing(SCRIPTS[n])], run, save):
        print(row_of(name, cases[name]), flush=True)
    lines = [row_of(name, cases[name]) for name in known if name in cases]
    ran = [line for line in lines if cases[line["script"]]["end"] != NO_TIME]
    wrong = any(map(is_wrong, cases.values()))
    return {
        "cases": cases,
        "rows": lines,
        "lines": lines,  # whole: a cell of kept rows is cut
        "summary": summary_of_lines(ran),
        "wrong": wrong,
    }


def summary_of_lines(lines: Sequence[Mapping[str, Any]], _: str = "") -> dict[str, Any]:
    """Return how many scripts were right, and how many remedies.

    Args:
        lines: see ``row_of``.
    """
    places = [place for line in lines if len(place := line["where true"].split(" of ")) == 2]
    advice = [one for line in lines for one in line["advice true"].split("; ")]
    verdicts = Counter(one.rpartition(": ")[2] for one in advice)
    return {
        "scripts": len(lines),
        "same": sum(line["same"].startswith("yes") for line in lines),
        "judged by the second clock": len(places),
        "first place right": sum(right == judged for right, judged in places),
        "remedies": sum(verdicts[verdict] for verdict in VERDICTS),
        **{verdict: verdicts[verdict] for verdict in VERDICTS},
    }
