"""Record some steps of a training that somebody else runs, and leave nothing behind.

The recorder is called at the end of each step. When a report is due, the next steps go through the
stages of a ``Measurement``: some are timed, then the models get labels and a profiler records.

Within a long enough warm-up, two steps are recorded early. They are all that there is of a training
that ends soon. Otherwise they are dropped.

Then everything is removed, and the recording is delivered while the training waits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
from torch.profiler import ProfilerAction

from backspot.analysis.recording import Options, Recording
from backspot.formatting import counted
from backspot.interrupts import contained, heard, pass_on
from backspot.live import discovery, loaders
from backspot.live.acts import Living, Rest
from backspot.live.compiled import compiled_book
from backspot.live.process_number import process_number
from backspot.live.recording import (
    DETAIL,
    TIMES,
    Labelled,
    LeftAlone,
    Measurement,
    Profile,
    Profiled,
    Stage,
    Timed,
    in_detail,
)
from backspot.live.source_lines import place_of_frame
from backspot.live.step_log import StepLog
from backspot.live.torch_internals.profiler import recording as is_recording
from backspot.pipeline import locate_export
from backspot.results.report import Report, changed
from backspot.results.training import Training
from backspot.trace.profiler import Export

_LONGEST_WAIT = 20

_EARLY_STEPS = 2
"""How many steps are recorded early, if the warm-up is long enough for them."""

_BEFORE_EARLY = 2
"""In the first one the calls of modules are watched; in the second one the profiler is ready."""


@dataclass(frozen=True)
class Schedule:
    """When to record.

    Attributes:
        warmup: how many steps to wait for, before the first report.
        steps: how many steps to time, and then to record.
        every: make a report each time after so many steps; ``None``: one report.
        ends: whether to end the script after the first report.
        depth: the deepest level that is labelled, as in ``instrument``.
        records: further options of the profiler for some more steps, as ``Act.records``.
        shapes: whether to record some more steps with the inputs of operators.
        stacks: whether to record some more steps with the lines of Python that run.
        compiled: whether to record for which modules compiled code works, as in ``instrument``.
        waits: whether to wait for longer than ``warmup`` until each optimizer has taken a step.
        keeps_live: whether a recording keeps what still lives of the training, as in ``Living``.
        log: whether to note all steps until the training ends, for ``Report.training``.
    """

    warmup: int = 5
    steps: int = 10
    every: int | None = None
    ends: bool = False
    depth: int | None = None
    records: Sequence[str] = ()
    shapes: bool = False
    stacks: bool = False
    compiled: bool = True
    waits: bool = True
    keeps_live: bool = False
    log: bool = True

    @property
    def longest_wait(self) -> int:
        """For how many steps more to wait for an optimizer that has not taken a step."""
        return min(3 * self.warmup, _LONGEST_WAIT) if self.waits else 0

    def stages(self, labelled: Stage) -> tuple[Stage, ...]:
        """Return the stages of a report, the labels from ``labelled`` on."""
        more = in_detail(records=self.records, shapes=self.shapes, stacks=self.stacks, prepared=1)
        return (Timed(self.steps), labelled, Profiled(TIMES, self.steps), *more)

    @property
    def first_step(self) -> int:
        """The number of the first step that is recorded, if nothing is waited for."""
        return max(self.warmup, 1) + self.steps + 2

    @property
    def needed(self) -> int:
        """How many steps the first report needs; it can do without stacks."""
        stages = replace(self, stacks=False).stages(LeftAlone(0))
        return max(self.warmup, 1) + sum(stage.count for stage in stages)

    @property
    def last_early_start(self) -> int:
        """After which step an early recording can still begin; 0 if there is none."""
        return max(self.warmup - _BEFORE_EARLY - 1, 0) if self.waits else 0

    def fitting(self, steps: int) -> tuple[int, int] | None:
        """Return the ``warmup`` and ``steps`` of a complete report of so few steps, if any fit."""
        after_times = self.needed - max(self.warmup, 1) - 2 * self.steps - 1
        room = steps - 1 - after_times
        warmup = min(max(room // 5, 1), Schedule.warmup)
        fits = min((room - warmup) // 2, Schedule.steps)
        return (warmup, fits) if fits > 0 else None


@dataclass(frozen=True)
class Recorded:
    """A recording that is complete.

    Attributes:
        first: the number of the first recorded step; ``None`` if not all steps were counted.
        times_ns: the times of steps without the profiler, in nanoseconds.
        number: the number of this recording, from 1.
        requested: whether ``request`` asked for it, or it came late as the script's own profiler
            was first, and so perhaps on this rank only.
        in_detail: the profiler that recorded stacks, shapes and the like in later steps, if any.
        is_early: whether these are steps of the warm-up, as the training ended soon after.
        live: what still lives of the training; ``None`` if that is not kept, or several
            threads train.
        threads: in how many threads the training takes steps; these are of one.
        training: all steps so far; ``None`` if they are not noted.
        by_backwards: whether each backward counted as a step, as nothing tells of updates.
        shortage: as in ``Measurement``.
        slowed_by: likewise.
    """

    profiler: torch.profiler.profile | Export
    first: int | None
    count: int
    times_ns: tuple[int, ...]
    number: int
    requested: bool
    in_detail: torch.profiler.profile | Export | None = None
    is_early: bool = False
    live: Living | None = None
    threads: int = 1
    training: Training | None = None
    by_backwards: bool = False
    shortage: str = ""
    slowed_by: Mapping[str, str] = field(default_factory=dict)

    def locate(
        self,
        training: str,
        trace: Path | None = None,
        use: Callable[[Path, Recording], None] | None = None,
    ) -> Report:
        """Return the report.

        Args:
            training: what was recorded, such as the name of a script.
            trace: where to write the labelled trace; ``None`` writes none.

        Raises:
            NoBackwardError: If the steps had no backward.
        """
        steps = (
            f"{self.count} steps"
            if self.first is None
            else f"steps {self.first} to {self.first + self.count - 1}"
        )
        return locate_export(
            self.profiler,
            f"{training}, {steps}",
            Options(
                live=True,
                warmed_up=True,
                real_steps=self.times_ns,
                training=self.training,
                slowed_by=self.slowed_by,
                place=place_of_frame,
            ),
            in_detail=self.in_detail,
            parts=(partial(_with_caveats, self),),
            trace=trace,
            force=True,
            use=use,
        )

    def file_name(self, stem: str, *suffixes: str) -> str:
        """Return the name of a file; after the first recording it has the step or a number."""
        run_name = f"{self.number}" if self.first is None else f"step{self.first}"
        return ".".join([stem, *([run_name] if self.number > 1 else []), *suffixes])


class Models:
    """The models that are trained, known from the beginning; or a search for them, in a subclass.

    The steps from ``begin`` to ``named`` or ``end`` show a search which modules are used.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._models = models

    def are_known(self) -> bool:
        """Return whether all models that are trained can be found by now."""
        return True

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that train them."""
        return []

    def begin(self) -> None:
        """Begin to search."""

    def named(self) -> Mapping[str, torch.nn.Module]:
        """End the search, and return the models by name."""
        return self._models

    def end(self) -> None:
        """End the search."""


def _with_caveats(recorded: Recorded, report: Report, _: Recording, __: Options) -> Report:
    threads = (
        f"{recorded.threads} threads of the script train. The steps here are those of one of them, "
        "and only what it trains has labels."
    )
    early = (
        "The training ended early, so these are steps of its warm-up: the first steps are slower "
        "than later ones."
    )
    backwards = (
        "Each backward counts as a step: no optimizer of PyTorch takes steps here, and nothing "
        "else tells of updates. If several backwards make one update, a step here is a part of one."
    )
    shortage = f"Only {recorded.shortage}."
    sentences = [early] * recorded.is_early + [threads] * (recorded.threads > 1)
    sentences += [backwards] * recorded.by_backwards
    sentences += [shortage] * bool(recorded.shortage)
    return changed(report, warnings=(*sentences, *report.warnings))


_OTHER_PROFILER = (
    "the script uses torch.profiler itself: nothing is recorded until it is done "
    "(backspot.instrument and backspot.locate use its recording)"
)


class _Taken(Exception):  # noqa: N818 - it is no error
    """The script's own profilers leave no room for a recording."""


class Recorder:
    """Times and records some steps of a training.

    ``watch`` comes first. At the end of each step, ``count`` is called, and then ``advance`` if it
    returns true.

    A script may train in several threads. Each counts its own steps. The first in which a report is
    due is recorded, and the others are left alone. If it ends before that is done, another one may
    be next.

    It counts steps (there is no ``_measurement``), records steps (there is one), or has a report
    that waits for a later step (there is a ``_rest``). ``_begin`` goes from counting to recording.
    ``_stop`` ends a recording and goes back to counting. ``_finish`` ends it with a report, which
    may leave a ``_rest``; once that is delivered, ``_go_back_to_counting`` goes on, or ends all
    counting where no other report is due (``is_idle``).

    What a signal's handler of the script raises leaves each method. What is under way is removed
    then, and begins again if the training goes on.

    Args:
        deliver: called with each recording, after everything was removed.
        say: called with a sentence if something does not work.
        retire: called when no more steps need to be counted.

    Attributes:
        steps: how many steps were counted in the thread that is recorded, or had the most steps.
        log: what is noted of each step, from ``watch`` on.
        by_backwards: whether each backward counts as a step, as nothing tells of updates.
    """

    def __init__(
        self,
        schedule: Schedule,
        models: Models,
        deliver: Callable[[Recorded], Rest | None],
        say: Callable[[str], None],
        retire: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps = 0
        self.by_backwards = False
        self.reports = 0
        self.log = StepLog()
        self._waited = 0
        self._waits_at_most = 0  # with longer epochs; 0: as long as here
        self._waited_for = ""
        self._cut_short = ""  # the script's exception that came last while something was under way
        self._counts_all = True
        self.schedule = schedule
        self._search = models
        self._deliver = deliver
        self._rest: Rest | None = None
        self._say = say
        self._retire = retire
        self._said: list[str] = []
        self._gave_up = False
        self._early: Recorded | None = None
        self._process = process_number()
        self._due: int | None = schedule.warmup
        self._next_due: int | None = None
        self._watches = False
        self._counts: Counter[int] = Counter()
        self._choosing = threading.RLock()
        self._moving = threading.RLock()
        self._in_thread = threading.local()
        self._others = 0  # how many steps came before the parameters that are trained now
        self._longest = 0
        self._reset()

    def _reset(self) -> None:
        self._measurement: Measurement | None = None  # none while steps are only counted
        self._steps: Generator[None] | None = None
        self._thread = 0
        self._first: int | None = None  # the number of the first step that is recorded
        self._requested = False
        self._is_early = False
        self._is_outdated = False

    @property
    def in_one_go(self) -> int:
        """How many steps one set of parameters was trained for, at most."""
        return max(self._longest, self.steps - self._others)

    @property
    def steps_said(self) -> str:
        """How many steps there were, in words."""
        step_count = counted(self.steps, "step")
        return (
            f"{step_count}, at most {self.in_one_go} of one model" if self._others else step_count
        )

    @property
    def is_child(self) -> bool:
        """Whether this process was forked from the one that is observed."""
        return process_number() != self._process

    def watch(self) -> None:
        """Have compiled code keep its modules from now on, until no more steps are recorded.

        A training compiles its code in its first steps, long before there are labels.
        """
        if self.schedule.compiled and not self._watches:
            self._watches = True
            compiled_book.watch()
        if self.schedule.log:
            self.log.begin()

    def leave_copy(self) -> bool:
        """Note no more steps, in a copy of the process; return whether nothing was under way.

        The thread that makes a report is not in the copy, but the locks are that it held.
        """
        self._unwatch()
        self.log.end()
        return self._measurement is None and self._rest is None

    def _unwatch(self) -> None:
        if self._watches:
            self._watches = False
            compiled_book.unwatch()

    def _end_counting(self) -> None:
        self._due = None
        self._counts_all = False
        self._unwatch()
        if not self.log.is_on:
            self._retire()

    def end_log(self) -> None:
        """Note no more steps."""
        self.log.resume()
        self.log.end()
        if self._due is None:
            self._retire()

    def request(self) -> None:
        """Make a report as soon as possible."""
        if self._measurement is None or self._is_early:
            self._due = min(self._counts.values(), default=0)
            self._requested = True

    def renew(self) -> None:
        """Begin again what is under way, as this thread's next step trains other parameters."""
        self._longest, self._others = self.in_one_go, self.steps
        self._is_outdated = self._thread == threading.get_ident()

    @property
    def is_idle(self) -> bool:
        """Whether no step is to be recorded, and nothing is done to any."""
        return self._due is None and self._measurement is None and self._rest is None

    def count(self) -> bool:
        """Count a step that has ended, and return whether ``advance`` has something to do."""
        if self.log.is_on:
            self.log.step_ended()
        if self.is_idle:
            self.steps += 1
            return False
        thread = threading.get_ident()
        with self._choosing:
            self._counts[thread] += 1
            steps = self._counts[thread]
            if self._measurement is not None or self._rest is not None:
                if self._thread != thread:
                    return False
                self.steps = steps
                return True
            self.steps = max(self.steps, steps)
            # Which thread it is comes with ``advance``, which may be a moment later.
            return self._due is not None and (steps >= self._due or self._may_be_early(steps))

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Leave what Backspot does in the block out of this thread's step."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            took = time.perf_counter_ns() - begin
            self.log.set_aside(took)
            measurement = self._measurement
            if measurement is not None and self._thread == threading.get_ident():
                measurement.aside_ns += took

    def advance(self) -> None:
        """Go on, at the end of a step."""
        reports = self.reports
        if not self._moving.acquire(blocking=False):  # another thread is about to begin
            return
        begin = time.perf_counter_ns()
        try:
            self._move(self._go_on)
        finally:
            self._moving.release()
            self.log.set_aside(time.perf_counter_ns() - begin)
            if self._measurement is None and self._rest is None:
                self.log.resume()
        if self.schedule.ends and self.reports > reports:
            raise SystemExit(0)

    def _move(self, action: Callable[[], None]) -> None:
        """Do something to the recording; an error ends it, and one of the script's passes.

        The end of the script waits for what another thread does.
        """
        with self._moving:
            try:
                try:
                    action()
                except Exception as error:
                    pass_on(error)
                    self.give_up(error)
            except BaseException as error:
                self._cut_short = type(error).__name__
                with contained():
                    self._stop(again=True)
                raise

    def _go_on(self) -> None:
        if self._rest is not None:
            if self._thread == threading.get_ident():
                self._go_on_with_rest()
        elif self._measurement is None:
            if self._due is not None:
                self._begin()
        elif self._thread == threading.get_ident():  # else it was chosen since ``count``
            self._stop(again=not self._is_early) if self._is_outdated else self._next()

    def _next(self) -> None:
        """Go on to where the next step runs."""
        if self._measurement is None or self._steps is None:
            return
        try:
            next(self._steps)
        except StopIteration:
            if self._is_early:
                self._keep_early()
            else:
                self._finish()
        except _Taken:
            self._withdraw()
        else:
            if self._first is None and TIMES in self._measurement.profiles:
                self._first = self.steps + 1

    def _may_be_early(self, steps: int) -> bool:
        is_first = self.reports == 0 and self._early is None and not self._requested
        return is_first and 0 < steps <= self.schedule.last_early_start

    def _begin(self) -> None:
        """Begin a recording of this thread's steps: the one that is due, or else an early one."""
        steps = self._counts[threading.get_ident()]
        self._is_early = steps < (self._due or 0)
        if not self._may_begin():
            return
        if not self._is_free():
            self._withdraw()
            return
        stages = self._stages(steps)
        with self._choosing:
            self._thread = threading.get_ident()
            self._measurement = Measurement(
                stages, log=self.log, give_way=self._give_way, end_inside=self._end_inside
            )
        self._search.begin()
        if not hasattr(self._in_thread, "end"):
            self._in_thread.end = _ThreadEnd(self._end_of_thread)
        self._steps = self._measurement.steps()
        self._next()

    def _may_begin(self) -> bool:
        """Whether there is nothing to wait for; an early recording needs models that are known."""
        if self._is_early:
            self._is_early = self._search.are_known()
            return self._is_early
        if self._waits():
            self._waited += 1
            return False
        return True

    def _stages(self, steps: int) -> Sequence[Stage]:
        """What the recording goes through; an early one has a few steps before the warm-up ends."""
        labelled = Labelled(self._find, self.schedule.depth, self.schedule.compiled, lenient=True)
        if not self._is_early:
            return self.schedule.stages(labelled)
        most = self.schedule.warmup - steps - _BEFORE_EARLY
        return LeftAlone(1), labelled, Profiled(TIMES, min(_EARLY_STEPS, most))

    def _find(self) -> Mapping[str, torch.nn.Module]:
        if not self._is_free():  # the script has made a profiler while the steps were timed
            raise _Taken
        return self._search.named()

    def _waits(self) -> bool:
        """Whether to wait for an optimizer's first step, or for the queue of a loader."""
        if self.reports or self._requested or not self.schedule.waits:
            return False
        # A generator's first step may come late.
        if self._waited < self.schedule.longest_wait and not self._search.are_known():
            self._waited_for = "an optimizer that took no step"
            return True
        if self.log.is_on and not self.log.is_level:
            self._waited_for = "the queue of a loader"
            self._waits_at_most = self._waited + self.log.left_until_level
            return True
        return False

    def _is_free(self) -> bool:
        """Whether the script's own profilers leave room for a recording."""
        ahead = range(self.schedule.needed - self.schedule.warmup + 1)
        return not is_recording() and not any(
            _is_due(profiler, ahead) for profiler in discovery.profilers()
        )

    def _withdraw(self) -> None:
        """Leave the profiler to the script, and begin again when the script is done with it."""
        early = self._is_early
        self._stop(again=not early)
        if not early:
            self.complain(_OTHER_PROFILER)

    def _give_way(self) -> None:
        """Withdraw, as the script starts a profiler."""
        if self._thread != threading.get_ident() or self.is_child:
            return
        self._move(self._withdraw)

    def _end_inside(self) -> None:
        """End the recording inside a step: the stages have no more, and the next step finishes."""
        if not self.is_child:
            self._move(self._close)

    def _end_of_thread(self) -> None:
        """Remove everything: the thread that is recorded ends, and no other can end its profile."""
        if self._thread != threading.get_ident() or self.is_child:
            return
        self._move(self._end_rest if self._rest else lambda: self._stop(again=True))

    def _keep_early(self) -> None:
        """Remove everything, and keep the recording until there is a later one."""
        recorded = self._so_far()
        self._stop(again=self._requested)
        if recorded is not None:
            with contained():  # it may not be needed, and the reason may go
                self._early = replace(recorded, profiler=Export(recorded.profiler))
        self.log.resume()
        if self._due is not None and self.steps >= self._due:
            self._begin()

    def _finish(self) -> None:
        """Remove everything, deliver the recording, and wait for the next one."""
        recorded = self._so_far()
        shortage = self._measurement.shortage if self._measurement else ""
        due, self._due = self._due, None  # for the other threads, until the report is made
        self._next_due = due
        thread = self._thread
        try:
            self._stop()
            self._early = None
            self._thread = thread  # what is left to do after a report is for this thread
            if shortage:
                self.complain(shortage)
            self._hand_over(recorded)
        except BaseException:
            self._due = due
            raise
        if self._rest is None:
            self._go_back_to_counting()

    def _go_back_to_counting(self) -> None:
        due = self._next_due
        self._thread = 0
        if self.schedule.every is None or self.schedule.ends:
            if self._due is None:  # else a report was asked for meanwhile
                self._end_counting()
        elif due is not None:
            while due <= self.steps:
                due += self.schedule.every
            self._due = due

    def _so_far(self) -> Recorded | None:
        """Return what was recorded in steps that are complete, and can be read in this thread."""
        if self._measurement is None:
            return self._early
        is_own_thread = self._thread == threading.get_ident()

        def read(profile: Profile | None) -> Any:
            if profile is None or not profile.count:
                return None
            # Only its own thread can end a profile and read it.
            return (
                profile.profiler if is_own_thread or isinstance(profile.profiler, Export) else None
            )

        times_ns = () if self._is_early else tuple(self._measurement.times_ns)
        profiles = self._measurement.profiles
        profiler = read(profiles.get(TIMES))
        if profiler is None:
            return self._early and replace(self._early, times_ns=times_ns)
        return Recorded(
            profiler,
            self._first if self._counts_all else None,
            profiles[TIMES].count,
            times_ns,
            self.reports + 1,
            self._requested,
            read(profiles.get(DETAIL)),
            self._is_early,
            self._live(),
            len(self._counts),
            by_backwards=self.by_backwards,
            shortage=self._measurement.shortage,
            slowed_by=self._measurement.slowed_by,
        )

    def _live(self) -> Living | None:
        """What still lives; not beside other threads that train, whose modes a part might set."""
        if not self.schedule.keeps_live or self._is_early or len(self._counts) != 1:
            return None
        assert self._measurement is not None  # noqa: S101 - for type checkers
        loader = loaders.newest(discovery.only_loader())
        return Living(dict(self._measurement.models), self._search.optimizers(), loader=loader)

    def _hand_over(self, recorded: Recorded | None) -> None:
        if recorded is not None:
            recorded = replace(recorded, training=self.log.training())
            with heard():
                self._rest = self._deliver(recorded)
            if self._rest is None:
                self._delivered()

    def _end_rest(self) -> None:
        self._deliver_rest()
        self._go_back_to_counting()

    def _go_on_with_rest(self) -> None:
        interval = self.schedule.every
        is_due = interval is not None and self.steps + 1 >= (self._next_due or 0) + interval
        self._deliver_rest(now=is_due or self._requested)
        if self._rest is None:
            self._go_back_to_counting()

    def _deliver_rest(self, *, now: bool = True) -> None:
        """Do what a delivery has left for after one more step."""
        rest, self._rest = self._rest, None
        if rest is None:
            return
        with heard():
            more = rest(now)
            while more is not None and now:
                more = more(True)
        self._rest = more
        if more is None:
            self._delivered()

    def _delivered(self) -> None:
        self.reports += 1
        self._cut_short = ""

    def _stop(self, *, again: bool = False) -> None:
        """Remove all that is under way, and with ``again`` begin again after a later step."""
        self._search.end()
        try:
            self._close()
        finally:
            self._reset()
            self._requested = again  # as one that was asked for, it waits for nothing

    def _close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    def end(self) -> None:
        """Remove everything, because the training has ended; deliver what was recorded.

        The log is kept to be read, and notes no more.
        """
        if not self.is_child:
            try:
                self._move(self._end)
            finally:
                self.end_log()

    def _end(self) -> None:
        self._deliver_rest()
        with contained():
            self._close()
        recorded = self._so_far()
        try:
            with contained():
                self._stop()
        finally:
            self._end_counting()
        self._hand_over(recorded)
        self._deliver_rest()
        if self._cut_short and not self.reports:
            self._gave_up = True
            self.complain(f"no report: {self._cut_short} came while it was recorded or made")

    def complain(self, sentence: str) -> None:
        """Say what does not work, once."""
        if sentence not in self._said:
            self._said.append(sentence)
            self._say(sentence)

    def why_none(self, ending: str, remedy: Callable[[int, int], str]) -> str:
        """Return why the training ended without a report; empty if that was said.

        Args:
            ending: how the training ended, such as ``"the script ended"``.
            remedy: what to use instead, from the ``warmup`` and ``steps`` that would have done.
        """
        if self._gave_up:
            return ""
        if self._said:
            return f"no report: {self._said[-1]}"
        least = self.schedule.last_early_start and 1 + _BEFORE_EARLY + 1
        # With as many, an optimizer's first step came too late for an early recording.
        waits = max(self._waited, self._waits_at_most)
        up_to = "up to " if self._waits_at_most else ""
        needed = least if self.in_one_go < least else self.schedule.first_step + waits
        waited = f" ({up_to}{waits} of them for {self._waited_for})"
        fitting = self.schedule.fitting(self.in_one_go - waits)
        return (
            f"no report: {ending} after {self.steps_said}, and a report "
            f"needs {up_to}{needed}{waited if waits else ''}"
            + (f"; use {remedy(*fitting)}" if fitting else "")
        )

    def give_up(self, error: Exception) -> None:
        """Leave the training alone: no report is worth a failed training."""
        if os.environ.get("BACKSPOT_DEBUG"):
            import traceback

            traceback.print_exception(error)
        with contained():
            self._stop()
        with contained():
            self._deliver_rest()
        self._due = self._early = None
        self._gave_up = True
        self._unwatch()
        self.log.end()
        self.complain(f"no report: {type(error).__name__}: {error}")


class _ThreadEnd:
    """Calls a method when the thread ends that has this in a ``threading.local``."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = WeakMethod(method)

    def __del__(self) -> None:
        method = None if sys.is_finalizing() else self._method()
        if method is not None:
            method()


def _is_due(profiler: torch.profiler.profile, ahead: range) -> bool:
    """Whether a profiler of the script may record in one of the next steps."""
    inner = getattr(profiler, "profiler", None)
    has_ended = getattr(inner, "kineto_results", None) is not None
    begun = inner is not None or getattr(profiler, "step_rec_fn", None) is not None
    actions = [profiler.schedule(profiler.step_num + step) for step in ahead]
    if all(action == ProfilerAction.RECORD for action in actions):  # it has no schedule
        return begun and not has_ended
    return begun and any(action != ProfilerAction.NONE for action in actions)
