"""Does a plan come true in public training scripts, followed as its report says?

    python -m benchmarks plan_scripts --checkouts FOLDER

FOLDER holds checkouts of public repositories as `owner/name`; `--list` prints which, and at which
commit. The scripts and the ways to follow a plan in them are in ``plan_scripts.toml``. Each script

1. runs under `backspot run --plan=SECONDS --exit`, unmodified;
2. runs plainly, as it is and with the rungs of the ladder made, in turns: by the script's own flags
   where it has some, else by a patch of its text as the rung's ``code`` says. A clock that shares
   no code with Backspot (``second_clock.py``) times the steps of each run.

A rung that cannot be made ends what is followed, as those below it were tried on top of it. The
``error`` is what the plan said of the step with all that was followed less the real one, each in
percent of its own step as it is, as the speed of a machine can change between the two.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from backspot import Report
from backspot.results import Plan, Rung
from benchmarks.harness import CannotRunError, Figures, Run, write_results
from benchmarks.measuring import Budget
from benchmarks.robustness.public_scripts import Script, Scripts
from benchmarks.robustness.unedited import NotMeasuredError, Place, last_line, missing
from benchmarks.workers import NO_TIME

_KNOWN = Scripts.read(Path(__file__).with_suffix(".toml"))
_WRONG = 5.0  # percent of the step as it is
_DIFFERS = 2.0  # percent of the step as it is


class _NotFollowedError(Exception):
    """A rung cannot be made in a script."""


@dataclass(frozen=True)
class Change:
    """What makes one rung or several.

    Attributes:
        arguments: further ones of the script.
        patches: of its text: a file from the checkout, a text that it has once, and its
            replacement.
        remedies: of ``second_clock.py``.
    """

    arguments: tuple[str, ...] = ()
    patches: tuple[tuple[str, str, str], ...] = ()
    remedies: tuple[str, ...] = ()

    def __add__(self, other: Change) -> Change:
        return Change(
            self.arguments + other.arguments,
            self.patches + other.patches,
            self.remedies + other.remedies,
        )


_EVERYWHERE = {
    r"TF32": "matmul precision",
    r".* with foreach=True": "foreach=True",
    r".* with fused=True": "fused=True",
    r"flash attention": "FLASH_ATTENTION",
    r"memory-efficient attention": "EFFICIENT_ATTENTION",
    r"cuDNN attention": "CUDNN_ATTENTION",
    r"math attention": "MATH",
}
"""Settings that ``second_clock.py`` makes in any script, and its names for them."""


def _change_for(rung: Rung, follow: Mapping[str, Mapping[str, Any]]) -> Change:
    """Return what makes a rung in a script.

    Raises:
        _NotFollowedError: If nothing is known to.
    """
    name, _, number = rung.setting.partition("=") if rung.axis == "loader" else (rung.setting,) * 3
    if name in follow:
        way = follow[name]
        arguments = way.get("arguments", "").format(number).split()
        patches = tuple((file, old, new) for file, old, new in way.get("patches", ()))
        return Change(tuple(arguments), patches)
    for pattern, remedy in _EVERYWHERE.items():
        if re.fullmatch(pattern, rung.setting):
            return Change(remedies=(remedy,))
    raise _NotFollowedError("the script has no flag for it, and there is no patch")


def _patched(clean: Path, patches: Sequence[tuple[str, str, str]]) -> dict[Path, str]:
    """Return the files that patches change, with their new text.

    Raises:
        _NotFollowedError: If a text is not in its file just once.
    """
    texts: dict[Path, str] = {}
    for file, old, new in patches:
        path = clean / file
        text = texts.get(path) or path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise _NotFollowedError(f"{file} has {old.strip()!r} {text.count(old)} times, not once")
        texts[path] = text.replace(old, new)
    return texts


# A script ----------------------------------------------------------------------------------------


@dataclass
class Followed:
    """What was found of one script. Times are milliseconds of a step.

    Attributes:
        end: ``done``, or what went wrong.
        why_not: why there is no plan, or ``""``.
        rungs: each that was tried, as the plan has it, with ``followed``: ``""`` where it was made,
            else why not; ``None`` where it is no part of the ladder.
        said_ms: the step as it is, and with all that was followed, by the plan.
        real_ms: the same by the second clock: medians of runs.
        runs_ms: each run, as it is and followed.
        changed: the arguments, patched files and remedies that followed the plan.
        next_limit: what the plan says limits the step then.
        took_s: how long planning took.
    """

    end: str = "done"
    why_not: str = ""
    rungs: list[dict[str, Any]] = field(default_factory=list)
    said_ms: tuple[float, float] | None = None
    real_ms: tuple[float, float] | None = None
    runs_ms: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    changed: list[str] = field(default_factory=list)
    next_limit: str = ""
    took_s: float = 0.0

    @property
    def error_percent(self) -> float | None:
        """By how much what was said is off, in percent of the step as it is."""
        if self.said_ms is None or self.real_ms is None:
            return None
        said, real = (after / before for before, after in (self.said_ms, self.real_ms))
        return 100 * (said - real)


def _plan_of(place: Place, seconds: int, left: float, keep: Path | None) -> Plan:
    """Return the plan of a script that runs unmodified.

    Args:
        seconds: that the plan may take.
        left: when the script is killed, in seconds.
        keep: begins the names of files for what it prints and for its report, if any.

    Raises:
        CannotRunError: If there is no report.
    """
    command = ("-m", "backspot", "run", f"--plan={seconds}", "--exit", *place.what.options)
    done = place.run(*command, seconds=min(left, 400))
    files = sorted((place.used / place.what.folder).glob("backspot/report*.json"))
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.with_suffix(".txt").write_text(done.errors, encoding="utf-8")
        for path in files[:1]:
            shutil.copy(path, keep.with_suffix(".json"))
    plans = [plan for path in files if (plan := Report.load(path).plan) is not None]
    if done.code or not plans:
        lines = [line for line in done.errors.splitlines() if line.startswith("backspot: ")]
        said = (lines or [last_line(done.errors)])[-1]
        raise CannotRunError(f"exit code {done.code}, {len(files)} reports: {said}")
    return plans[0]


def follow(place: Place, plan: Plan, found: Followed) -> Change | None:
    """Note what of a plan can be made, and return what makes it; ``None`` for nothing.

    A rung that cannot be made ends it.
    """
    change, said, stopped = Change(), plan.step_ns, ""
    for rung in plan.rungs:
        row = asdict(rung) | {"followed": None}
        found.rungs.append(row)
        if not rung.kept:
            continue
        try:
            if stopped:
                raise _NotFollowedError(f"{stopped} below it was not")
            more = change + _change_for(rung, place.what.follow)
            _patched(place.clean, more.patches)
        except _NotFollowedError as error:
            row["followed"] = str(error)
            stopped = stopped or rung.setting
        else:
            row["followed"] = ""
            change, said = more, rung.step_ns
    found.said_ms = plan.step_ns / 1e6, said / 1e6
    found.changed = [*change.arguments, *(file for file, *_ in change.patches), *change.remedies]
    return change if found.changed else None


def step_ms(place: Place, change: Change, left: float = 400) -> float | None:
    """Return what a step takes by the second clock, ``None`` if it measured nothing.

    Args:
        left: when the script is killed, in seconds.
    """
    whole = place.what
    place.what = replace(whole, arguments=(*whole.arguments, *change.arguments))
    place.patches = {
        path.relative_to(place.clean): text
        for path, text in _patched(place.clean, change.patches).items()
    }
    try:
        mode = "pace" + "".join(f":{one}" for one in change.remedies)
        return 1e3 * place.measured(mode, min(left, 400))["step_s"]
    except NotMeasuredError:
        return None
    finally:
        place.what, place.patches = whole, {}


def judge(place: Place, run: Any, budget: Budget, keep: Path | None = None) -> Followed:
    """Plan, follow and time one script.

    Args:
        run: what the command line says.
        budget: when no run begins any more.
        keep: begins the names of files for what the planned run prints and for its report, if any.
    """
    found = Followed()
    try:
        plan = _plan_of(place, run.plan, budget.left, keep)
    except CannotRunError as error:
        found.end = str(error)
        return found
    found.why_not, found.next_limit, found.took_s = (
        plan.why_not,
        plan.next_limit,
        plan.took_ns / 1e9,
    )
    change = follow(place, plan, found)
    if change is None:
        return found
    turns = [0, *([1, 0] * run.rounds)]
    for which in turns:
        if not budget.left:
            break
        took = step_ms(place, change if which else Change(), budget.left)
        if took is None and not budget.left:
            break
        if took is None:
            how = "with the plan followed" if which else "as it is"
            found.end = f"the script fails, or takes minutes to its first steps, {how}"
            return found
        found.runs_ms[which].append(took)
    if all(found.runs_ms):
        before, after = map(statistics.median, found.runs_ms)
        found.real_ms = before, after
    else:
        found.end = NO_TIME
    return found


# All ---------------------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    """Add where the checkouts are, and how long to plan and measure."""
    add = parser.add_argument
    add("--checkouts", type=Path, help="folder with the checkouts")
    add("--plan", type=int, default=60, help="seconds of a plan (default: 60)")
    add("--keep", type=Path, help="a folder for the reports, and what is printed with them")
    add("--rounds", type=int, default=2, help="of runs as it is and followed (default: 2)")


def _row(name: str, found: Followed) -> dict[str, Any]:
    """Return a script's row of the table."""
    followed = [one["setting"] for one in found.rungs if one["followed"] == ""]
    left = [f"{one['setting']}: {one['followed']}" for one in found.rungs if one["followed"]]
    said, real = found.said_ms or (None, None), found.real_ms or (None, None)
    return {
        "script": name,
        "followed": ", ".join(followed) or found.why_not or "nothing helps",
        "said before, ms": said[0],
        "real before, ms": real[0],
        "said after, ms": said[1],
        "real after, ms": real[1],
        "error, % of the step": found.error_percent,
        "not followed": "; ".join(left) or "—",
        "end": found.end,
    }


def _all(names: Sequence[str], scripts: Mapping[str, Script], run: Any) -> Iterator[Any]:
    budget = Budget(run.seconds)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in names:
            if not budget.left:
                yield name, Followed(end=NO_TIME)
                continue
            place = Place(scripts[name], run.checkouts, Path(folder, name), run.device)
            yield name, judge(place, run, budget, run.keep / name if run.keep else None)


def answer(run: Run) -> Figures:
    """Plan each script, follow its plan, and compare."""
    scripts = {name: what for name, what in _KNOWN.scripts.items() if run.device in what.devices}
    known = {
        name: f"{what.repository} at {_KNOWN.commits[what.repository][:12]}"
        for name, what in (_KNOWN.scripts if run.listed else scripts).items()
    }
    names = run.choose(known)
    if run.checkouts is None:
        raise CannotRunError("--checkouts FOLDER is needed: --list prints what it has to hold")
    run.checkouts = run.checkouts.resolve()
    cases: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name in names:
        if lacks := missing(scripts[name]):
            print(f"{name} needs {', '.join(lacks)}", flush=True)
    chosen = [name for name in names if not missing(scripts[name])]
    for name, found in _all(chosen, scripts, run):
        what = scripts[name]
        cases[name] = {
            "repository": what.repository,
            "commit": _KNOWN.commits[what.repository],
            "command": " ".join([what.file, *what.arguments]),
            "stubbed": what.stubbed,
            **vars(found),
            "error_percent": found.error_percent,
        }
        rows.append(_row(name, found))
        print(rows[-1], flush=True)
        write_results(run, {"cases": cases, "rows": rows})
    summary = _summary([*cases.values()])
    wrong = any(case["end"] not in ("done", NO_TIME) for case in cases.values())
    return {"cases": cases, "rows": rows, "summary": summary, "wrong": wrong}


def _summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    real = [case for case in cases if case["error_percent"] is not None]
    errors = [abs(case["error_percent"]) for case in real]
    gains = [(case["real_ms"][0] / case["real_ms"][1]) for case in real]
    differ = [case for case in real if 100 * abs(1 - 1 / _gain(case)) >= _DIFFERS]
    left = [one for case in cases for one in case["rungs"] if one["followed"]]
    return {
        "scripts": len(cases),
        "plans refused": sum(bool(case["why_not"]) for case in cases),
        "plans followed": len(real),
        "rungs followed": sum(one["followed"] == "" for case in real for one in case["rungs"]),
        "rungs not followed": len(left),
        "faster, as said": sum(_gain(case) > 1 for case in differ),
        "of these that differ by 2%": len(differ),
        "median error, % of the step": statistics.median(errors) if errors else None,
        "worst error, % of the step": max(errors, default=None),
        "errors over 5%": sum(error > _WRONG for error in errors),
        "median gain": statistics.median(gains) if gains else None,
    }


def _gain(case: Mapping[str, Any]) -> float:
    before, after = case["real_ms"]
    return float(before / after)
