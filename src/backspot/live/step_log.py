"""The log of all steps of a training: four boundaries of each, without a profiler.

Stamps are taken where a loader begins or ends an epoch, is asked for a batch and gives it, where
the outermost backward begins and ends, and where an optimizer's step begins and ends. What lies
between is the forward. Nothing waits for a device, and no module has a hook. Code that Dynamo
traces sees no stamp.

Steps are left out while Backspot does something to them, and afterwards until each loader's queue
has found its level: the batches that its workers prepared meanwhile come without a wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from backspot.analysis.training import Marks, StepTimes
from backspot.interrupts import contained
from backspot.live import loaders
from backspot.live.free_memory import resident
from backspot.live.loaders import Fetch
from backspot.live.torch_internals import dynamo
from backspot.live.torch_internals.engine import watch_backward
from backspot.live.torch_internals.lookup import Location, Watch
from backspot.live.torch_internals.process import hook_step_begins, hook_steps
from backspot.results.training import Apart, LoaderUse, Training

_now = time.perf_counter_ns
_here = threading.get_ident
_is_grad_enabled = torch.is_grad_enabled
_MEMORY_EVERY_NS = 1_000_000_000
_CALLED_EVERY_NS = 60_000_000_000
_UNSETTLED_STEPS = 3
"""Steps after an interruption in which the host gets ahead of a device again."""
_FEW_STEPS = 8
"""With fewer steps than these, those before a queue has found its level count instead."""
_MOST_LOADERS = 64
"""Loaders that are known one by one, as a script may make a new one for each epoch or step."""
_LONGEST_SETTLING = 128
"""Steps after which a queue is taken for level, however large it is."""

try:
    # Threads of one process share the clock of the processor that they ran on, each its own part.
    _thread_time: Callable[[], int] = time.thread_time_ns
except AttributeError:  # not every system has it
    _thread_time = _now


class QueueLevel:
    """Whether the queues of loaders have as many batches ready as they will have in the long run.

    Workers fill a queue while a slow first step runs, or while the training stands still. The
    batches that it holds then say nothing about how fast the workers are. A queue has found its
    level once a batch was late, or after twice as many batches as it holds, or after one epoch.
    """

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._left: dict[int, int] = {}
        """How many batches to ask each loader for until its queue has found its level."""
        self._newest: tuple[int, int] | None = None
        self._most = 0
        """After how many batches any queue has found its level, however long an epoch is."""
        self._steps = 0

    def reset(self) -> None:
        """Begin again, as the training was interrupted and the workers were not."""
        self._asked.clear()
        self._left.clear()
        self._steps = 0
        if self._newest is not None:
            loader, enough = self._newest
            self._left[loader] = enough

    def note(self, fetch: Fetch) -> None:
        """Note a batch that a loader was asked for."""
        if not fetch.queue:
            return
        loader = fetch.loader
        enough = min(2 * fetch.queue, fetch.epoch or 2 * fetch.queue)
        self._newest = loader, enough
        self._most = max(self._most, 2 * fetch.queue)
        if loader not in self._asked and len(self._asked) >= _MOST_LOADERS:
            self._asked.clear()
            self._left.clear()
        count_asked = self._asked[loader] = self._asked.get(loader, 0) + 1
        # The first batches of an epoch are late, as all workers begin with it.
        if fetch.ready is False and count_asked > fetch.workers + 1:
            self._left[loader] = 0
        elif self._left.get(loader, enough):
            self._left[loader] = max(0, enough - count_asked)

    def step_ended(self) -> None:
        """Note the end of a step."""
        self._steps += 1

    @property
    def found(self) -> bool:
        """Whether all queues that were used since have found their level."""
        return self._steps >= _LONGEST_SETTLING or not any(self._left.values())

    @property
    def left(self) -> int:
        """After how many more steps they have at most, whatever the data is."""
        return max(0, min(self._most, _LONGEST_SETTLING) - self._steps)

    @property
    def is_steady(self) -> bool:
        """Whether the host is also as far ahead of a device as it will be in the long run."""
        ahead = torch.cuda.is_initialized()
        return self.found and self._steps > _UNSETTLED_STEPS * ahead


_COMPILED = int(Marks.COMPILED)


class _Thread:
    """What is known of the steps that one thread takes."""

    __slots__ = (
        "backward",
        "backward_began",
        "ended",
        "fetched",
        "has_closures",
        "interrupted_ns",
        "interrupted_steps",
        "level",
        "loaders",
        "marks",
        "optimizer",
        "optimizer_began",
        "optimizers",
        "ran",
        "settled",
        "settling",
        "times",
        "untrained",
        "used",
    )  # fmt: skip

    def __init__(self) -> None:
        self.times = StepTimes()
        self.settling = StepTimes()
        """The steps before a queue has found its level, for a training that has no others."""
        self.level = QueueLevel()
        self.settled = False
        self.ended = 0
        """When the last step ended; 0 before the first."""
        self.ran = 0
        self.backward = self.optimizer = 0
        self.backward_began = self.optimizer_began = 0
        self.optimizers = 0
        """How many optimizers are at work, one within the other."""
        self.marks = 0
        self.has_closures = False
        self.interrupted_ns = self.interrupted_steps = 0
        self.loaders: dict[int, list[int]] = {}  # workers, batches, late, waited, behind, steps
        self.used: dict[int, int] = {}
        """For each loader of this step, nanoseconds in it."""
        self.fetched: set[int] = set()
        """Loaders that gave a batch since the last backward."""
        self.untrained: set[int] = set()
        """Loaders of this step whose batches were not trained on: without gradients, or none came
        into a backward before the loader went on."""

    def begin_step(self, now: int, ran: int) -> None:
        """Begin a step at a time, when the thread has run for so long."""
        self.backward = self.optimizer = self.marks = 0
        # What an exception has left open.
        self.backward_began = self.optimizer_began = self.optimizers = 0
        if self.used:
            self.used.clear()
            self.fetched.clear()
            self.untrained.clear()
        self.ran = ran
        self.ended = now

    def put_loaders_together(self) -> None:
        """If many loaders are known, make one of those of few batches, for each number of workers.

        A signal's handler may ask for the account meanwhile.
        """
        if len(self.loaders) < _MOST_LOADERS:
            return
        by_batches = sorted(self.loaders.items(), key=lambda item: item[1][1])
        together = dict(by_batches[_MOST_LOADERS // 2 :])
        for _, (workers, *counts) in by_batches[: _MOST_LOADERS // 2]:
            sums = together.get(-1 - workers, [workers, 0, 0, 0, 0, 0])
            added = [a + b for a, b in zip(sums[1:], counts, strict=True)]
            together[-1 - workers] = [workers, *added]
        self.loaders = together


class StepLog:
    """Notes each step of a training, from ``begin`` to ``end``.

    ``step_ended`` is called at the end of each step, on the thread that takes it.

    Args:
        each_minute: called at the end of a step, once a minute.
    """

    def __init__(self, each_minute: Callable[[], object] | None = None) -> None:
        self.each_minute = each_minute
        self._called = _now()
        self._threads: dict[int, _Thread] = {}
        self._watching = ExitStack()
        self._paused: dict[int, tuple[int, int]] = {}  # since when, and the memory at that time
        self._memory_noted = 0
        self._of_backspot = 0  # memory that was taken meanwhile: no training has that
        self.is_on = False

    def begin(self) -> None:
        """Begin to take stamps. Not while an optimizer takes a step."""
        if self.is_on:
            return
        self.is_on = True
        for remove in (
            loaders.watch(self._fetched, self._in_loader),
            watch_backward(self._backward_begins, self._backward_ends),
            hook_step_begins(self._optimizer_begins),
            hook_steps(self._optimizer_ends),
            dynamo.watch_compilations(lambda *_: None, self._compiled),
        ):
            self._watching.callback(remove)
        _add(self)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.resume()
        self.end()

    def end(self) -> None:
        """Take no more stamps, and leave nothing behind."""
        self.is_on = False
        with contained():
            _remove(self)
            self._watching.close()

    # Boundaries ----------------------------------------------------------------------------------

    # Each of these runs in each step: they call as little as they can.

    def _thread(self) -> _Thread:
        thread = self._threads.get(_here())
        if thread is None:
            thread = self._threads[_here()] = _Thread()
        return thread

    def _fetched(self, fetch: Fetch) -> None:
        thread = self._threads.get(_here()) or self._thread()
        self._in_loader(fetch.loader, fetch.end_ns - fetch.begin_ns)
        thread.fetched.add(fetch.loader)
        if not _is_grad_enabled():
            thread.untrained.add(fetch.loader)
        thread.level.note(fetch)
        if not thread.ended or (self._paused and _here() in self._paused):
            return  # in no step of the training's own
        use = thread.loaders.get(fetch.loader)
        if use is None:
            thread.put_loaders_together()
            use = thread.loaders[fetch.loader] = [fetch.workers, 0, 0, 0, 0, 0]
        use[1] += 1
        if fetch.ready is False:
            use[2] += 1
            use[3] += fetch.waited_ns
            if fetch.loader not in thread.untrained and fetch.is_within_epoch:
                use[4] += 1

    def _in_loader(self, loader: int, took: int) -> None:
        thread = self._threads.get(_here()) or self._thread()
        thread.used[loader] = thread.used.get(loader, 0) + took
        if loader in thread.fetched:
            thread.untrained.add(loader)

    def _backward_begins(self, accumulates: bool) -> None:
        thread = self._threads.get(_here()) or self._thread()
        if accumulates and thread.fetched:  # others, as for forces, train nothing
            thread.fetched.clear()
        thread.backward_began = _now()

    def _backward_ends(self, _: bool) -> None:
        thread = self._threads.get(_here()) or self._thread()
        if thread.backward_began:
            took = _now() - thread.backward_began
            thread.backward += took
            thread.backward_began = 0
            if thread.optimizer_began:  # a closure, as LBFGS calls it
                thread.optimizer_began += took
                thread.has_closures = True

    def _optimizer_begins(self, _: torch.optim.Optimizer) -> None:
        thread = self._threads.get(_here()) or self._thread()
        thread.optimizers += 1
        # One that steps within the backward is a part of it, one within another's step of that.
        if thread.optimizers == 1 and not thread.backward_began:
            thread.optimizer_began = _now()

    def _optimizer_ends(self, _: torch.optim.Optimizer) -> None:
        thread = self._threads.get(_here()) or self._thread()
        thread.optimizers -= 1
        if thread.optimizers <= 0 and thread.optimizer_began:
            thread.optimizer += _now() - thread.optimizer_began
            thread.optimizer_began = 0

    def _compiled(self, *_: object) -> None:
        # Dynamo holds a lock meanwhile. A function of Python that it could compile would never end.
        thread = self._threads.get(_here())
        if thread is not None:
            thread.marks |= _COMPILED

    def saves(self) -> None:
        """Note that this thread calls ``torch.save``."""
        self._thread().marks |= Marks.SAVED

    @property
    def is_in_optimizer(self) -> bool:
        """Whether this thread is in the step of an optimizer, once the hooks of one are called."""
        return self._thread().optimizers > 0

    def step_ended(self) -> Sequence[int] | None:
        """Note that this thread has ended a step.

        Returns:
            The times of the step as ``StepTimes.add`` takes them; ``None`` for one that does not
            count, or not yet.
        """
        now, ran = _now(), _thread_time()
        thread = self._threads.get(_here()) or self._thread()
        times = None
        if not thread.ended:  # the first step ends: before it is no step
            thread.times.pass_over()
        elif self._paused and _here() in self._paused:
            thread.interrupted_steps += 1
            thread.times.pass_over()
        else:
            times = self._add_step(thread, now, ran)
        if now - self._memory_noted >= _MEMORY_EVERY_NS:
            self._note_memory(thread, now)
            now, ran = _now(), _thread_time()
        thread.begin_step(now, ran)
        return times

    def _add_step(self, thread: _Thread, now: int, ran: int) -> Sequence[int] | None:
        if not thread.settled:
            thread.level.step_ended()
            thread.settled = thread.level.is_steady
        marks, data = thread.marks, sum(thread.used.values())
        for loader, took in thread.used.items():
            use = thread.loaders.get(loader)
            if use is None:
                continue
            use[5] += 1
            is_rare = 2 * use[5] < thread.times.steps and len(thread.loaders) > 1
            if is_rare and loader in thread.untrained:
                marks |= Marks.OTHER_DATA
                data -= took  # a part of what these batches are for
        into = thread.times
        if not thread.settled:
            into = thread.settling
            thread.times.pass_over()
        times = (
            now - thread.ended,
            data,
            thread.backward,
            0 if thread.has_closures else thread.optimizer,
            ran - thread.ran,
            int(marks),
        )
        into.add(*times)
        return times if thread.settled else None

    def _note_memory(self, thread: _Thread, now: int) -> None:
        self._memory_noted = now
        size = resident()
        if size and not self._paused:
            thread.times.add_memory(size - self._of_backspot)
        if self.each_minute is not None and now - self._called >= _CALLED_EVERY_NS:
            self._called = now
            self.each_minute()

    # Interruptions -------------------------------------------------------------------------------

    # Whichever log is told, they hold for each one.

    def _each(self) -> Iterator[StepLog]:
        yield self
        yield from (log for log in _logs if log is not self)

    def pause(self) -> None:
        """Leave out this thread's steps from now on, as Backspot does something to them."""
        for log in self._each():
            log._paused.setdefault(_here(), (_now(), resident()))

    def resume(self) -> None:
        """Note this thread's steps again, from the one that begins now on."""
        for log in self._each():
            paused = log._paused.pop(_here(), None)
            if paused is None:
                continue
            began, size = paused
            log._of_backspot += resident() - size
            thread = log._thread()
            thread.interrupted_ns += _now() - began
            thread.level.reset()
            thread.settled = False
            if thread.ended and log is self:
                thread.begin_step(_now(), _thread_time())
            else:  # it may be within a step of another log
                thread.ended = 0

    def set_aside(self, nanoseconds: int) -> None:
        """Leave out some time of this thread's step that is under way."""
        for log in self._each():
            thread = log._thread()
            if thread.ended:
                aside = min(nanoseconds, _now() - thread.ended)
                thread.ended += aside
                thread.interrupted_ns += aside

    @property
    def is_level(self) -> bool:
        """Whether the queues of this thread's loaders have found their level."""
        return self._thread().level.found

    @property
    def left_until_level(self) -> int:
        """After how many more steps they have at most."""
        return self._thread().level.left

    # The account ---------------------------------------------------------------------------------

    def training(self) -> Training | None:
        """Return what is known of the thread with the most steps; ``None`` without a whole step."""
        if not self._threads:
            return None
        thread = max(self._threads.values(), key=lambda thread_steps: thread_steps.times.steps)
        times = thread.times
        if times.counted < min(_FEW_STEPS, thread.settling.counted):
            times = thread.settling
            times.steps = thread.times.steps
        uses = [LoaderUse(*use[:5]) for use in list(thread.loaders.values()) if use[0]]
        apart = []
        if thread.interrupted_ns:
            apart.append(Apart("backspot", thread.interrupted_steps, thread.interrupted_ns))
        return times.training(uses, apart, has_device=torch.cuda.is_initialized())


_logs: tuple[StepLog, ...] = ()
"""Those that take stamps."""


def _saves(save: Callable[[], Any]) -> Any:
    for log in _logs:
        log.saves()
    return save()


_watching_saves = Watch(Location(torch, "save"), _saves)
"""One for all: of several within each other, the inner one could not end first."""


def _add(log: StepLog) -> None:
    global _logs
    _logs = (*_logs, log)
    _watching_saves.begin()


def _remove(log: StepLog) -> None:
    global _logs
    _logs = tuple(other for other in _logs if other is not log)
    if not _logs:
        _watching_saves.end()


dynamo.keep_from_dynamo(
    StepLog._optimizer_begins, StepLog._optimizer_ends, StepLog._fetched, StepLog._in_loader
)
