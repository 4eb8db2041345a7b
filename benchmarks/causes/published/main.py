"""Does it name what people published? Slow training steps rebuilt, before and after their fix.

python -m benchmarks published_causes --device cuda --jobs 2
python -m benchmarks published_causes --device cpu --cases gae_loop,confusion_matrix
python docs/make_published.py       # the page, from the figures of a GPU
python -m benchmarks blind_set_3 --device cuda --jobs 4 --keep reports
python -m benchmarks blind_set_3 judge reports --device cuda

Each case has a process of its own. Its two steps are timed without the profiler, in turn, and then
profiled: the slow one by ``backspot.profile`` with its defaults, so that what it advises is tried,
and the fixed one without trials, as only what is left matters there. The processes take turns on
the device. On a CPU, cases that need a GPU run only if they are named. A finding without a price
counts as promising what it takes.

``blind_set_3`` does the same with the third set, and judges what stable rules and what those in
preview say apart. Its cases are to be seen once, so that a small run takes two of the older ones.
``--keep`` keeps what was measured and what each report said; ``judge`` judges that again.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.causes.published import THIRD, folder_of, judge, load, names, title
from benchmarks.harness import (
    Figures,
    Run,
    UsageError,
    done,
    each,
    profile_in_turn,
    turn,
    write_json,
)
from benchmarks.measuring import interleaved
from benchmarks.workers import Job, Record, Stage

_SMALL = ("gae_loop", "zeroed_gradients")
_TIMEOUT_S = 120.0
_TIERS = ("stable", "preview")


def _examine(job: Job, stage: Stage, run: Run) -> Record:
    """Time and profile a case, slow and fixed."""
    import backspot
    from benchmarks.causes.case import prepare, settings

    build = load(job["name"])[1]
    prepare(run.device)
    with turn():  # kernels that build a model would run between those that are timed
        stage("build", {})
        built = []
        for fixed in (False, True):
            settings()
            built.append(build(fixed, run.context))
        stage("time", {})
        steps, models = zip(*built, strict=True)
        losses = [[float(step()) for _ in range(2)] for step in steps]
        # On a CPU, trials and most of a report are of the processor's time, and others may use it.
        on_cpu = run.device == "cpu"
        clock = time.process_time if on_cpu else time.perf_counter
        inner, rounds = (1, 11) if on_cpu else (6, 5)
        rounds = 3 if run.small else rounds
        times = interleaved(
            steps, run.device, rounds=rounds, inner=inner, warmup=1, seconds=4, clock=clock
        )
    _give_back(run)
    stage("profile", {"times": times})
    with turn():
        before = judge.said(backspot.profile(steps[0], models[0]))
        _give_back(run)
    of_fixed = {"steps": 5, "warmup": 1, "unprofiled": 4}
    after = judge.said(profile_in_turn(steps[1], models[1], **of_fixed, trials="none"))
    measured = {"losses": losses, "times": times, "before": before, "after": after}
    if run.keep is not None:
        write_json(run.keep.absolute() / f"{job['name']}.json", measured)
    return _judged(job["name"], measured, run)


def _judged(name: str, measured: Mapping[str, Any], run: Run) -> Record:
    """Return the verdict on a case, with what it is on."""
    case = load(name)[0]
    before, after, times = (measured[key] for key in ("before", "after", "times"))
    verdict = judge.judged(case, before, after, times)
    if run.question == "blind_set_3":
        verdict["tiers"] = {
            tier: judge.judged(case, judge.of_tier(before, tier), judge.of_tier(after, tier), times)
            for tier in _TIERS
        }
    return {**verdict, **measured}


def _give_back(run: Run) -> None:
    """Leave the memory of the device to the processes whose turn comes."""
    import torch

    gc.collect()
    if run.device != "cpu":
        torch.cuda.empty_cache()


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("verb", nargs="?", choices=("record", "judge"), default="record")
    add("folder", nargs="?", type=Path, help="judge: what --keep has filled")
    add("--keep", type=Path, help="keep what was measured and said here")


def answer(run: Run) -> Figures:
    figures, cases, verdicts = _asked(run, names())
    return {"summary": judge.score(cases, verdicts, run.device), **figures}


def third(run: Run) -> Figures:
    """Judge the third set, by all rules and by those of each tier."""
    figures, cases, verdicts = _asked(run, _SMALL if run.small else names(THIRD))
    of_tiers = {
        tier: {name: verdict["tiers"][tier] for name, verdict in verdicts.items()}
        for tier in _TIERS
    }
    return {"summary": _of_third(cases, verdicts, of_tiers, run.device), **figures}


def _of_third(
    cases: Mapping[str, Any],
    verdicts: Mapping[str, Record],
    of_tiers: Mapping[str, Mapping[str, Record]],
    device: str,
) -> dict[str, Any]:
    """Return how many cases of the third set were answered, by all rules and by those of a tier."""
    asked = ("place", "cause", "half", "right", "gone")
    summary = judge.counted(cases, dict(verdicts), device, asked)
    for tier, of_tier in of_tiers.items():
        found = judge.counted(cases, of_tier, device, asked)
        summary |= {f"{tier}: {what}": value for what, value in found.items()}
    return summary


def _asked(run: Run, chosen: Sequence[str]) -> tuple[Figures, dict[str, Any], dict[str, Record]]:
    """Return rows, records and what is known of the cases; the cases; the verdicts on them."""

    def known() -> dict[str, Any]:
        about = {name: load(name)[0] for name in chosen}
        if run.device == "cpu" and not (run.cases or run.listed):
            about = {name: case for name, case in about.items() if case.device == "any"}
        return {name: f"{title(name)} ({case.source}: {case.gain})" for name, case in about.items()}

    if run.verb == "judge":
        records = _again(run, known())
    else:
        handle = partial(_examine, run=run)
        records = each(run, known, handle, small=_SMALL, timeout_s=_TIMEOUT_S)
    cases = {name: load(name)[0] for name in records}
    verdicts = done(records)
    shown = ("step_ms", "gain_ms", "place", "cause", "half", "by", "promised_ms", "right", "gone")
    rows = [
        {"case": name, "source": cases[name].source, "of": folder_of(name)}
        | ({key: record[key] for key in shown} if name in verdicts else {"by": record["end"]})
        for name, record in records.items()
    ]
    about = {
        name: {"title": title(name), "of": folder_of(name), **asdict(case)}
        for name, case in cases.items()
    }
    lines = [line(name, about[name], record) for name, record in records.items()]
    return {"rows": rows, "lines": lines, "cases": records, "about": about}, cases, verdicts


_VERDICT = (
    "step_ms", "gain_ms", "gain_spread_ms", "nothing", "place", "cause", "half", "by",
    "promised_ms", "right", "gone",
)  # fmt: skip
_OF_TIER = ("place", "cause", "half", "by", "promised_ms", "right", "gone")


def line(name: str, about: Mapping[str, Any], record: Record) -> Record:
    """What is kept of a case: its verdict, and what the page of published cases shows.

    ``says`` is the finding that answers best, or the first sentence of the report, and ``at`` and
    ``line`` are its first place; of the tiers, the values are in the order of ``_OF_TIER``.
    """
    head = {"case": name, "of": about["of"], "source": about["source"], "end": record["end"]}
    if record["end"] != "done":
        return head
    before = record["before"]
    best = next((one for one in before["findings"] if one["rule"] == record["by"]), None)
    said = {"says": best["title"] if best else before["says"].partition(". ")[0]}
    if best:
        place = best["places"][0]
        said |= {"at": place["path"], "line": Path(place.get("line") or "").name or None}
    tiers = {
        tier: [verdict[key] for key in _OF_TIER]
        for tier, verdict in record.get("tiers", {}).items()
    }
    return {**head, **{key: record.get(key) for key in _VERDICT}, **said, **tiers}


def summary_of_lines(lines: Sequence[Mapping[str, Any]], device: str) -> dict[str, Any]:
    """Return how many of the kept cases were answered."""
    verdicts = {one["case"]: dict(one) for one in lines if not one.get("end")}
    return judge.score({name: load(name)[0] for name in verdicts}, verdicts, device)


def third_of_lines(lines: Sequence[Mapping[str, Any]], device: str) -> dict[str, Any]:
    """The same of the third set."""
    verdicts = {one["case"]: dict(one) for one in lines if not one.get("end")}
    of_tiers = {
        tier: {
            name: {**one, **dict(zip(_OF_TIER, one[tier], strict=True))}
            for name, one in verdicts.items()
        }
        for tier in _TIERS
    }
    return _of_third({name: load(name)[0] for name in verdicts}, verdicts, of_tiers, device)


def _again(run: Run, known: Mapping[str, Any]) -> dict[str, Record]:
    """Judge what ``--keep`` has kept."""
    if run.folder is None or not run.folder.is_dir():
        raise UsageError("judge needs the folder that --keep has filled")
    records = {}
    for name in run.choose(known):
        path = run.folder / f"{name}.json"
        if path.exists():
            measured = json.loads(path.read_text(encoding="utf-8"))
            records[name] = {**_judged(name, measured, run), "end": "done"}
    return records
