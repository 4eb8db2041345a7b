"""Loops of Python planted at random: does the list of lines name the one that was planted?

    python -m benchmarks planted_python --device cpu
    python -m benchmarks planted_python --device cuda --jobs 2

Each trial draws an architecture, a place of the step (the forward of a module, the loss, a hook,
clipping, the optimizer, metrics, between steps, collation and more) and a kind of work, which is
written to a file of its own at a random line. The planted work takes 30% of the step, and at least
1.8 times what the longest other line takes, so that it is the longest in truth. A hit is a first
line of ``report.host`` that is one of those that run most often, as Python's own tracing counts
them (before PyTorch 2.15 stacks know functions alone: then the function that contains it). The time
of all lines of the file is compared with the share that the work took of the timed steps, and so
is what the rule ``python-code`` promises: without the work, the step takes so much less.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Figures, Run, done, each
from benchmarks.measuring import profile_default
from benchmarks.workers import Job, Record, Stage

_SHARE = 0.3
_OVER_LONGEST = 1.8
_WITHIN = 0.15
"""By which share of itself the time of the planted lines may be off."""


class Training:
    """A model and its steps, with places where work can be planted."""

    def __init__(self, architecture: str, device: str, seed: int) -> None:
        import torch

        from benchmarks.accuracy import architectures, steps

        self.seed, self.number = steps.seed, seed
        self.model, self.forward = architectures.build(architecture, device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.SGD(self.parameters, lr=1e-6)
        self.planted: Callable[[], object] = lambda: None
        self.at = ""
        self.history: list[float] = []

    def step(self, _: object = None) -> None:
        """One step as people write it."""
        self.seed(self.number)
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.clip()
        self.optimizer.step()
        if self.at == "metrics":
            self.history.append(float(loss.detach()))
            self.planted()
        self.here("between")

    def here(self, place: str) -> None:
        if self.at == place:
            self.planted()

    def loss(self) -> Any:
        loss = self.forward()
        self.here("loss")
        return loss * 1.0

    def clip(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.here("clipping")

    def collate(self, rows: Sequence[int]) -> list[int]:
        self.here("collation")
        return list(rows)

    def data(self) -> Any:
        import torch

        return torch.utils.data.DataLoader(range(4096), batch_size=2, collate_fn=self.collate)

    # Places that are made when they are drawn ----------------------------------------------------

    def plant(self, place: str, draw: random.Random) -> str:
        """Make the place ready to run what is planted; return it in words."""
        self.at = place
        make = getattr(self, f"_in_{place}", None)
        return f"{place} of {make(draw)}" if make else place

    def _module(self, draw: random.Random) -> tuple[str, Any]:
        """Draw a module that is called once."""
        calls: Counter[str] = Counter()
        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
            for name, module in self.model.named_modules()
        ]
        self.step()
        for hook in hooks:
            hook.remove()
        name = draw.choice([name for name, count in sorted(calls.items()) if count == 1 and name])
        return name, self.model.get_submodule(name)

    def _in_forward(self, draw: random.Random) -> str:
        name, module = self._module(draw)
        forward = module.forward

        def slower(*args: Any, **kwargs: Any) -> Any:
            self.planted()
            return forward(*args, **kwargs)

        module.forward = slower
        return name

    def _in_forward_hook(self, draw: random.Random) -> str:
        name, module = self._module(draw)
        module.register_forward_hook(lambda *_: self.here("forward_hook"))
        return name

    def _in_gradient_hook(self, draw: random.Random) -> str:
        names = [
            name for name, one in self.model.named_parameters()
            if one.requires_grad and one.grad is not None
        ]  # fmt: skip
        name = draw.choice(names)
        self.model.get_parameter(name).register_hook(lambda _: self.here("gradient_hook"))
        return name

    def _in_optimizer_hook(self, _: random.Random) -> str:
        self.optimizer.register_step_pre_hook(lambda *_: self.here("optimizer_hook"))
        return "SGD"

    def _in_optimizer_wrapper(self, _: random.Random) -> str:
        inner, training = self.optimizer, self

        class Wrapper:
            def zero_grad(self) -> None:
                inner.zero_grad()

            def step(self) -> None:
                training.here("optimizer_wrapper")
                inner.step()

        self.optimizer = Wrapper()
        return "SGD"

    def _in_scheduler(self, _: random.Random) -> str:
        import torch

        def rate(_: int) -> float:
            self.here("scheduler")
            return 1.0

        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return "LambdaLR"

    def _in_function(self, draw: random.Random) -> str:
        import torch

        training = self

        class Planted(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                training.here("function")
                return gradient

        name, module = self._module(draw)

        def hook(_: Any, __: Any, output: Any) -> Any:
            return Planted.apply(output) if isinstance(output, torch.Tensor) else output

        module.register_forward_hook(hook)
        return f"the backward of {name}"


PLACES = (
    "forward", "loss", "gradient_hook", "clipping", "between", "metrics", "optimizer_wrapper",
    "collation", "forward_hook", "function", "optimizer_hook", "scheduler",
)  # fmt: skip


def _examine(job: Job, stage: Stage, run: Run) -> Record:
    from benchmarks.accuracy.python_work import hot_lines, written

    draw = random.Random(job["seed"])
    stage("build", {})
    training = Training(job["architecture"], run.device, job["seed"])
    folder = Path(tempfile.mkdtemp())
    sys.path.insert(0, str(folder))
    work, file = written(folder, job["kind"], draw)
    training.step()
    gc.disable()  # pauses of the collector are no time of a line
    record: Record = {"architecture": job["architecture"], "kind": job["kind"]}
    ran = 0

    def counted() -> None:
        nonlocal ran
        ran += 1

    training.planted, place = counted, ""
    for _ in range(20):  # not every module is on the way of the backward
        place, ran = training.plant(job["place"], draw), 0
        _profiled(training, 1, timed=0, stacks=False)
        if ran and ran % 2 == 0:
            break
    calls = ran // 2  # a step to warm up, and one that is recorded
    record |= {"place": place}
    stage("without", record)
    training.planted = lambda: None
    # What else keeps the machine busy changes the time of a thread less than that of the clock.
    clock = time.perf_counter_ns if run.device == "cuda" else time.thread_time_ns

    def timed_ns(do: Callable[..., object], *given: int) -> int:
        begin = clock()
        do(*given)
        return clock() - begin

    step_ns = statistics.median(timed_ns(training.step) for _ in range(5))
    natural = _profiled(training, 2, timed=4)
    whole = natural.unprofiled_step_ns or natural.step_ns
    longest = max((one.idle_ns for one in natural.host), default=0) / whole
    wanted = max(_SHARE, _OVER_LONGEST * longest) * step_ns
    size, took = 8, 0
    while took < 2_000_000:
        size *= 2
        took = min(timed_ns(work, size) for _ in range(3))
    size = max(1, round(size * wanted / took / max(1, calls)))
    lines, functions = hot_lines(work, min(size, 50))
    spent, begun = [0], [clock()]

    def planted() -> None:
        spent[-1] += timed_ns(work, size)

    def step(batch: object) -> None:
        training.step(batch)
        spent.append(0)  # what is planted in the collation runs before the step that it is for
        begun.append(clock())

    training.planted = planted
    stage("with", record)
    steps, timed, warmup = job["steps"], 6, 3
    report = _profiled(training, steps, timed=timed, step=step)
    # A step is warmed up after the first half of those that are timed.
    first, second = warmup - 1, warmup + timed // 2 + steps
    real = [start + number for start in (first, second) for number in range(timed // 2)]
    share = statistics.median(spent[one] / (begun[one + 1] - begun[one]) for one in real)
    real_ms = (report.unprofiled_step_ns or 0) / 1e6
    true_ms = share * real_ms
    ours = [one for one in report.host if Path(one.file).name == file]
    found_ms = sum(one.wall_ns for one in ours) / 1e6
    first = report.host[0] if report.host else None
    hit = first is not None and Path(first.file).name == file
    if hit and first.line == functions.get(first.function):
        hit = True  # stacks may know the function alone
    elif hit:
        hit = any(first.line <= line <= first.last_line for line in lines)
    rule = next((one for one in report.findings if one.rule == "python-code"), None)
    named = rule is not None and file in rule.seen
    saves = rule.saves.ns / 1e6 if rule is not None and rule.saves else 0.0
    return record | {
        "hit": hit,
        "first": f"{first.place} {first.function}()" if first else "",
        "lines": [min(lines), max(lines)],
        "phase": first.phase if first else "",
        "step_ms": round(real_ms, 2),
        "true_ms": round(true_ms, 3),
        "line_ms": round(found_ms, 3),
        "error": round(found_ms / true_ms - 1, 3),
        "found": named,
        "saves_ms": round(saves, 3),
        "saves_error": round((saves - true_ms) / real_ms, 3),
    }


def _profiled(
    training: Training, steps: int, *, timed: int, stacks: bool = True, step: Any = None
) -> Any:
    import backspot

    return backspot.profile(
        step or training.step, training.model, data=training.data(), steps=steps,
        warmup=3 if timed else 1, unprofiled=timed, stacks=stacks, trials="none",
    )  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, help="how many (default: 30; with --small 1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")


def answer(run: Run) -> Figures:
    def known() -> dict[str, Job]:
        import timm  # noqa: F401 - every trial needs it

        from benchmarks.accuracy.architectures import NAMES, SMALL
        from benchmarks.accuracy.python_work import KINDS

        # Those of transformers are tiny: a step of the others takes a second on a CPU.
        models = list(SMALL) if run.small else [one for one in NAMES if one.startswith("hf-")]
        jobs = {}
        for number in range(run.first, run.first + (run.trials or (1 if run.small else 30))):
            draw = random.Random(number)
            job = {"seed": number, "steps": 3 if run.small else profile_default("steps")}
            job |= {"architecture": draw.choice(models), "kind": draw.choice(KINDS)}
            jobs[f"{number:03}"] = {**job, "place": PLACES[number % len(PLACES)]}
        return jobs

    def set_up(workers: int) -> None:
        from benchmarks.accuracy.steps import set_up as prepare

        prepare(run.device, 0.9 / max(1, workers))

    cases = each(run, known, lambda job, stage: _examine(job, stage, run), set_up=set_up)
    ended = done(cases)
    errors = sorted(abs(case["error"]) for case in ended.values())
    promised = [abs(case["saves_error"]) for case in ended.values() if case["found"]]
    hits = sum(case["hit"] for case in ended.values())
    summary = {
        "hits": f"{hits} of {len(ended)}",
        "time within 15%": sum(error <= _WITHIN for error in errors),
        "error of the time, median and largest": [statistics.median(errors or [0]), errors[-1:]],
        "python-code names it": len(promised),
        "promise within 3% of the step": sum(one <= 0.03 for one in promised),
    }
    return {"cases": cases, "summary": summary, "wrong": not run.small and hits < len(ended)}
