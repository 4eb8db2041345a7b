"""What do the notes of all steps cost? A loop with the log on and off, in turns, in one process.

    OMP_NUM_THREADS=1 python -m benchmarks step_log

Steps take about a millisecond, without a loader, with one in the process, and with one of two
workers. ``hooks`` is PyTorch's own part: a hook before and one after each step of an optimizer, and
an engine that calls the other one, all of which do nothing. ``empty`` calls functions that do
nothing where the log takes its stamps; ``log`` is the log alone; ``observer`` is all that `backspot
run` leaves in a training after its report. Blocks of steps of each variant follow one another in a
new random order in each round. A block is the lower quartile of its steps, as other processes only
make steps longer, and what a variant adds is the median difference to the plain block of its round,
with a 95% interval from resampling the rounds. At last, very small steps show whether memory grows
with their number.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from backspot.live import loaders
from backspot.live.free_memory import resident
from backspot.live.recorder import Plan
from backspot.live.running import Observer
from backspot.live.step_log import StepLog
from backspot.live.torch_internals.engine import watch_backward
from backspot.live.torch_internals.process import hook_step_begins, hook_steps
from benchmarks.harness import Figures, Run
from benchmarks.measuring import Budget, spread

_WIDTH, _BATCH = 128, 32
_RESAMPLES = 4000
_GOAL_US = 3.0
_BEFORE_S = 0.15
"""For how long a variant is at work before its steps are timed: an observer records one first."""


class _Samples(torch.utils.data.Dataset[Tensor]):
    """More equal batches than a loop asks for."""

    def __init__(self) -> None:
        self._batch = torch.randn(_BATCH, _WIDTH)

    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, _: int) -> Tensor:
        return self._batch


def _batches(workers: int | None) -> Iterator[Tensor]:
    if workers is None:
        return itertools.repeat(torch.randn(_BATCH, _WIDTH))
    loader = torch.utils.data.DataLoader(_Samples(), batch_size=None, num_workers=workers)
    return iter(loader)


def _loop(batches: Iterator[Tensor], layers: int, width: int = _WIDTH) -> Callable[[int], None]:
    """Return what takes so many steps."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def take(steps: int) -> None:
        for _ in range(steps):
            loss = model(next(batches)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return take


# Variants ----------------------------------------------------------------------------------------


@contextmanager
def _log() -> Iterator[None]:
    log = StepLog()
    with ExitStack() as stack:
        stack.enter_context(log)
        stack.callback(hook_steps(lambda *_: log.step_ended()))
        yield


@contextmanager
def _observer() -> Iterator[None]:
    plan = Plan(warmup=1, steps=1, compiled=False, waits=False)
    observer = Observer(plan, lambda _: None, print, lambda *_: None)
    observer.begin()
    try:
        yield
    finally:
        observer.recorder.end()


@contextmanager
def _empty() -> Iterator[None]:
    def nothing(*_: object) -> None:
        pass

    with ExitStack() as stack:
        for remove in (
            hook_step_begins(nothing),
            hook_steps(nothing),
            watch_backward(nothing, nothing),
            hook_steps(lambda *_: None),
            loaders.watch(nothing, nothing),
        ):
            stack.callback(remove)
        yield


@contextmanager
def _hooks() -> Iterator[None]:
    def nothing(*_: object) -> None:
        pass

    engine: Any = torch.autograd.Variable._execution_engine
    run = engine.run_backward

    class Engine(type(engine)):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

    before = register_optimizer_step_pre_hook(nothing)
    after = register_optimizer_step_post_hook(nothing)
    torch.autograd.Variable._execution_engine = Engine()
    try:
        yield
    finally:
        torch.autograd.Variable._execution_engine = engine
        before.remove()
        after.remove()


VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "plain": nullcontext,
    "hooks": _hooks,
    "empty": _empty,
    "log": _log,
    "observer": _observer,
}
LOADERS = {"no loader": None, "loader in the process": 0, "loader with 2 workers": 2}


# Measurements ------------------------------------------------------------------------------------


def _measured(workers: int | None, run: Any, seconds: float) -> list[dict[str, Any]]:
    take = _loop(_batches(workers), layers=2 if run.small else 8)
    take(20)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    order, budget = random.Random(0), Budget(seconds)
    for number in range(run.rounds):
        if number >= 3 and not budget.left:
            break
        for name in order.sample([*VARIANTS], len(VARIANTS)):
            with VARIANTS[name]():
                until = time.perf_counter() + (0 if run.small else _BEFORE_S)
                take(10)  # the observer records one of these
                while time.perf_counter() < until:
                    take(10)
                steps = []
                for _ in range(run.steps):
                    begin = time.perf_counter_ns()
                    take(1)
                    steps.append((time.perf_counter_ns() - begin) / 1e3)
                times[name].append(float(np.percentile(steps, 25)))
    plain = times.pop("plain")
    return [
        {
            "variant": name,
            "step_us": spread(plain)["median"],
            **_added(taken, plain),
            "rounds": len(plain),
        }
        for name, taken in times.items()
    ]


def _added(taken: list[float], plain: list[float]) -> dict[str, float]:
    """What is added to a step, in microseconds, with a 95% interval."""
    differences = np.asarray(taken) - np.asarray(plain)
    draw = np.random.default_rng(0).integers(0, len(plain), (_RESAMPLES, len(plain)))
    low, high = np.percentile(np.median(differences[draw], axis=1), [2.5, 97.5])
    return {"added_us": float(np.median(differences)), "low": float(low), "high": float(high)}


def _memory(run: Any) -> dict[str, Any]:
    """What the process holds after a tenth of many small steps, and after all of them."""
    width = 4
    take = _loop(itertools.repeat(torch.randn(1, width)), layers=1, width=width)
    log = StepLog()
    with log:
        unhook = hook_steps(lambda *_: log.step_ended())
        take(run.many // 10)
        first = resident()
        take(run.many - run.many // 10)
        last = resident()
        unhook()
    training = log.training()
    noted = training.steps if training else 0
    return {"steps": noted, "grown_kib": (last - first) // 1024}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, help="at most (default: 400)")
    add("--steps", type=int, help="of a block (default: 100)")
    add("--many", type=int, help="small steps for the memory (default: a million)")


def answer(run: Run) -> Figures:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    full = {"rounds": 400, "steps": 100, "many": 1_000_000}
    small = {"rounds": 3, "steps": 3, "many": 500}
    for name, value in (small if run.small else full).items():
        if getattr(run, name) is None:
            setattr(run, name, value)
    rows = [
        {"loader": loader, **row}
        for loader, workers in LOADERS.items()
        for row in _measured(workers, run, run.seconds / 6)
    ]
    summary = {f"{row['variant']}, {row['loader']}: added µs": row["added_us"] for row in rows}
    memory = _memory(run)
    summary |= {
        f"grown KiB in the last nine tenths of {memory['steps']:,} steps": memory["grown_kib"],
        "goal: added µs at most": _GOAL_US,
    }
    return {"rows": rows, "memory": memory, "summary": summary}
