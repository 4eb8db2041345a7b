"""Is a price that of the cause? Causes planted beside an innocent heavy operator, and their fixes.

    python -m benchmarks price_truth --device cuda --jobs 3
    python -m benchmarks price_truth --device cpu --cases loop-product --keep reports
    python -m benchmarks price_truth judge reports           # by the rules of today

Each case is a training with a cause in the module, the function or the phase of an innocent
operator, and the same training with the cause taken away. Steps of both are timed in turn, which
gives the gain, and a clock around the cause alone says what it takes forward and backward. Both are
profiled with the defaults of ``backspot.profile``, and timed again.

A price is right within the larger of 3% of the step and a quarter of the gain. What a replay says
is taken as a share of the report's step, and gains are timed as shares of a timed one, so that a
busy machine, on which clock and processor time part, changes neither. What a trial has measured is
taken as it is: on a CPU both are the processor's time. A fix that makes the step slower gains
nothing: there, no price and one of 0 are right.

The fixed training must have no finding that the slow one lacks, and none that promises above 2% of
the step. What most fixed trainings beside an innocent operator have, in the same time, is of that
operator and not of a fix: it is counted apart. A promise that the slow training has, too, of
another rule than the cause's and of as many milliseconds, is not new.

Processes take turns on the device. ``--keep`` keeps what each report said, and its recording; a run
that was ended goes on with what is kept there. ``judge`` asks the rules of today about a recording
that is there. What a trial has measured stays, and so does what only stacks show, which a recording
does not hold. Without a recording, what the report said is judged.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import (
    Figures,
    Run,
    UsageError,
    commit,
    done,
    each,
    print_rows,
    turn,
    write_json,
)
from benchmarks.measuring import interleaved
from benchmarks.workers import Job, Record, Stage

if TYPE_CHECKING:
    import backspot
    from benchmarks.accuracy.price_causes import Case

_TIMEOUT_S = 240.0
_SMALL = ("loop-product", "keys-product")
_OF_STEP, _OF_GAIN, _PROMISE = 0.03, 0.25, 0.02
_OF_NEIGHBOUR = 5
"""Fixed trainings that have a finding, from which it can be that of their innocent operator."""
VERDICTS = ("right", "too high", "too low", "no price", "missing")
"""What can be said of a price; of a cause that costs less than 3% of a step, none is right too."""


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("verb", nargs="?", choices=("record", "judge"), default="record")
    add("folder", nargs="?", type=Path, help="judge: what --keep has saved")
    add("--keep", type=Path, help="keep what was measured here, and go on from what is there")


def answer(run: Run) -> Figures:
    """Measure and judge each case."""
    from benchmarks.accuracy.price_causes import CASES, cases_on

    folder = run.folder if run.verb == "judge" else run.keep
    if run.verb == "judge" and (folder is None or not folder.is_dir()):
        raise UsageError("judge needs the folder that --keep has filled")

    def known() -> dict[str, Any]:
        wanted = CASES if run.cases else cases_on(run.device)
        return {name: f"{' or '.join(case.cause.rule)}" for name, case in wanted.items()}

    if run.verb == "judge":
        kept = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        wanted = {name: kept[name] for name in run.choose(CASES) if name in kept}
        records = {
            name: {"end": "done", **record, **_said_today(folder, name, record)}
            for name, record in wanted.items()
        }
    else:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        handle = partial(_kept, run=run, folder=folder)
        records = each(run, known, handle, small=_SMALL, timeout_s=_TIMEOUT_S)
    measured = done(records)
    usual = of_neighbours({name: (CASES[name], record) for name, record in measured.items()})
    verdicts = {
        name: judged(CASES[name], record, usual.get(CASES[name].neighbour, {}))
        for name, record in measured.items()
    }
    failed = {name: record for name, record in records.items() if record["end"] != "done"}
    print_rows([{"case": name, **one} for name, one in verdicts.items()])
    ends = {name: {"end": "done", **one} for name, one in verdicts.items()}
    return {
        "rows": by_rule(verdicts),
        "lines": [{"case": name, **one} for name, one in verdicts.items()],
        "summary": summary_of(verdicts),
        # What was measured is in the folder of --keep.
        "cases": ends | failed,
    }


def summary_of_lines(lines: Sequence[Mapping[str, Any]], _: str = "") -> dict[str, Any]:
    """Return the counts of kept cases."""
    # Of what was measured long ago this is not known.
    return summary_of({line["case"]: {"of_neighbour": "", **line} for line in lines})


def _kept(job: Job, stage: Stage, run: Run, folder: Path | None) -> Record:
    """What was measured of a case at this commit, or what is measured now."""
    path = folder / f"{job['name']}.json" if folder else None
    if path is not None and path.exists():
        record = json.loads(path.read_text())
        if record["of"] == [commit(), run.device, run.small]:
            return record
    record = _measured(job, stage, run, folder)
    if path is not None:
        write_json(path, record)
    return record


# Measuring ---------------------------------------------------------------------------------------


def _measured(job: Job, stage: Stage, run: Run, folder: Path | None) -> Record:
    """Time and profile a case, slow and fixed, and keep the recordings in a folder."""
    import torch

    import backspot
    from benchmarks.accuracy.price_causes import CASES
    from benchmarks.accuracy.price_models import NEIGHBOURS, alone, built, size_of
    from benchmarks.causes.case import settings

    warnings.simplefilter("ignore")  # anomaly mode and deterministic operators say what they do
    case = CASES[job["name"]]
    settings()
    if run.device == "cpu":
        torch.set_num_threads(1)
    else:  # else each product of an innocent operator would be a cause
        torch.set_float32_matmul_precision("high")
    size, neighbour = size_of(run.context), NEIGHBOURS[case.neighbour]
    trainings = (case.cause.slow, case.cause.fixed)
    clock = time.process_time if run.device == "cpu" else time.perf_counter
    inner, rounds = (1, 9) if run.device == "cpu" else (6, 5)
    how = {"rounds": 2 if run.small else rounds, "inner": inner, "warmup": 2, "seconds": 3}
    stage("time", {})
    with turn("torch"):
        made = [built(one, neighbour, size) for one in trainings]
        steps = [one.step for one in made]
        times = interleaved(steps, run.device, **how, clock=clock)
        stage("the cause alone", {"times": times})
        clocked = [built(one, neighbour, size, clocked=True) for one in trainings]
        shares = alone(clocked, clock, 2 if run.small else 6)
        del clocked
    said = {}
    for name, one in zip(("slow", "fixed"), made, strict=True):
        gc.collect()
        stage(f"profile {name}", {"times": times})
        with turn():
            trace = folder and _recording(folder, job["name"], name)
            said[name] = _said(backspot.profile(one.step, one.models, trace=trace, force=True))
    with turn():  # before and after: what others do on the machine changes meanwhile
        later = interleaved(steps, run.device, **how, clock=clock)
    times = [first + second for first, second in zip(times, later, strict=True)]
    spent = [
        None if share is None else share * statistics.median(some)
        for share, some in zip(shares, times, strict=True)
    ]
    of = [commit(), run.device, run.small]
    return {"of": of, "times": times, "alone": spent, **said}


def _said(report: backspot.Report) -> dict[str, Any]:
    """What a report says, with prices as shares of its step."""
    from backspot.testing import gain_of

    step = report.replayed_step.ns if report.replayed_step else report.step_ns
    findings = []
    for one in report.findings:
        gain = gain_of(one)
        tried = one.tried.verdict if one.tried else ""
        price = None if gain is None else gain.ns / step
        findings.append(
            {
                "rule": one.rule,
                "tier": one.tier,
                "path": one.path,
                "takes": one.wall_ns / step,
                "price": 0.0 if tried == "does not help" else price,
                "bound": "" if gain is None else "best" * gain.at_best or "least" * gain.at_least,
                "tried": tried,
                "seen": one.seen,
            }
        )
    return {
        "step_ms": step / 1e6,
        "findings": findings,
        "not_replayed": report.not_replayed,
        "real_ns": list(report.unprofiled_step_ns_by_step),
    }


def _recording(folder: Path, name: str, which: str) -> Path:
    """Where a recording is kept: of the ``slow`` or of the ``fixed`` training of a case."""
    return folder / f"{name}.{which}.trace.json.gz"


def _said_today(folder: Path, name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """What the rules of today say of what is kept of a case, where its recordings are there."""
    from backspot.testing import Options, Recording, read_events, report_of

    found = {}
    for which in ("slow", "fixed"):
        if (path := _recording(folder, name, which)).exists():
            # A recording does not say how long steps take without the profiler.
            options = Options(real_steps=tuple(record[which].get("real_ns", ())))
            report = report_of(Recording.of(read_events(path)), options)
            found[which] = _with_kept(_said(report), record[which])
    return found


def _with_kept(said: dict[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of a recording, with what trials and stacks have shown beside it."""
    from backspot.testing import all_rules

    of_stacks = {rule.name for rule in all_rules() if "stacks" in rule.needs}
    tried = {(one["rule"], one["path"]): one for one in kept["findings"] if one["tried"]}
    measured = ("tier", "price", "bound", "tried")
    for one in said["findings"]:
        if (known := tried.get((one["rule"], one["path"]))) is not None:
            one.update({key: known[key] for key in measured})
    said["findings"] += [one for one in kept["findings"] if one["rule"] in of_stacks]
    return said


# Judging -----------------------------------------------------------------------------------------


def of_neighbours(
    measured: Mapping[str, tuple[Case, Mapping[str, Any]]],
) -> dict[str, dict[str, float]]:
    """Return what fixed trainings have of their innocent operators, by neighbour and rule.

    That is what more than half of them have, whatever the cause beside it was, in milliseconds.
    """
    beside: dict[str, list[dict[str, float]]] = {}
    for case, record in measured.values():
        takes = {one["rule"]: _ms(record["fixed"], "takes", one) for one in _after(record)}
        beside.setdefault(case.neighbour, []).append(takes)
    found: dict[str, dict[str, float]] = {}
    for neighbour, each_takes in beside.items():
        seen = Counter(rule for takes in each_takes for rule in takes)
        found[neighbour] = {
            rule: statistics.median(takes[rule] for takes in each_takes if rule in takes)
            for rule, count in seen.items()
            if count >= _OF_NEIGHBOUR and 2 * count > len(each_takes)
        }
    return found


def _after(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return _counted(record["fixed"])


def _ms(said: Mapping[str, Any], what: str, finding: Mapping[str, Any]) -> float:
    """Return what a finding takes or promises in milliseconds of the report's step."""
    share: float = (finding[what] or 0.0) * said["step_ms"]
    return share


def judged(
    case: Case, record: Mapping[str, Any], usual: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return the verdict on a case, in milliseconds of the timed step.

    Args:
        usual: what fixed trainings beside the same innocent operator have of it, by rule, as
            ``of_neighbours`` has it.
    """
    slow, fixed = record["times"]
    step = statistics.median(slow)
    gains = sorted(a - b for a, b in zip(slow, fixed, strict=True))
    gain = statistics.median(gains)
    spread = (gains[3 * len(gains) // 4] - gains[len(gains) // 4]) / 2
    can_be_had = max(0.0, gain)
    allowed = _may_err(step, can_be_had)
    before, after = (_counted(record[name]) for name in ("slow", "fixed"))
    found = [one for one in before if one["rule"] in case.cause.rule]
    # Of several findings of a cause, that of the first rule that has a price.
    found.sort(key=lambda one: (one["price"] is None, case.cause.rule.index(one["rule"])))
    first = found[0] if found else None
    price = None
    if first is not None and first["price"] is not None:
        # A trial measures what a replay takes as a share of a step.
        tried = first["tried"] == "helps"
        price = first["price"] * (record["slow"]["step_ms"] if tried else step)
    takes, left = record["alone"] if case.cause.whole else (None, None)
    said = price or 0.0
    if abs(said - can_be_had) <= allowed and (price is not None or gain <= _OF_STEP * step):
        verdict = "right"
    elif first is None:
        verdict = "missing"
    elif price is None:
        verdict = "no price"
    else:
        verdict = "too high" if price > gain else "too low"
    untried = first is not None and not first["tried"]
    of_neighbour = {one["rule"] for one in after if _is_usual(one, record["fixed"], usual or {})}
    of_neighbour.difference_update(case.cause.rule)
    of_slow = {one["rule"] for one in before}
    false = {one["rule"] for one in after if one["rule"] not in of_slow}
    left_over = (*(case.cause.rule if case.cause.partly else ()), *case.cause.leaves)
    promised = {
        one["rule"]
        for one in after
        if (one["price"] or 0.0) > _PROMISE
        and (one["rule"] in case.cause.rule or not _is_as_before(one, record))
    }
    promised.difference_update(left_over)
    false.difference_update(case.cause.leaves)
    return {
        "rule": first["rule"] if first else case.cause.rule[0],
        "verdict": verdict,
        "said_ms": price,
        "bound": first["bound"] if first else "",
        "tried": first["tried"] if first else "",
        "refused": bool(record["slow"]["not_replayed"]),
        "gain_ms": gain,
        "spread_ms": spread,
        "alone_ms": takes,
        "alone_less_ms": None if takes is None else takes - (left or 0.0),
        "step_ms": step,
        "above": bool(takes and untried and said > takes + allowed),
        "above_named": bool(untried and said > first["takes"] * step + _OF_STEP * step),
        "new": " ".join(sorted(false - of_neighbour)),
        "promised": " ".join(sorted(promised - of_neighbour)),
        "of_neighbour": " ".join(sorted(of_neighbour & (false | promised))),
    }


def _is_usual(
    finding: Mapping[str, Any], said: Mapping[str, Any], usual: Mapping[str, float]
) -> bool:
    """Whether fixed trainings beside the same operator have this, and in the same time."""
    takes = usual.get(finding["rule"])
    return takes is not None and _alike(_ms(said, "takes", finding), takes, said)


def _is_as_before(finding: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether the slow training has this promise, too, of as many milliseconds or more.

    What is true of nearly every step is of no place, and of a training rather than of a fix.
    """
    from backspot.testing import all_rules

    before = [one for one in _counted(record["slow"]) if one["rule"] == finding["rule"]]
    if finding["rule"] in {rule.name for rule in all_rules() if rule.common}:
        return any((one["price"] or 0.0) > _PROMISE for one in before)
    promise = _ms(record["fixed"], "price", finding)
    known = [_ms(record["slow"], "price", one) for one in before if one["path"] == finding["path"]]
    return any(promise <= ms or _alike(promise, ms, record["fixed"]) for ms in known)


def _alike(some_ms: float, other_ms: float, said: Mapping[str, Any]) -> bool:
    """Whether two times of a step are the same."""
    return abs(some_ms - other_ms) <= max(_PROMISE * said["step_ms"], _OF_GAIN * other_ms)


def _counted(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The findings; what is true of nearly every step is none."""
    return [one for one in said["findings"] if one["tier"] != "account"]


def by_rule(verdicts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how often the price of each rule is right, too high and so on."""
    rules: dict[str, Counter[str]] = {}
    for one in verdicts.values():
        counts = rules.setdefault(one["rule"], Counter())
        counts["cases"] += 1
        counts[one["verdict"]] += 1
        counts["above the cause"] += one["above"]
        counts["false after the fix"] += bool(one["new"] or one["promised"])
    shown = ("cases", *VERDICTS, "above the cause", "false after the fix")
    return [
        {"rule": rule, **{name: counts[name] for name in shown}}
        for rule, counts in sorted(rules.items())
    ]


def summary_of(verdicts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counts of all cases."""
    every: Sequence[Mapping[str, Any]] = list(verdicts.values())
    counts = Counter(one["verdict"] for one in every)
    return {
        "cases": len(every),
        "rules": len({one["rule"] for one in every}),
        **{name: counts[name] for name in VERDICTS},
        "no price, as the replay is refused": sum(
            one["verdict"] == "no price" and one["refused"] for one in every
        ),
        "unsteady: the gain's spread is above what a price may err": sum(map(_wavers, every)),
        "gain agrees with the clock around the cause": sum(map(_agrees, every)),
        "above the cause, untried": sum(one["above"] for one in every),
        "above what the finding names, untried": sum(one["above_named"] for one in every),
        "too high, and said at best": _bounded(every, "best", "too high"),
        "too low, and said at least": _bounded(every, "least", "too low"),
        "at best, and beaten": _bounded(every, "best", "too low"),
        "a new finding after the fix": sum(bool(one["new"]) for one in every),
        "a promise above 2% after the fix": sum(bool(one["promised"]) for one in every),
        "after the fix, of the innocent operator": sum(bool(one["of_neighbour"]) for one in every),
    }


def _may_err(step_ms: float, gain_ms: float) -> float:
    """What a price may differ from the gain, in milliseconds."""
    return max(_OF_STEP * step_ms, _OF_GAIN * abs(gain_ms))


def _agrees(one: Mapping[str, Any]) -> bool:
    """Whether both ways to time a gain say the same."""
    less, allowed = one["alone_less_ms"], _may_err(one["step_ms"], one["gain_ms"])
    return less is not None and abs(less - one["gain_ms"]) <= allowed


def _wavers(one: Mapping[str, Any]) -> bool:
    return one["spread_ms"] > _may_err(one["step_ms"], one["gain_ms"])


def _bounded(every: Sequence[Mapping[str, Any]], bound: str, verdict: str) -> int:
    return sum(one["bound"] == bound and one["verdict"] == verdict for one in every)
