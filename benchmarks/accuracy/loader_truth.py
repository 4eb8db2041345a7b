"""What does a module save where workers load the batches, and what does their wait cost?

    python -m benchmarks loader_truth            # two cores
    python -m benchmarks loader_truth --jobs 6   # 16 cores

A small model trains on one thread, on batches of 0, 1, 2 and 8 workers that are never late, always
late, or late in bursts. What a report says that the step saves without half of the layers stands
beside the same training without them. What it says that the wait costs stands beside a training
with the batches at hand. Trainings are timed by the wall clock, plain, before and after the
profiled one; a step is a mean, as workers deliver in turn. An error is a share of the step.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from benchmarks.harness import Figures, Run, done, each
from benchmarks.workers import Job, Record, Stage

_WORKERS = (0, 1, 2, 8)
_PACES = {"never late": 0.3, "always late": 1.6, "in bursts": 1.6}
"""How long the workers take together for a batch, of the step without a wait."""
_WIDTH, _LAYERS, _STEPS = 384, 6, 40
_GOOD = 0.25


class _Rows:
    """Batches that take so many seconds each; in bursts, every fourth one takes all the time."""

    def __init__(self, rows: int, seconds: float, every: int) -> None:
        import torch

        self.batch, self.seconds, self.every = torch.randn(rows, _WIDTH), seconds, every

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        if index % self.every == 0:
            time.sleep(self.seconds * self.every)
        return self.batch.clone()


class _Training:
    """A model with its steps, with and without the layers in ``big``."""

    def __init__(self, rows: int) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = nn.ModuleDict(
            {
                "first": nn.Linear(_WIDTH, _WIDTH),
                "big": nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]),
                "rest": nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]),
            }
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batch = torch.randn(rows, _WIDTH)

    def step(self, x: Any, *, whole: bool = True) -> None:
        hidden = self.model["first"](x)
        if whole:
            hidden = self.model["big"](hidden)
        loss = self.model["rest"](hidden).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def takes(self, loader: Any, steps: int, *, whole: bool) -> float:
        """Return the mean step in seconds, of batches of a loader, or of one at hand."""
        batches = iter(loader) if loader is not None else None
        half = steps // 2
        for number in range(steps):
            if number == half:
                begin = time.perf_counter()
            self.step(self.batch if batches is None else next(batches), whole=whole)
        return (time.perf_counter() - begin) / (steps - half)


def _examine(job: Job, stage: Stage, run: Run) -> Record:
    from torch.utils.data import DataLoader

    import backspot

    stage("build", {})
    training = _Training(32 if run.small else 384)
    workers, pace = job["workers"], job["pace"]
    steps = 8 if run.small else _STEPS
    compute = training.takes(None, steps, whole=True)
    seconds = compute * _PACES[pace] * max(1, workers)
    rows = _Rows(len(training.batch), seconds, 4 if pace == "in bursts" else 1)
    loader: Any = DataLoader(rows, batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    plain: dict[str, list[float]] = {"whole": [], "without": [], "at hand": []}

    def timed() -> None:
        plain["whole"].append(training.takes(loader, steps, whole=True))
        plain["without"].append(training.takes(loader, steps, whole=False))
        plain["at hand"].append(training.takes(None, steps, whole=True))

    stage("time", {})
    timed()
    stage("profile", {})
    report = backspot.profile(training.step, training.model, data=loader, trials="none")
    stage("time again", {})
    timed()
    whole, without, at_hand = (statistics.fmean(plain[one]) * 1e3 for one in plain)
    saves = None if report.not_replayed else report.what_if({"big": 0.0}).saves_ns
    waiting = next((one for one in report.findings if one.rule == "waiting-for-data"), None)
    price = waiting.saves.ns / 1e6 if waiting and waiting.saves else 0.0
    said = None if saves is None else round(saves / 1e6, 2)
    return {
        "step_ms": round(whole, 2),
        "reported_ms": round((report.unprofiled_step_ns or 0) / 1e6, 2),
        "module": {"true_ms": round(whole - without, 2), "said_ms": said},
        "wait": {"true_ms": round(whole - at_hand, 2), "said_ms": round(price, 2)},
        "module_error": None if said is None else round(abs(said - whole + without) / whole, 3),
        "wait_error": round(abs(price - whole + at_hand) / whole, 3),
        "refused": report.not_replayed,
    }


def answer(run: Run) -> Figures:
    def known() -> dict[str, Job]:
        found: dict[str, Job] = {}
        for workers in (1,) if run.small else _WORKERS:
            for pace in _PACES:
                found[f"{workers} workers {pace}"] = {"workers": workers, "pace": pace}
        return found

    cases = each(run, known, partial(_examine, run=run))
    ended = list(done(cases).values())
    told = [case for case in ended if case["module_error"] is not None]
    near = [case["module_error"] <= _GOOD * _of(case, "module") for case in told]
    return {
        "cases": cases,
        "rows": [_row(name, case) for name, case in done(cases).items()],
        "summary": {
            "trainings": len(ended),
            "savings of a module within a quarter": f"{sum(near)} of {len(ended)}",
            "error of a module, median": _median(told, "module_error"),
            "error of a wait, median": _median(ended, "wait_error"),
        },
    }


def _row(name: str, case: Record) -> dict[str, Any]:
    module, wait = case["module"], case["wait"]
    said = "refused" if module["said_ms"] is None else f"{module['said_ms']:.1f}"
    return {
        "training": name,
        "step ms": f"{case['step_ms']:.1f}",
        "half of the layers: true ms": f"{module['true_ms']:.1f}",
        "said ms": said,
        "error": "" if module["said_ms"] is None else f"{case['module_error']:.1%}",
        "wait: true ms": f"{wait['true_ms']:.1f}",
        "wait: said ms": f"{wait['said_ms']:.1f}",
    }


def _of(case: Record, what: str) -> float:
    """Return what is true as a share of the step, and at least a fifth: less is next to nothing."""
    return max(0.2, float(case[what]["true_ms"]) / float(case["step_ms"]))


def _median(cases: list[Record], key: str) -> float | None:
    return statistics.median(float(case[key]) for case in cases) if cases else None
