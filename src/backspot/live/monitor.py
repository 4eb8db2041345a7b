"""``Monitor``: watch the steps of a long training, and say when they become slower.

A log of all steps notes them, without a profiler and without a hook on a module. The monitor tells
the log where a step ends.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from backspot.analysis.slowdowns import Alarm, Slowdowns
from backspot.analysis.training import BACKWARD, DATA, MARKS, OPTIMIZER, TOTAL, Marks
from backspot.checks import check_whole, is_number
from backspot.errors import UsageError
from backspot.formatting import counted, quoted
from backspot.interrupts import pass_on
from backspot.live.free_memory import resident
from backspot.live.modules import unwrap
from backspot.live.optimizers import ids_updated_by
from backspot.live.running import Cycle, after_return
from backspot.live.step_log import StepLog
from backspot.live.torch_internals import autograd, dynamo
from backspot.live.torch_internals.engine import watch_backward
from backspot.live.torch_internals.lookup import Turn
from backspot.live.torch_internals.process import hook_steps, outermost_step
from backspot.render.training import training_facts, training_line
from backspot.results.training import Training

_logger = logging.getLogger("backspot")


class Monitor:
    """Watches each step of a model's training, and says when a part of it becomes slower.

    A step ends where the optimizer of the model has taken its step; with several optimizers in
    turn, where the last of them has. Its time is the clock's: waiting for data, forward and all
    else, backward, optimizer. That needs no profiler, no hook on a module, and no wait for a
    device.

    Also a context manager, which ends with ``remove``.

    Args:
        model: the model, also within DDP or ``torch.compile``. It is not kept alive.
        every: after how many steps ``on_sample`` is called. Default 100.
        slower_by: the slowdown that raises an alarm, as a share. ``None``: no alarm. Default 0.2.
        on_sample: called with the step and a dict for a logger: ``step_ms``, ``data_ms``,
            ``forward_ms``, ``backward_ms`` and ``optimizer_ms``, the means in milliseconds since
            the last call, and ``memory_mb`` of this process. Default: none.
        on_alarm: called with each ``Alarm``. ``None`` (default) logs a warning.

    Attributes:
        step: How many steps of the model have ended.
        alarms: The alarms so far.

    Raises:
        UsageError: If an argument is invalid.

    Example:
        >>> import backspot, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with backspot.Monitor(model) as monitor:
        ...     for _ in range(8):
        ...         model(torch.randn(32, 64)).square().mean().backward()
        ...         optimizer.step()
        >>> monitor.step, monitor.alarms
        (8, [])
    """

    __module__ = "backspot"

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        every: int = 100,
        slower_by: float | None = 0.2,
        on_sample: Callable[[int, dict[str, float]], object] | None = None,
        on_alarm: Callable[[Alarm], object] | None = None,
    ) -> None:
        _check(model, every, slower_by)
        self.step = 0
        self.alarms: list[Alarm] = []
        self._every = every
        self._on_sample, self._on_alarm = on_sample, on_alarm or _log_alarm
        self._slowdowns = None if slower_by is None else Slowdowns(slower_by)
        self._sample = _Sample()
        self._model = weakref.ref(unwrap(model))
        self._optimizers: weakref.WeakKeyDictionary[Any, Hashable] = weakref.WeakKeyDictionary()
        """What each optimizer updates of the model; empty if nothing."""
        self._cycles: defaultdict[int, Cycle] = defaultdict(Cycle)  # by thread
        self._steps_inside = self._steps_outside = False
        """Whether an optimizer has stepped within this backward, and whether one has outside."""
        self._changing = Turn()
        self._process = os.getpid()
        self._has_failed = False
        self._is_removed = False
        self._log = StepLog()
        self._watching = ExitStack()
        self._log.begin()
        self._watching.callback(self._log.end)
        self._watching.callback(hook_steps(self._after_step))
        self._watching.callback(watch_backward(_before_backward, self._after_backward))
        finalizer = weakref.finalize(unwrap(model), self.remove)
        finalizer.atexit = False
        self._watching.callback(finalizer.detach)

    @property
    def training(self) -> Training | None:
        """The account of all steps so far; ``None`` before the first whole step."""
        return self._log.training()

    def remove(self) -> None:
        """Stop, and leave nothing behind. The account stays. A second call does nothing."""
        self._is_removed = True
        # PyTorch may be iterating over the hooks.
        stepping = outermost_step(sys._getframe())
        if stepping is None or not after_return(stepping, self._watching.close):
            self._watching.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Monitor: step {self.step:,}, {counted(len(self.alarms), 'alarm')}>"

    def __str__(self) -> str:
        """Return what the steps took so far, and the alarms, in sentences."""
        training = self.training
        if training is None:
            return f"{self!r}: no whole step yet"
        sentences = [training_line(training), *training_facts(training)]
        return "\n".join([*sentences, *(f"! {alarm}" for alarm in self.alarms)])

    # Where a step ends ---------------------------------------------------------------------------

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._is_removed or dynamo.is_dynamo_compiling():
            return
        try:
            updated = self._optimizers.get(optimizer)
            if updated is None:
                updated = self._optimizers[optimizer] = self._updated_by(optimizer)
            if not updated:
                return
            if autograd.in_backward():
                # The end of the backward is that of the step, unless another one steps later.
                self._steps_inside = not self._steps_outside
                return
            self._steps_inside, self._steps_outside = False, True
            # One within another's step is a part of that, as in SAM.
            if self._log.is_in_optimizer:
                return
            if self._cycles[threading.get_ident()].ends_with(updated, self._is_alone):
                self._end_step()
        except Exception as error:
            pass_on(error)
            self._give_up()

    def _after_backward(self, _: bool) -> None:
        if self._is_removed or not self._steps_inside:
            return
        try:
            self._steps_inside = False
            self._end_step()
        except Exception as error:
            pass_on(error)
            self._give_up()

    def _updated_by(self, optimizer: torch.optim.Optimizer) -> Hashable:
        model = self._model()
        ids = ids_updated_by([optimizer])
        if model is None:
            return frozenset()
        return frozenset(ids.intersection(map(id, model.parameters())))

    def _is_alone(self) -> bool:
        return sum(map(bool, [*self._optimizers.values()])) == 1

    def _give_up(self) -> None:
        _logger.exception("backspot.Monitor stops after an error")
        self.remove()

    # What is told --------------------------------------------------------------------------------

    def _end_step(self) -> None:
        times = self._log.step_ended()
        alarms: Sequence[Alarm] = ()
        with self._changing:  # several threads may train the model
            self.step += 1
            step = self.step
            if times is not None:
                if not times[MARKS] & Marks.COMPILED:
                    self._sample.add(times)
                if self._slowdowns is not None:
                    alarms = self._slowdowns.add(step, times)
            self.alarms += alarms
            sample = None
            if step % self._every == 0:
                sample, self._sample = self._sample, _Sample()
        for alarm in alarms:
            self._tell(self._on_alarm, alarm)
        if sample is not None and sample.steps and self._on_sample is not None:
            self._tell(self._on_sample, step, sample.means())

    def _tell(self, heard: Callable[..., object], *arguments: object) -> None:
        """Call a function of the user's, whose errors do not end the training."""
        if os.getpid() != self._process:  # a copy, such as a worker
            return
        try:
            heard(*arguments)
        except Exception as error:
            pass_on(error)
            if not self._has_failed:
                self._has_failed = True
                _logger.exception("a function that backspot.Monitor calls has failed")


class _Sample:
    """Sums over the steps since the last sample, in nanoseconds."""

    __slots__ = ("backward", "data", "optimizer", "steps", "total")

    def __init__(self) -> None:
        self.steps = self.total = self.data = self.backward = self.optimizer = 0

    def add(self, times: Sequence[int]) -> None:
        """Add a step, as ``StepTimes.add`` takes it."""
        self.steps += 1
        self.total += times[TOTAL]
        self.data += times[DATA]
        self.backward += times[BACKWARD]
        self.optimizer += times[OPTIMIZER]

    def means(self) -> dict[str, float]:
        """Return what a logger takes."""
        forward = self.total - self.data - self.backward - self.optimizer
        sums = {
            "step_ms": self.total,
            "data_ms": self.data,
            "forward_ms": forward,
            "backward_ms": self.backward,
            "optimizer_ms": self.optimizer,
        }
        means = {name: sum_ns / self.steps / 1e6 for name, sum_ns in sums.items()}
        memory = resident()
        return means | ({"memory_mb": memory / 1e6} if memory else {})


def _before_backward(_: bool) -> None:
    """Do nothing: only where a backward ends is asked for."""


def _log_alarm(alarm: Alarm) -> None:
    _logger.warning("%s", alarm)


def _check(model: object, every: object, slower_by: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"Monitor() takes a torch.nn.Module, not {type(model).__name__}")
    check_whole("every", every, 1)
    if slower_by is not None and not (is_number(slower_by) and slower_by):
        raise UsageError(
            f"slower_by={quoted(slower_by)}: give a share above 0, such as 0.2, or None"
        )


dynamo.keep_from_dynamo(Monitor._after_step)
