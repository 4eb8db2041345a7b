"""Is a plan true? Each rung and the whole ladder, against the setting made in the real training.

    python -m benchmarks plan_truth
    python -m benchmarks plan_truth --device cpu --jobs 2
    python -m benchmarks plan_truth --seconds 540       # again, until the exit code is not 3

For each training of ``plan_models.py``: the plan of ``profile(trials="plan")``. Then one more
training for each rung, with the settings that it was tried on, made as a script has them, and steps
of all trainings in turn, loss, AdamW and ``zero_grad`` included. ``error`` is what the plan said of
the step less the real step, each in percent of its own step as it is, as the speed of a machine can
change between the two; ``in_ms`` is the same error by the times themselves. A real step's percent
is the median of those of rounds, in each of which it and the one as it is come soon after each
other; ``unsure_percent`` is half of the interval that holds it at 95%, ``beyond_percent`` what of
the error is outside of that, and ``drift_percent`` by how much longer the step as it is takes there
than it did when it was recorded. A rung ``differs`` where the real step does by 2% of the step
without it; its sign is right where the plan's saving has that of the real one. Of another batch,
the time of as many samples counts. On a CPU, one thread runs, and its own time counts.

Beside that: how long planning took and by how much more than it may, the memory of the GPU at most
while it planned beside that of a step, and what stays with the process. ``same`` says whether the
training went on bit for bit: its state after some more steps against a twin that took as many steps
and was never looked at, where two such twins agree.

A run that its time limit ends goes on where it was when the same command is started again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Figures, Run, each, write_json
from benchmarks.measuring import interleaved
from benchmarks.workers import Job, Record, Stage

if TYPE_CHECKING:
    import backspot
    from backspot.results import Rung
    from benchmarks.accuracy.plan_models import Setting, Training

_DIFFERS = 2.0  # percent of the step without the setting
_WRONG = 5.0  # percent of the step as it is
_MORE_STEPS = 5


def options(parser: argparse.ArgumentParser) -> None:
    """Add how long a plan and the real steps may take, and where to keep what is known so far."""
    parser.add_argument("--plan", type=int, help="seconds (default: those of profile; small: 2)")
    parser.add_argument("--real", type=int, help="seconds of real steps (default: 20; CPU: 40)")
    parser.add_argument("--keep", type=Path, help="a folder for each case as far as it is known")


def answer(run: Run) -> Figures:
    """Plan each training, follow the plan, and compare."""

    def known() -> Mapping[str, Any]:
        from benchmarks.accuracy.plan_models import CASES

        return {name: one.about for name, one in CASES.items() if run.device in one.devices}

    asked: dict[str, Any] = {
        "context": vars(run.context),
        "plan": run.plan or (2 if run.small else None),
        "real": run.real or run.context.pick(40 if run.device == "cpu" else 20, 1),
        "keep": str(run.keep) if run.keep else "",
    }
    small = ("deep_and_narrow",)
    records = each(run, known, _measured, small=small, timeout_s=420, **asked)
    rows = [
        {"case": name, **row} for name, record in records.items() for row in record.get("rows", [])
    ]
    lines = [*rows, *(_whole(name, one) for name, one in records.items() if "took_s" in one)]
    figures = {"cases": records, "rows": rows, "lines": lines}
    summary = summary_of_lines(lines)
    return {**figures, "summary": summary, "wrong": summary["changed"] > 0}


_WHOLE = "(the plan)"


def _whole(name: str, record: Record) -> dict[str, Any]:
    """What is kept of a plan as a whole, beside its rungs."""
    told = (
        "said_ms", "real_ms", "planned_ms", "real_planned_ms", "whole_error_percent", "compiling",
        "took_s", "overrun_s", "memory_gb", "stays_gb", "same", "why_not",
    )  # fmt: skip
    return {"case": name, "setting": _WHOLE, **{key: record.get(key) for key in told}}


def summary_of_lines(lines: Sequence[Mapping[str, Any]], _: str = "") -> dict[str, Any]:
    """Return how far the plans are off, and what they cost."""
    rows, cases = ([one for one in lines if (one["setting"] == _WHOLE) == w] for w in (False, True))
    real = [row for row in rows if row.get("error_percent") is not None]
    differ = [row for row in real if row["differs"]]
    errors, in_ms, beyond, drift = (
        # Of what was measured long ago not all is known.
        [abs(row.get(key) or 0.0) for row in real]
        for key in ("error_percent", "in_ms", "beyond_percent", "drift_percent")
    )
    last = [
        abs(one["whole_error_percent"]) for one in cases if one["whole_error_percent"] is not None
    ]
    return {
        "models": len(cases),
        "plans refused": sum(bool(one["why_not"]) for one in cases),
        "rungs with a real step": len(real),
        "of these, differ by 2%": len(differ),
        "right sign": sum(row["right_sign"] for row in differ),
        "median error, % of the step": statistics.median(errors) if errors else None,
        "worst error, % of the step": max(errors, default=None),
        "errors over 5%": sum(error > _WRONG for error in errors),
        "of these, beyond what the real step is known to": sum(
            error > _WRONG and outside > 0 for error, outside in zip(errors, beyond, strict=True)
        ),
        "worst error beyond that, % of the step": max(beyond, default=None),
        "median drift, %": _median(drift),
        "worst drift, %": max(drift, default=None),
        "median error in ms, % of the step": statistics.median(in_ms) if in_ms else None,
        "worst error in ms, % of the step": max(in_ms, default=None),
        "worst error of a whole plan, %": max(last, default=None),
        "most of a plan that compiling takes": max(
            (one.get("compiling") or 0.0 for one in cases), default=None
        ),
        "median gain of a whole plan": _median(
            one["real_ms"] / one["real_planned_ms"] for one in cases if one["real_planned_ms"]
        ),
        "longest planning, s": max((one["took_s"] for one in cases), default=None),
        "worst overrun, s": max((one["overrun_s"] for one in cases), default=None),
        "most memory beside a step, GB": max((one["memory_gb"] for one in cases), default=None),
        "most memory that stays, GB": max((one["stays_gb"] for one in cases), default=None),
        "bit for bit": sum(one["same"] is True for one in cases),
        "cannot be told": sum(one["same"] is None for one in cases),
        "changed": sum(one["same"] is False for one in cases),
    }


def _median(values: Any) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _measured(job: Job, stage: Stage) -> Record:
    import torch

    from benchmarks.accuracy.plan_models import CASES, CannotMakeError, Setting, Training
    from benchmarks.models import Context

    context, case = Context(**job["context"]), CASES[job["name"]]
    if context.device == "cpu":
        torch.set_num_threads(1)
    found: Record = {}

    def enter(name: str) -> None:
        stage(name, found)
        if job["keep"]:
            write_json(Path(job["keep"]) / f"{job['name']}.json", {"stage": name, **found})

    enter("the plan")
    training = Training(context, case)
    usual = _memory_of_steps(training)
    report = _planned(training, job["plan"])
    plan = report.plan
    assert plan is not None
    most, stays = (used - before for used, before in zip(_memory(context), usual, strict=True))
    for _ in range(_MORE_STEPS):
        training.step()
    found |= {
        "why_not": plan.why_not,
        "took_s": plan.took_ns / 1e9,
        "compiling": plan.compiling_ns / max(1, plan.took_ns),
        "overrun_s": max(0.0, (plan.took_ns - plan.allowed_ns) / 1e9),
        "memory_gb": most / 1e9,
        "stays_gb": stays / 1e9,
        "next_limit": plan.next_limit,
        "rungs": [asdict(one) for one in plan.rungs],
    }
    enter("twins")
    found["same"] = _is_same(training)  # this draws random numbers: nothing trains on after it
    del training
    enter("real steps")
    axes = {rung.setting: rung.axis for rung in plan.rungs}
    made: dict[frozenset[str], Training] = {frozenset(): Training(context, case)}
    not_made: dict[frozenset[str], str] = {}
    wanted = [names for rung in plan.rungs if rung.step_ns for names in _both(rung)]
    for names in dict.fromkeys(wanted):
        if names in made:
            continue
        try:
            settings = [Setting(axes[name], name) for name in sorted(names)]
            made[names] = Training(context, case, _in_order(settings))
            made[names].step()
        except CannotMakeError as error:
            not_made[names] = f"{error}: not made here"
            made.pop(names, None)
        except Exception as error:  # the plan should have said that it cannot run
            not_made[names] = f"{type(error).__name__}: {error}"[:120]
            made.pop(names, None)
    times = interleaved(
        [one.step for one in made.values()],
        context.device,
        rounds=context.pick(41, 3),
        inner=context.pick(3, 1),
        seconds=job["real"],
        # One thread's own time, as other programs on a machine move its clock.
        clock=time.thread_time if context.device == "cpu" else time.perf_counter,
    )
    real = {
        names: statistics.median(some) / one.times
        for (names, one), some in zip(made.items(), times, strict=True)
    }
    shares = {
        names: _share(some, times[0], one.times)
        for (names, one), some in zip(made.items(), times, strict=True)
    }
    as_it_is = real[frozenset()]
    said_ms = plan.step_ns / 1e6
    rows = [_row(rung, real, shares, not_made, as_it_is, said_ms) for rung in plan.rungs]
    whole = real.get(frozenset(rung.setting for rung in plan.ladder))
    error = None
    if whole is not None and plan.step_ns:
        share, _, _ = shares[frozenset(rung.setting for rung in plan.ladder)]
        error = 100 * (plan.planned_ns / plan.step_ns - share)
    found["real"] = [
        {"settings": sorted(names), "ms": some, "batches": one.times}
        | ({} if context.device == "cpu" else _apart(one.step))
        for (names, one), some in zip(made.items(), times, strict=True)
    ]
    enter("all")
    return found | {
        "said_ms": said_ms,
        "real_ms": as_it_is,
        "planned_ms": plan.planned_ns / 1e6,
        "real_planned_ms": whole,
        "whole_error_percent": error,
        "rows": rows,
    }


def _apart(step: Callable[[], None]) -> Record:
    """What host and device need for a real step, in milliseconds, by a few of them."""
    import torch

    found: list[tuple[float, float]] = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        torch.cuda._sleep(round(2.5e9 * host))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        step()
        last.record()
        torch.cuda.synchronize()
        found.append((1e3 * host, first.elapsed_time(last)))
    host_ms, device_ms = (statistics.median(some) for some in zip(*found[1:], strict=True))
    return {"host_ms": host_ms, "device_ms": device_ms}


# Rows --------------------------------------------------------------------------------------------


def _both(rung: Rung) -> tuple[frozenset[str], frozenset[str]]:
    """The settings without a rung, and with it."""
    return frozenset(rung.on), frozenset((*rung.on, rung.setting))


def _share(times: Sequence[float], as_it_is: Sequence[float], steps: int) -> Sequence[float]:
    """What of the step as it is another one takes, by rounds, and the interval that holds it."""
    from backspot.testing import interval

    return interval([a / b / steps for a, b in zip(times, as_it_is, strict=True)])


def _in_order(settings: list[Setting]) -> list[Setting]:
    """Compile what all else has made."""
    return sorted(settings, key=lambda one: one.axis == "compile")


def _row(
    rung: Rung,
    real: Mapping[frozenset[str], float],
    shares: Mapping[frozenset[str], Sequence[float]],
    not_made: Mapping[Any, str],
    as_it_is: float,
    said_as_it_is: float,
) -> dict[str, Any]:
    without, with_it = _both(rung)
    row: dict[str, Any] = {
        "setting": rung.setting,
        "on": "+".join(rung.on),
        "verdict": rung.verdict,
        "kept": rung.kept,
        "before_ms": real.get(without),
        "said_ms": rung.step_ns / 1e6 if rung.step_ns else None,
        "real_ms": real.get(with_it),
        "error_percent": None,
        "unsure_percent": None,
        "beyond_percent": None,
        "drift_percent": None,
        "in_ms": None,
        "differs": None,
        "right_sign": None,
        "limit": "device" if rung.device_ns > rung.host_ns else "host" if rung.host_ns else None,
        "compile_s": rung.compile_ns / 1e9 or None,
        "note": not_made.get(with_it) or rung.note,
    }
    if not rung.step_ns or without not in real or with_it not in real:
        return row
    share, low, high = shares[with_it]
    saves = shares[without][0] - share
    differs = 100 * abs(saves) >= _DIFFERS * shares[without][0]
    said, found = rung.step_ns / 1e6, real[with_it]
    of_step = said / said_as_it_is
    errors = {
        "error_percent": 100 * (of_step - share),
        "unsure_percent": 50 * (high - low) if math.isfinite(high) else None,
        "beyond_percent": 100 * max(0.0, of_step - high, low - of_step),
        "drift_percent": 100 * (as_it_is / said_as_it_is - 1),
        "in_ms": 100 * (said - found) / as_it_is,
    }
    right = (rung.saves_ns > 0) == (saves > 0) if differs else None
    return {**row, **errors, "differs": differs, "right_sign": right}


def _planned(training: Training, seconds: int | None) -> backspot.Report:
    """The report of ``profile``, or with so many seconds for its plan."""
    import backspot

    def profiled(trials: Any) -> backspot.Report:
        return backspot.profile(
            training.step, training.model, steps=5, warmup=3, unprofiled=8, trials=trials
        )

    if seconds is None:
        return profiled("plan")
    from backspot.testing import Living, Planning

    live = Living({"": training.model}, [training.optimizer], step=training.step)
    return Planning(seconds).after(profiled("none"), live)


def _memory_of_steps(training: Training) -> tuple[int, int]:
    """What steps allocate at most, and what PyTorch holds of the GPU then; counts anew."""
    import torch

    for _ in range(3):
        training.step()
    used = _memory(training.context)
    if training.context.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    return used


def _memory(context: Any) -> tuple[int, int]:
    import torch

    if context.device == "cpu":
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()


def _is_same(training: Training) -> bool | None:
    """Whether a training is what it would be; ``None`` where two twins are not the same."""
    prints = set()
    for _ in range(2):
        twin = type(training)(training.context, training.case)
        for _ in range(training.steps):
            twin.step()
        prints.add(twin.fingerprint())
    return None if len(prints) > 1 else prints == {training.fingerprint()}
