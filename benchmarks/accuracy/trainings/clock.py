"""A training's own clock: the mean step of a long run, and parts of it in a run of their own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

DEVICE = os.environ.get("STEP_TRUTH_DEVICE", "cpu")
_ON_GPU = DEVICE == "cuda"
_TIMES_PARTS = os.environ.get("STEP_TRUTH_PARTS") == "1"
_SHARE = float(os.environ.get("STEP_TRUTH_SHARE", "1"))


def sized(cpu: int, cuda: int) -> int:
    """Return a size for the device, so that a step takes milliseconds on either."""
    return cuda if _ON_GPU else cpu


def _now() -> float:
    if _ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """Times the steps from the end of the ``first`` one to the end of the last one.

    It waits for the device at these two ends alone. What comes once, before the first step ends or
    within ``once``, does not count. It also notes each step by the host's clock, and whether a
    profiler recorded it.

    Args:
        steps: how many steps the training takes, a multiple of ``period``.
        first: how many of them come before those that count: start, compilation, full queues.
        period: after how many steps work recurs: as much of it counts as is in whole periods.
    """

    def __init__(self, steps: int, *, first: int = 20, period: int = 1) -> None:
        self._period = period
        self._first = -(-first // period) * period
        self.steps = max(round(steps * _SHARE) // period * period, self._first + period)
        self._ended = 0
        self._began = self._once_began = self._left_out = 0.0
        self._left_out_steps = 0
        self._parts: dict[str, float] = {}
        self._by_step: list[dict[str, Any]] = []
        self._last_end = time.perf_counter()

    @property
    def is_over(self) -> bool:
        return self._ended >= self.steps

    def step(self) -> None:
        """Note that a step has ended."""
        self._ended += 1
        comes_once = bool(self._once_began)
        if comes_once:
            self._left_out += _now() - self._once_began
            self._left_out_steps += 1
            self._once_began = 0.0
        if self._ended == self._first:
            self._parts = dict.fromkeys(self._parts, 0.0)
            self._left_out = self._left_out_steps = 0
            self._began = _now()
        self._note(comes_once)
        if self._ended == self.steps:
            self._write(_now() - self._left_out)

    def _note(self, comes_once: bool) -> None:
        end = time.perf_counter()
        self._by_step.append(
            {
                "seconds": end - self._last_end,
                "is_recorded": torch.autograd._profiler_enabled(),
                "comes_once": comes_once,
                "parts_so_far": dict(self._parts),
            }
        )
        self._last_end = end

    def once(self) -> None:
        """Leave out the step that begins now: something happens in it that comes once."""
        self._once_began = _now()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step, in a run that is for parts."""
        return self._timed(name) if _TIMES_PARTS else nullcontext()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = _now()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + _now() - began

    def batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return the batches of one epoch; the time in which the loader is at work is ``data``."""
        return self._timed_batches(loader) if _TIMES_PARTS else loader

    def _timed_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        with self.part("data"):
            batches = iter(loader)
        while True:
            with self.part("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _write(self, ended: float) -> None:
        count = self.steps - self._first - self._left_out_steps
        seconds = ended - self._began
        said = {
            "step_ms": seconds * 1e3 / count,
            "steps": count,
            "parts": {name: part / seconds for name, part in self._parts.items()},
            "period": self._period,
            "first": self._first,
            "by_step": self._by_step,
        }
        if "STEP_TRUTH_OUT" in os.environ:
            Path(os.environ["STEP_TRUTH_OUT"]).write_text(json.dumps(said), encoding="utf-8")
        else:
            del said["by_step"]
            print(said)
