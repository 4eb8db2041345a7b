"""Record some steps of a script that trains, and find what makes its backward slow.

A global hook of PyTorch counts the optimizer steps. When a report is due, the next iterations go
through these states, and each change of state is at the end of an iteration:

- *waiting*: steps are counted.
- *timing*: the steps are timed, with a synchronization after each of them.
- *prepared*: the models have labels and the profiler is ready; one step runs to get used to both.
- *recording*: the profiler records.

Then everything is removed, and the report is made while the script waits.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerAction

from backspot.errors import UsageError
from backspot.live import discovery, torch_internals
from backspot.live.instrumentation import put_labels
from backspot.live.recording import activities, prepared, recording, synchronize
from backspot.pipeline import locate_export
from backspot.results.report import Report
from backspot.trace.names import PROFILER_STEP

__all__ = ["Cycle", "Plan", "Recorded", "Recorder"]


@dataclass(frozen=True)
class Plan:
    """When to record.

    Attributes:
        warmup: how many steps to wait for, before the first report.
        steps: how many steps to time, and then to record.
        every: make a report each time after so many steps; ``None``: one report.
        ends: whether to end the script after the first report.
        depth: the deepest level that is labelled, as in ``instrument``.
    """

    warmup: int = 5
    steps: int = 10
    every: int | None = None
    ends: bool = False
    depth: int | None = None


@dataclass(frozen=True)
class Recorded:
    """A recording that is complete.

    Attributes:
        profiler: the profiler that recorded.
        first: the number of the first recorded step of the script.
        count: how many steps were recorded.
        times_ns: the times of steps without the profiler, in nanoseconds.
    """

    profiler: torch.profiler.profile
    first: int
    count: int
    times_ns: tuple[int, ...]

    def locate(self, named: str, trace: Path) -> Report:
        """Return the report, and write the labelled trace.

        Raises:
            NoBackwardError: If the steps had no backward.
        """
        return locate_export(
            self.profiler,
            named,
            warmed_up=True,
            real_steps=self.times_ns,
            trace=trace,
            force=True,
        )

    @property
    def last(self) -> int:
        """The number of the last recorded step."""
        return self.first + self.count - 1


class Cycle:
    """Which optimizer's step ends an iteration.

    A GAN's optimizers take turns. When an optimizer steps that has stepped before another one, a
    new iteration has begun, and the optimizer before it ends iterations from then on.
    """

    _PATIENCE = 64

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._closing: int | None = None
        self._since = 0

    def ends_with(self, optimizer: int) -> bool:
        """Return whether an iteration ends with this step.

        Args:
            optimizer: ``id`` of the optimizer that took the step.
        """
        if optimizer not in self._seen:
            self._seen.append(optimizer)
        elif optimizer != self._seen[-1]:
            self._closing = self._seen[-1]
            self._seen = [optimizer]
        self._since += 1
        if self._since > self._PATIENCE:  # the script has other optimizers now
            self._closing, self._seen = None, [optimizer]
        ends = optimizer == self._closing if self._closing else len(self._seen) == 1
        if ends:
            self._since = 0
        return ends


class State(Enum):
    """What a recorder does, as the docstring of this file says."""

    WAITING = "waiting"
    TIMING = "timing"
    PREPARED = "prepared"
    RECORDING = "recording"


class Recorder:
    """Observes the training of this process and records some of its steps.

    Args:
        plan: when to record.
        deliver: called with each recording and its number, from 1, after everything was removed.
        say: called with a sentence if something does not work.
        stepped: called after the first step, when the script has set itself up.

    Attributes:
        steps: how many steps the script has taken.
        reports: how many recordings were delivered.
    """

    def __init__(
        self,
        plan: Plan,
        deliver: Callable[[Recorded, int], None],
        say: Callable[[str], None],
        stepped: Callable[[], None],
    ) -> None:
        self.steps = 0
        self.reports = 0
        self._plan = plan
        self._stepped = stepped
        self._deliver = deliver
        self._say = say
        self._said: set[str] = set()
        self._process = os.getpid()
        self._due: int | None = plan.warmup
        self._state = State.WAITING
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._backwards = 0
        self._thread = 0
        self._times: list[int] = []
        self._since = 0
        self._reset()
        self._hook: Any = None
        self._backward = _Backward(self._after_backward)

    def _reset(self) -> None:
        self._state = State.WAITING
        self._cycle = Cycle()
        self._watch: discovery.CallWatch | None = None
        self._models: Mapping[str, torch.nn.Module] = {}
        self._labels = ExitStack()
        self._own_profiler: torch.profiler.profile | None = None
        self._mark: Any = None
        self._recorded = 0

    @property
    def is_child(self) -> bool:
        """Whether this process was forked from the one that is observed."""
        return os.getpid() != self._process

    @property
    def needed(self) -> int:
        """How many steps the first report needs."""
        return self._plan.warmup + 2 * self._plan.steps + 1

    # Steps ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start counting. Not while an optimizer takes a step."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._after_step)
            if not self._optimizers:
                self._backward.begin()

    def request(self, frame: FrameType | None) -> None:
        """Make a report as soon as possible; for a signal's handler.

        Args:
            frame: the frame that the signal interrupted.
        """
        if self.is_child:
            return
        if self._state is State.WAITING:
            self._due = self.steps
        if self._hook is None:
            outermost = None
            while frame is not None:
                if frame.f_code.co_filename == _OPTIMIZER_FILE:
                    outermost = frame
                frame = frame.f_back
            # PyTorch may be iterating over the hooks.
            _after_return(outermost, self.begin) if outermost else self.begin()

    def _end_counting(self) -> None:
        self._backward.end()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if torch_internals.is_dynamo_compiling():
            return
        if self.is_child:
            return
        try:
            self._backward.end()
            self._optimizers.add(optimizer)
            if self._cycle.ends_with(id(optimizer)):
                self._count()
                # PyTorch is iterating over the hooks: nothing can be registered here.
                if self._is_wanted() and not _after_return(sys._getframe(1), self._advance):
                    self._complain("a Python profiler is running, so no step is recorded")
        except Exception as error:
            self._give_up(error)

    def _after_backward(self) -> None:
        if self.is_child:
            return
        try:
            # Without an optimizer, each backward is a step. With one, its first step may be yet to
            # come. Looking for one takes time, so not after each backward.
            self._backwards += 1
            if self.steps == 0 and (
                self._backwards.bit_count() > 1 or discovery.other_optimizers(())
            ):
                return
            self._count()
            wanted = self._is_wanted()
        except Exception as error:
            self._give_up(error)
            return
        if wanted:
            self._advance()

    def _count(self) -> None:
        self.steps += 1
        if self.steps == 1:
            self._stepped()

    def _is_wanted(self) -> bool:
        """Whether something is to be done at the end of this step."""
        if self._state is State.WAITING:
            return self._due is not None and self.steps >= self._due
        return self._thread == threading.get_ident()

    # States --------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Go to the next state, at the end of a step."""
        try:
            if self._state is State.WAITING:
                self._begin_timing()
            elif self._state is State.TIMING:
                self._time()
                if len(self._times) >= self._plan.steps:
                    self._prepare()
            elif self._state is State.PREPARED:
                self._begin_recording()
            else:
                self._recorded += 1
                self._end_mark()
                if self._recorded < self._plan.steps:
                    self._begin_mark()
                else:
                    self._finish()
        except Exception as error:
            self._give_up(error)

    def _begin_timing(self) -> None:
        due = self._due or 0
        if self.steps < 4 * due and discovery.other_optimizers(self._optimizers):
            return  # such as a generator's, which waits for several steps of its critic
        if not self._is_free():
            return
        roots = discovery.outermost()
        trained = discovery.trained_by(self._optimizers, roots)
        updated = {id(root) for root in trained}
        self._watch = discovery.CallWatch(root for root in roots if id(root) not in updated)
        self._thread = threading.get_ident()
        self._times = []
        self._state = State.TIMING
        synchronize(())
        self._since = time.perf_counter_ns()

    def _is_free(self) -> bool:
        """Whether the script's own profilers leave room for a recording."""
        ahead = range(2 * self._plan.steps + 2)
        if not torch_internals.recording() and not any(
            _is_due(profiler, ahead) for profiler in discovery.profilers()
        ):
            return True
        self._complain(
            "the script uses torch.profiler itself: nothing is recorded until it is done "
            "(backspot.instrument and backspot.locate use its recording)"
        )
        return False

    def _time(self) -> None:
        synchronize(())
        now = time.perf_counter_ns()
        self._times.append(now - self._since)
        self._since = now

    def _prepare(self) -> None:
        roots = discovery.outermost()
        trained = discovery.trained_by(self._optimizers, roots)
        called = self._watch.end() if self._watch else []
        self._models = discovery.named(trained, called)
        for name, module in self._models.items():
            # The script may have labelled it, or a part of it that several models share.
            with suppress(UsageError):
                self._labels.enter_context(
                    put_labels(
                        module,
                        depth=self._plan.depth,
                        patterns=None,
                        name=name,
                        hooks="call",
                        markers=False,
                        lines=True,
                        compiled=False,  # its code was compiled before
                    )
                )
        self._own_profiler = torch.profiler.profile(activities=activities(self._models.values()))
        self._state = State.PREPARED
        self._labels.enter_context(prepared(self._own_profiler))

    def _begin_recording(self) -> None:
        assert self._own_profiler is not None  # noqa: S101 - for type checkers
        synchronize(self._models.values())
        self._state = State.RECORDING
        self._labels.enter_context(recording(self._own_profiler))
        self._begin_mark()

    def _begin_mark(self) -> None:
        self._mark = torch_internals.new_range(f"{PROFILER_STEP}{self._recorded}")
        self._mark.__enter__()

    def _end_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _finish(self) -> None:
        """Remove everything, deliver the recording, and wait for the next one."""
        profiler, times, count = self._own_profiler, tuple(self._times), self._recorded
        first = self.steps - count + 1
        self._stop()
        if self._plan.every is None:
            self._due = None
            self._end_counting()
        else:
            while self._due is not None and self._due <= self.steps:
                self._due += self._plan.every
        assert profiler is not None  # noqa: S101 - for type checkers
        self.reports += 1
        self._deliver(Recorded(profiler, first, count, times), self.reports)
        if self._plan.ends:
            self._end_counting()
            raise SystemExit(0)

    def _stop(self) -> None:
        """End what is under way and remove all of it."""
        if self._watch is not None:
            self._watch.end()
        if self._state is State.PREPARED and self._own_profiler is not None:
            with recording(self._own_profiler):  # a prepared profiler can only be ended in this way
                pass
        if self._state is State.RECORDING:
            synchronize(self._models.values())
        mark, labels = self._mark, self._labels
        self._reset()
        labels.close()
        del mark  # a step that was cut short has no end in the trace; nothing records now

    def end(self) -> None:
        """Remove everything, because the script has ended; deliver what was recorded."""
        if self.is_child:
            return
        profiler, times, count = self._own_profiler, tuple(self._times), self._recorded
        first = self.steps - count + 1
        with suppress(Exception):
            self._stop()
        self._end_counting()
        if profiler is not None and count:
            self.reports += 1
            self._deliver(Recorded(profiler, first, count, times), self.reports)

    def _complain(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)

    def _give_up(self, error: Exception) -> None:
        """Leave the script alone: no report is worth a failed training."""
        if os.environ.get("BACKSPOT_DEBUG"):
            import traceback

            traceback.print_exception(error)
        with suppress(Exception):
            self._stop()
        self._due = None
        self._complain(f"no report: {type(error).__name__}: {error}")


def _is_due(profiler: torch.profiler.profile, ahead: range) -> bool:
    """Whether a profiler of the script may record in one of the next steps."""
    inner = getattr(profiler, "profiler", None)
    done = getattr(inner, "kineto_results", None) is not None
    begun = inner is not None or getattr(profiler, "step_rec_fn", None) is not None
    actions = [profiler.schedule(profiler.step_num + step) for step in ahead]
    if all(action == ProfilerAction.RECORD for action in actions):  # it has no schedule
        return begun and not done
    return begun and any(action != ProfilerAction.NONE for action in actions)


_OPTIMIZER_FILE = sys.modules["torch.optim.optimizer"].__file__ or ""


def _after_return(frame: FrameType, action: Callable[[], None]) -> bool:
    """Call a function when a running frame returns.

    Returns:
        Whether that is possible: not while Python's own profiler is in use.
    """
    if sys.getprofile() is not None:
        return False

    def on_event(current: FrameType, event: str, _: object) -> None:
        if event == "return" and current is frame:
            sys.setprofile(None)
            action()

    sys.setprofile(on_event)
    return True


class _Backward:
    """Counts the calls of ``Tensor.backward``, for scripts that update parameters themselves.

    The method is replaced until the first optimizer step, or until the counting ends.

    Args:
        after: called after each backward.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self._after = after
        self._original: Any = None
        self._replaced: Any = None

    def begin(self) -> None:
        """Replace the method."""
        original = torch.Tensor.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if self._original is not None:
                self._after()

        self._original = original
        self._replaced = torch.Tensor.backward = backward

    def end(self) -> None:
        """Put the method back, unless other code has replaced it too."""
        if self._original is not None and torch.Tensor.backward is self._replaced:
            torch.Tensor.backward = self._original
        self._original = None


torch_internals.keep_from_dynamo(Recorder._after_step)
