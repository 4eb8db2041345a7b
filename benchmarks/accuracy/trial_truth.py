"""Is a trial true? What it says a step saves, against real steps with the remedy, in turn.

    python -m benchmarks trial_truth
    OMP_NUM_THREADS=1 python -m benchmarks trial_truth --device cpu

For each pair of a model and a remedy: the training as it is, one more for each way to write it, and
steps of all of them in a random order, round by round. What a step saves really is the median of
the differences in the rounds. The trial sees the training as it is, as ``profile`` does.

On a CPU with one thread, the time of the thread counts, on more threads the clock. On a GPU a
sample is several steps, until the device has done its work.

A truth is clear where the remedy saves at least 1% of the step and its quartiles say so by a sign
test at 95%, or certainly less than 1%. ``wrong`` are trials that help where the step does not, or
the other way around. A run that was ended goes on where it was.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import Figures, Run, each
from benchmarks.workers import Job, Record, Stage

_WRONG = {("helps", "does not help"), ("does not help", "helps")}


def answer(run: Run) -> Figures:
    """Measure each pair."""

    def pairs() -> Mapping[str, Any]:
        from benchmarks.accuracy.trial_models import PAIRS

        return {
            name: f"{pair.rule}: {', '.join(pair.variants)}"
            for name, pair in PAIRS.items()
            if run.device in pair.devices
        }

    small = ("adamw_small", "attention_causal")
    records = each(run, pairs, _measured, small=small, fresh=False, context=vars(run.context))
    rows = [
        {"case": name, **row} for name, record in records.items() for row in record.get("rows", [])
    ]
    summary = summary_of_lines(rows)
    return {"cases": records, "rows": rows, "summary": summary, "wrong": summary["wrong sign"] > 0}


def summary_of_lines(rows: list[dict[str, Any]], _: str = "") -> dict[str, Any]:
    """Return how often trials decide, and how far they are off."""
    clear = [row for row in rows if row["truth"] != "undecided"]
    decided = [row for row in clear if row["trial"] in ("helps", "does not help")]
    errors = [abs(row["error_percent"]) for row in rows if row["error_percent"] is not None]
    return {
        "variants": len(rows),
        "with a clear truth": len(clear),
        "of these, decided by the trial": len(decided),
        "right sign": sum(row["trial"] == row["truth"] for row in decided),
        "wrong sign": sum((row["truth"], row["trial"]) in _WRONG for row in decided),
        "median error, % of the step": statistics.median(errors) if errors else None,
        "longest trial, s": max((row["seconds"] for row in rows), default=0.0),
    }


def _measured(job: Job, stage: Stage) -> Record:
    import torch

    from backspot.testing import forget_compilations, verdict_of
    from benchmarks.accuracy.trial_models import AS_IT_IS, PAIRS
    from benchmarks.models import Context

    context = Context(**job["context"])
    pair = PAIRS[job["name"]]
    # The trial comes first: it leaves compiled code alone, which another way may have.
    stage("the trial", {})
    built = {AS_IT_IS: pair.build(context, AS_IT_IS)}
    now = _in_turn({AS_IT_IS: built[AS_IT_IS].step}, context, 9)
    begin = time.perf_counter()
    tried = _tried(pair.rule, built[AS_IT_IS], round(statistics.median(now[AS_IT_IS])))
    seconds = time.perf_counter() - begin
    stage("real steps", {})
    failed: dict[str, str] = {}
    for way in pair.variants:
        try:
            one = pair.build(context, way)
            for _ in range(4):
                one.step()
            built[way] = one
        except Exception as error:  # a way that cannot run here: the trial should say so
            failed[way] = f"{type(error).__name__}: {error}"[:120]
    samples = _in_turn({way: one.step for way, one in built.items()}, context, 81)
    step_ns = statistics.median(samples[AS_IT_IS])
    said = {one.name: one for one in tried.variants}
    rows = []
    for way in pair.variants:
        row: dict[str, Any] = {"variant": way, "step_ms": step_ns / 1e6}
        one = said.get(way)
        verdict = one.verdict if one else tried.why_not or "not tried"
        row |= {"trial": verdict, "says_ms": one.saves_ns / 1e6 if one else None}
        if way in samples:
            saves = _saved(samples[AS_IT_IS], samples[way])
            row |= {"truth": verdict_of(saves, round(step_ns)), "saves_ms": saves[0] / 1e6}
            measured = one and one.verdict != "fails" and one.note != "no time was left"
            error = (one.saves_ns - saves[0]) / step_ns if one and measured else None
            row["error_percent"] = None if error is None else 100 * error
        else:
            row |= {"truth": "fails", "saves_ms": None, "error_percent": None}
        rows.append({**row, "seconds": seconds, "note": one.note if one else failed.get(way, "")})
    del built
    forget_compilations()
    if context.device != "cpu":
        torch.cuda.empty_cache()
    return {"rows": rows, "why_not": tried.why_not, "rounds": tried.rounds, "failed": failed}


def _tried(rule: str, built: Any, step_ns: int) -> Any:
    """What ``profile`` says of the remedy, also where its rule finds nothing or is in preview."""
    from dataclasses import replace

    import backspot
    from backspot.results import Finding, Place, Tried
    from backspot.testing import Live, chains_of, changed, with_trials

    report = backspot.profile(
        built.step, built.model, steps=5, warmup=2, unprofiled=4, stacks=False, trials="none"
    )
    found = [one for one in report.findings if one.rule == rule]
    place = Place("(clipping)" if rule == "clipping" else "(optimizer)", "", 1, 0)
    finding = found[0] if found else Finding(rule, rule, "", "Do it.", 0, (place,), 1)
    times = {"step_ns": step_ns, "recorded_step_ns": step_ns}
    report = changed(report, findings=(replace(finding, tier="stable"),), **times)
    live = Live({"": built.model}, built.optimizers)
    live = chains_of(built.step, live)
    found = with_trials(report, live, "operators").findings
    tried = next(one.tried for one in found if one.rule == rule and one.remedy)
    return tried or Tried("", why_not="no remedy has something to try")


def _in_turn(
    steps: Mapping[str, Callable[[], None]], context: Any, rounds: int
) -> dict[str, list[float]]:
    """Return the times of a step in nanoseconds, of each way in the same rounds."""
    import torch

    on_gpu = context.device != "cpu"
    alone = not on_gpu and torch.get_num_threads() == 1
    now = time.thread_time_ns if alone else time.perf_counter_ns
    at_once = 4 if on_gpu else 1
    order, shuffle = list(steps), random.Random(1)
    samples: dict[str, list[float]] = {way: [] for way in steps}
    until = time.monotonic() + context.pick(2 if on_gpu else 12, 1)
    for number in range(context.pick(rounds, 7)):
        if number >= 9 and time.monotonic() > until:
            break
        shuffle.shuffle(order)
        for way in order:
            if on_gpu:
                torch.cuda.synchronize()
            begin = now()
            for _ in range(at_once):
                steps[way]()
            if on_gpu:
                torch.cuda.synchronize()
            samples[way].append((now() - begin) / at_once)
    return samples


def _saved(now: list[float], new: list[float]) -> tuple[int, int, int]:
    """The median of the differences and what bounds it at 95%, as a trial has it."""
    from backspot.testing import interval

    return interval([a - b for a, b in zip(now, new, strict=True)])
