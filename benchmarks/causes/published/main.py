"""Does it name what people published? Slow training steps rebuilt, before and after their fix.

python -m benchmarks published_causes --device cuda --jobs 2
python -m benchmarks published_causes --device cpu --cases gae_loop,confusion_matrix
python docs/make_published.py       # the page, from the figures of a GPU

Each case has a process of its own. Its two steps are timed without the profiler, in turn, and then
profiled: the slow one by ``backspot.profile`` with its defaults, so that what it advises is tried,
and the fixed one without trials, as only what is left matters there. The processes take turns on
the device. On a CPU, cases that need a GPU run only if they are named.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.causes.published import folder_of, judge, load, names, title
from benchmarks.harness import (
    RESULTS,
    Figures,
    Run,
    done,
    each,
    profile_in_turn,
    turn,
)
from benchmarks.measuring import interleaved
from benchmarks.workers import Job, Record, Stage

_SMALL = ("gae_loop", "zeroed_gradients")
_TIMEOUT_S = 120.0


def _examine(job: Job, stage: Stage, run: Run) -> Record:
    """Time and profile a case, slow and fixed."""
    import torch

    import backspot
    from benchmarks.causes.case import settings

    case, build = load(job["name"])
    if run.device == "cpu":
        torch.set_num_threads(1)
    else:  # what the first profile of a process takes, beside the turns of others
        tiny, ones = torch.nn.Linear(8, 8, device=run.device), torch.ones(8, 8, device=run.device)
        how = {"steps": 1, "warmup": 1, "unprofiled": 0}
        backspot.profile(lambda: tiny(ones).sum().backward(), tiny, trials="none", **how)
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
    verdict = judge.judged(case, before, after, times)
    return {**verdict, "losses": losses, "times": times, "before": before, "after": after}


def _give_back(run: Run) -> None:
    """Leave the memory of the device to the processes whose turn comes."""
    import torch

    gc.collect()
    if run.device != "cpu":
        torch.cuda.empty_cache()


def answer(run: Run) -> Figures:
    def known() -> dict[str, Any]:
        about = {name: load(name)[0] for name in names()}
        if run.device == "cpu" and not (run.cases or run.listed):
            about = {name: case for name, case in about.items() if case.device == "any"}
        return {name: f"{title(name)} ({case.source}: {case.gain})" for name, case in about.items()}

    if run.cases and run.out is not None and run.out.parent == RESULTS:
        run.out = None  # in part
    records = each(run, known, partial(_examine, run=run), small=_SMALL, timeout_s=_TIMEOUT_S)
    cases = {name: load(name)[0] for name in records}
    verdicts = done(records)
    shown = ("step_ms", "gain_ms", "place", "cause", "by", "promised_ms", "right", "gone")
    rows = [
        {"case": name, "source": cases[name].source, "of": folder_of(name)}
        | ({key: record[key] for key in shown} if name in verdicts else {"by": record["end"]})
        for name, record in records.items()
    ]
    summary = judge.score(cases, verdicts, run.device)
    about = {
        name: {"title": title(name), "of": folder_of(name), **asdict(case)}
        for name, case in cases.items()
    }
    return {"summary": summary, "rows": rows, "cases": records, "about": about}
