"""Are the parts of a step true? What a report says of a real step, against the clock.

    python -m benchmarks phase_truth --device cpu

Small models of transformers train on one core, where recording doubles many a step. The forward,
the backward and the rest are timed in steps without a profiler, before and after the one that is
reported. An error is a part's distance from that, as a share of the step. Beside it stands what a
reader of the recording alone would say, who makes all of the recorded parts shorter alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from functools import partial

from benchmarks.harness import Figures, Run, done, each
from benchmarks.workers import Job, Record, Stage

_STEPS = 30
_PARTS = ("forward", "backward", "rest")


def _examine(job: Job, stage: Stage, run: Run) -> Record:
    import torch

    import backspot
    from benchmarks.accuracy import architectures

    stage("build", {})
    model, forward = architectures.build(job["architecture"], run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    times: list[tuple[float, ...]] = []

    def step() -> None:
        begin = time.perf_counter()
        optimizer.zero_grad()
        called = time.perf_counter()
        loss = forward() * 1.0
        returned = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        whole = time.perf_counter() - begin
        there, back = returned - called, ended - returned
        times.append((there, back, whole - there - back))

    def timed() -> list[tuple[float, ...]]:
        times.clear()
        for _ in range(3 if run.small else _STEPS):
            step()
        return times[len(times) // 3 :]

    stage("time", {})
    timed()
    real = list(timed())
    report = backspot.profile(step, model, trials="none")
    real += timed()
    true = [statistics.median(part) for part in zip(*real, strict=True)]
    shares = [part / sum(true) for part in true]
    said = [_shares({one.name: getattr(one, name) for one in report.phases}) for name in _FIELDS]
    errors = [
        [round(one - share, 4) for one, share in zip(some, shares, strict=True)] for some in said
    ]
    return {
        "step_ms": round(sum(true) * 1e3, 2),
        "recorded_ms": round(report.recorded_step_ns / 1e6, 2),
        "shares": dict(zip(_PARTS, (round(share, 4) for share in shares), strict=True)),
        "errors": errors[0],
        "recorded_errors": errors[1],
    }


_FIELDS = ("wall_ns", "recorded_wall_ns")


def _shares(phases: dict[str, int]) -> list[float]:
    """Return the parts of a step; the loss is in the forward here."""
    whole = sum(phases.values())
    forward = (phases.get("forward", 0) + phases.get("loss", 0)) / whole
    backward = phases.get("backward", 0) / whole
    return [forward, backward, 1 - forward - backward]


def answer(run: Run) -> Figures:
    def known() -> dict[str, Job]:
        from benchmarks.accuracy.architectures import NAMES, SMALL

        # Those of transformers are tiny: a step of the others takes a second on a CPU.
        models = SMALL if run.small else [one for one in NAMES if one.startswith("hf-")]
        return {one: {"architecture": one} for one in models}

    def set_up(workers: int) -> None:
        from benchmarks.accuracy.steps import set_up as prepare

        prepare(run.device, 0.9 / max(1, workers))

    cases = each(run, known, partial(_examine, run=run), set_up=set_up)
    ended = done(cases).values()
    return {"cases": cases, "summary": {"models": len(ended), **_summary(ended)}}


def _summary(ended: Collection[Record]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, what in (("errors", "off"), ("recorded_errors", "off as recorded")):
        off = sorted(abs(one) for case in ended for one in case[key])
        if off:
            found[f"{what}, median"] = statistics.median(off)
            found[f"{what}, nine of ten within"] = off[int(0.9 * len(off))]
    return found
