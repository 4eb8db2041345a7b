"""Steps of a training, stage by stage: left alone, timed, or recorded by a profiler.

A *stage* is some steps of one kind. A ``Measurement`` goes through its stages: it stops where each
step of the training runs, and goes on when the step has ended. ``profile`` takes the steps itself;
``Recorder`` goes on at the end of each step of a training that somebody else runs. A further kind
of steps is one more class of stages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, supported_activities

from backspot.errors import UsageError
from backspot.formatting import counted
from backspot.interrupts import contained
from backspot.live.copies import let_copies_end
from backspot.live.host_marks import (
    calls_counted,
    can_record_stacks,
    collections_marked,
    saves_marked,
    unread_marked,
    waits_marked,
)
from backspot.live.instrumentation import Instrumentation, instrument
from backspot.live.memory_watch import MemoryWatch
from backspot.live.step_log import StepLog
from backspot.live.surroundings import slowed_by
from backspot.live.torch_internals.lookup import Watch, Wrapping, nothing
from backspot.live.torch_internals.profiler import (
    PROFILER_PREPARES,
    PROFILER_WARNS,
    new_range,
    privateuse1_name,
    recording as is_recording,
    without_inductor,
)
from backspot.trace.names import PROFILER_STEP
from backspot.trace.profiler import Export

TIMES, DETAIL = "times", "detail"
"""The profiles of a recording: the one for times, and the one with stacks, shapes and the like."""

STEPS_IN_DETAIL = 3
"""How many steps are recorded in detail: what grows from step to step shows in three."""

_MANY_CALLS, MOST_CALLS = 200_000, 600_000
"""How many calls of functions are recorded with stacks, in several steps and in one: each takes
PyTorch some 20 µs and a kilobyte at the end."""


@dataclass
class Profile:
    """A profiler, its export once another one records, and how many steps it recorded."""

    profiler: torch.profiler.profile | Export
    count: int = 0


class Measurement:
    """Some steps of a training, and what was measured so far.

    Args:
        step_ended: called after each step, outside of what is measured.
        log: notes all steps but those that are recorded; ``None`` for none.
        give_way: called before a profiler of the training prepares to record in a recorded step;
            it must not raise. ``None``: such a profiler takes the recording over.
        end_inside: called inside a recorded step, to ``close`` the steps, as memory runs low.

    Attributes:
        labelled: the instrumentations by name, without models that others have labelled.
        times_ns: the times of the timed steps, in nanoseconds.
        aside_ns: what Backspot did inside of the step under way, in nanoseconds.
        calls: how many functions a step calls, 0 where they were not counted.
        shortage: why fewer steps were recorded than wanted; empty if that is not so.
        slowed_by: as ``surroundings.slowed_by`` returns it.
        range: the range of the step that is recorded. No variable of a frame holds it, as an
            exception that is kept would keep it until a later session.
    """

    def __init__(
        self,
        stages: Collection[Stage],
        *,
        step_ended: Callable[[], object] = nothing,
        log: StepLog | None = None,
        give_way: Callable[[], None] | None = None,
        end_inside: Callable[[], None] = nothing,
    ) -> None:
        self.models: Mapping[str, torch.nn.Module] = {}
        self.labelled: dict[str, Instrumentation] = {}
        self.times_ns: list[int] = []
        self.aside_ns = 0
        self.calls = 0
        self.profiles: dict[str, Profile] = {}
        self.shortage = ""
        self.slowed_by: Mapping[str, str] = {}
        self.step_ended = step_ended
        self.end_inside = end_inside
        self.log = log or StepLog()
        self.labels = ExitStack()
        self._stages = stages
        self._give_way = give_way
        self.range: Any = None

    def steps(self) -> Generator[None]:
        """Yield where each step runs. ``close`` ends what is under way, and removes all of it."""
        with self.labels:
            for stage in self._stages:
                yield from stage.steps(self)

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """Call ``give_way`` before another profiler prepares to record, inside the block."""
        give_way = self._give_way
        if give_way is None:
            yield
            return

        def prepare(original: Callable[[], Any]) -> Any:
            give_way()
            return original()

        with Watch(PROFILER_PREPARES, prepare):
            yield


class Stage(Protocol):
    """Some steps of one kind."""

    @property
    def count(self) -> int:
        """How many steps it has."""

    def steps(self, measurement: Measurement) -> Iterator[None]:
        """Yield where each step runs; with ``close``, undo what is not complete."""


@dataclass(frozen=True)
class LeftAlone:
    """Steps that nothing is done to.

    Attributes:
        counted: whether to count the calls of functions in the last step, for ``calls``.
    """

    count: int
    counted: bool = False

    def steps(self, measurement: Measurement) -> Iterator[None]:
        """Do nothing."""
        for left in range(self.count, 0, -1):
            if self.counted and left == 1 and can_record_stacks():
                with calls_counted() as counter:
                    yield
                measurement.calls = next(counter) // 2  # a call, and its return
            else:
                yield
            measurement.step_ended()


@dataclass(frozen=True)
class Settled:
    """Steps until the queues of loaders with workers have found their level.

    There are none without such a loader, and twice as many as its queue has batches at most.
    """

    count: int = 0

    def steps(self, measurement: Measurement) -> Iterator[None]:
        """Do nothing."""
        while measurement.log.is_on and not measurement.log.is_level:
            yield
            measurement.step_ended()


@dataclass(frozen=True)
class Timed:
    """Steps whose time without a profiler is taken.

    On one CUDA device, an event after each step marks when its work is done, so that the host may
    run ahead of the device as it does in training. Elsewhere the host waits for the devices after
    each step.
    """

    count: int

    def steps(self, measurement: Measurement) -> Iterator[None]:
        """Add to ``times_ns``."""
        if not self.count:
            return
        measurement.log.resume()
        devices = devices_of(measurement.models.values())  # once: a large model takes long to walk
        synchronize(devices)
        if len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
            yield from self._by_events(measurement, device)
            return
        for _ in range(self.count):
            measurement.aside_ns, begin = 0, time.perf_counter_ns()
            yield
            synchronize(devices)
            measurement.times_ns.append(time.perf_counter_ns() - begin - measurement.aside_ns)
            measurement.step_ended()

    def _by_events(self, measurement: Measurement, device: torch.device) -> Iterator[None]:
        def mark() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            return event

        marks, undisturbed = [mark()], []
        try:
            for _ in range(self.count):
                measurement.aside_ns = 0
                yield
                marks.append(mark())
                undisturbed.append(not measurement.aside_ns)
                measurement.step_ended()
        finally:
            with contained():  # an error of the device reaches the next step by itself
                marks[-1].synchronize()
                times = [round(1e6 * a.elapsed_time(b)) for a, b in pairwise(marks)]
                # How much of what the host did the device saw is not known.
                measurement.times_ns += [*compress(times, undisturbed)] or times


@dataclass(frozen=True)
class Labelled:
    """No step: the models are found and have labels from here on, until the recording ends.

    Attributes:
        lenient: pass over a model of which a part has labels already.
    """

    find: Callable[[], Mapping[str, torch.nn.Module]]
    depth: int | None
    compiled: bool = True
    lenient: bool = False
    count: int = 0

    def steps(self, measurement: Measurement) -> Iterator[None]:
        """Set ``models`` and ``labelled``."""
        measurement.models = self.find()
        for name, model in measurement.models.items():
            with suppress(UsageError) if self.lenient else nullcontext():
                measurement.labelled[name] = measurement.labels.enter_context(
                    instrument(
                        model,
                        depth=self.depth,
                        name=name,
                        markers=False,  # the report needs none
                        lines=True,
                        compiled=self.compiled,
                    )
                )
        yield from ()


@dataclass(frozen=True)
class Profiled:
    """Steps that a profiler records.

    Attributes:
        prepared: how many steps run before, to get used to the labels and a profiler that is ready.
        records: further options of the profiler, as ``Act.records``.
    """

    key: str
    recorded: int
    prepared: int = 1
    records: Sequence[str] = ()
    shapes: bool = False
    stacks: bool = False

    @property
    def count(self) -> int:
        """How many steps it has."""
        return self.prepared + self.recorded

    def steps(self, measurement: Measurement) -> Iterator[None]:
        """Add to ``profiles``."""
        models = measurement.models.values()
        if not measurement.profiles:  # on the training's thread, before anything of ours is there
            measurement.slowed_by = slowed_by()
        # Kineto keeps the newest profile alone: an earlier one is exported before this begins.
        for earlier in measurement.profiles.values():
            if not isinstance(earlier.profiler, Export):
                earlier.profiler = Export(earlier.profiler)
        recorded, stacks = self._within_limits(measurement)
        if not recorded or measurement.shortage:
            return
        measurement.log.pause()
        let_copies_end()
        profiler = torch.profiler.profile(
            activities=activities(models),
            record_shapes=self.shapes,
            with_stack=stacks,
            **dict.fromkeys(self.records, True),
        )
        with _prepared(profiler):
            with measurement.giving_way():
                yield from LeftAlone(self.prepared).steps(measurement)
            # Kernels that still run have their launch before the recording, and no owner in it.
            synchronize(devices_of(models))
        profile = measurement.profiles[self.key] = Profile(profiler)
        memory = MemoryWatch(
            devices_of(models),
            detailed=bool(self.records) or self.shapes,
            end=measurement.end_inside,
        )
        try:
            with (
                _recording(profiler),
                memory,
                measurement.giving_way(),
                collections_marked(),
                saves_marked(),
                unread_marked(),
                waits_marked() if stacks else nullcontext(),
            ):
                yield from self._recorded(measurement, profile, recorded, memory)
        finally:
            measurement.range = None  # freed here, where nothing records
            if memory.shortage and profile.count < recorded:
                steps = f"{profile.count} of {counted(recorded, 'step')}"
                how = " in detail" if self.key == DETAIL else ""
                measurement.shortage = f"{steps} were recorded{how}, as {memory.shortage}"

    def _within_limits(self, measurement: Measurement) -> tuple[int, bool]:
        """Return how many steps to record, and whether with stacks."""
        stacks = self.stacks and can_record_stacks()
        if stacks and measurement.calls > MOST_CALLS:
            return (self.recorded if self.records or self.shapes else 0), False
        if not stacks or self.records:  # what grows from step to step shows in all of them
            return self.recorded, stacks
        return min(self.recorded, max(1, _MANY_CALLS // max(1, measurement.calls))), stacks

    def _recorded(
        self, measurement: Measurement, profile: Profile, count: int, memory: MemoryWatch
    ) -> Iterator[None]:
        models = measurement.models.values()
        try:
            for number in range(count):
                if not memory.has_room():
                    break
                memory.step_begins()
                # Without ``with``: a step that is cut short has no end in the trace.
                measurement.range = new_range(f"{PROFILER_STEP}{number}")
                measurement.range.__enter__()
                yield
                measurement.range.__exit__(None, None, None)
                profile.count += 1
                memory.step_ended()
                measurement.step_ended()
        except GeneratorExit:
            with contained():
                synchronize(devices_of(models))
            raise
        synchronize(devices_of(models))


def in_detail(
    *, records: Sequence[str], shapes: bool, stacks: bool, prepared: int
) -> tuple[Stage, ...]:
    """Return the stages after those for times, in which recording more makes steps slower."""
    if not (records or shapes or stacks):
        return ()
    before = (LeftAlone(prepared, counted=stacks),) if prepared else ()
    return (*before, Profiled(DETAIL, STEPS_IN_DETAIL, 0, records, shapes, stacks))


# Devices and profilers ----------------------------------------------------------------------------


def _kind(activity: ProfilerActivity) -> str:
    """Return the ``torch.device.type`` of the devices that an activity records."""
    if activity.name == "PrivateUse1":
        return privateuse1_name()
    return str(activity.name).lower()


def devices_of(models: Collection[torch.nn.Module]) -> set[torch.device]:
    """Return the devices in use except the host: the models' and all that are initialized."""
    devices = {
        tensor.device for model in models for tensor in (*model.parameters(), *model.buffers())
    }
    for activity in supported_activities() - {ProfilerActivity.CPU}:
        backend = getattr(torch, _kind(activity), None)
        if backend is not None and getattr(backend, "is_initialized", bool)():
            devices.add(torch.device(_kind(activity), backend.current_device()))
    return {device for device in devices if device.type not in ("cpu", "meta")}


def activities(models: Collection[torch.nn.Module]) -> list[ProfilerActivity]:
    """Return what the profiler can record: the host, and the devices in use."""
    kinds = {"cpu", *(device.type for device in devices_of(models))}
    return [activity for activity in supported_activities() if _kind(activity) in kinds]


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for the work on these devices."""
    for device in devices:
        wait = getattr(getattr(torch, device.type, None), "synchronize", None)
        if device.type == "mps":
            torch.mps.synchronize()
        elif wait is not None:
            wait(device)


_LEVEL = "KINETO_LOG_LEVEL"
_ABOVE_ALL = "6"
"""Above each of Kineto's levels, of which the highest is for notes of starts and stops."""


@contextmanager
def _told_to_kineto(name: str, value: str) -> Iterator[None]:
    """Set a variable that C code alone sees: ``os.environ`` stays as it is."""
    os.putenv(name, value)
    try:
        yield
    finally:
        os.unsetenv(name)


@contextmanager
def _quiet(profiler: torch.profiler.profile) -> Iterator[None]:
    """Have Kineto not speak of a GPU that is not there, in the process's first profile.

    Kineto asks for its level only then. With a GPU, its errors are of use. ``os.environ`` and what
    child processes see stay as they are.
    """
    if _LEVEL in os.environ or set(profiler.activities) != {ProfilerActivity.CPU}:
        yield
        return
    with _told_to_kineto(_LEVEL, _ABOVE_ALL):
        yield


_TEARDOWN = "TEARDOWN_CUPTI"
_DETACHES = (12, 6)
"""The CUDA version from which CUPTI can be attached once more, with CUDA graphs too."""
_ROUND_S, _ROUNDS, _MOST_ROUNDS = 0.0005, 2, 100
"""Kineto detaches with a thread of its own, which a busy host may let wait."""


def _tasks() -> set[str]:
    """Return the threads of this process; none where the system does not tell."""
    with suppress(OSError):
        return {path.name for path in Path("/proc/self/task").iterdir()}
    return set()


@contextmanager
def _detached(profiler: torch.profiler.profile) -> Iterator[None]:
    """Have CUPTI leave the process when the profiler stops inside the block.

    Else each launch of the training takes longer from then on: a step that the host limits, by a
    quarter. Kineto asks for the setting where it stops, and detaches in a later call of CUDA. That
    comes here: a recording that began before it would be empty. ``os.environ`` stays as it is, and
    so does the setting of a user.
    """
    if (
        _TEARDOWN in os.environ
        or ProfilerActivity.CUDA not in profiler.activities
        or not (version := torch.version.cuda)
        or tuple(map(int, version.split(".")[:2])) < _DETACHES
    ):
        yield
        return
    before = _tasks()
    try:
        with _told_to_kineto(_TEARDOWN, "1"):
            yield
    finally:
        with contained():  # an error of the device reaches the next step by itself
            for number in range(_MOST_ROUNDS):
                torch.cuda.synchronize()
                time.sleep(_ROUND_S)
                if number >= _ROUNDS and _tasks() <= before:
                    break


@contextmanager
def _prepared(profiler: torch.profiler.profile) -> Iterator[None]:
    """Prepare the profiler; an error inside the block ends it."""
    # A filter of warnings would have Python show again what it has shown once of each line.
    silent = Wrapping(PROFILER_WARNS, lambda _: lambda *_, **__: None)
    with silent, without_inductor(), _quiet(profiler):
        profiler.prepare_trace()
    try:
        yield
    except BaseException:
        # A prepared profiler can only be ended by starting and stopping it.
        profiler.start_trace()
        with _detached(profiler):
            profiler.stop_trace()
        raise


@contextmanager
def _recording(profiler: torch.profiler.profile) -> Iterator[None]:
    """Record what runs inside the block with a prepared profiler."""
    try:
        with without_inductor():  # torch 2.4 asks for it here
            profiler.start_trace()
        yield
    finally:
        if is_recording():  # unless an interrupt came before the start
            with _detached(profiler):
                profiler.stop_trace()
