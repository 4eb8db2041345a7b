"""What a whole training took: each of its steps was noted, without a profiler."""

from __future__ import annotations

from dataclasses import dataclass, field

from backspot.formatting import counted
from backspot.presented import public
from backspot.results.quantities import SELDOM, Count, Measure
from backspot.results.rare import RareWork

WAITING = "waiting for data"
"""The rare work of steps in which a batch is late."""


@public
@dataclass(frozen=True, slots=True)
class Apart:
    """Time of a training that is no step, or steps that come once.

    Attributes:
        name: ``"start"`` for slow first steps, ``"compilation"`` for steps in which code was
            compiled, ``"backspot"`` for what was recorded, tried or prepared.
        steps: Number of steps in that time.
        wall_ns: Clock time in nanoseconds.
    """

    name: str
    steps: Count
    wall_ns: Count


@public
@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps of a training that follow each other.

    Attributes:
        first: Number of the first step, from 1.
        steps: Number of steps whose time is known.
        step_ns: Mean clock time of a step, in nanoseconds.
        typical_ns: Mean of those steps alone that are not much longer than most.
    """

    first: Count
    steps: Count
    step_ns: Count
    typical_ns: Count


@public
@dataclass(frozen=True, slots=True)
class LoaderUse:
    """What a training asked of one ``DataLoader`` with workers, from its first step on.

    Attributes:
        workers: Number of its workers.
        batches: Number of batches that were asked for while nothing was recorded.
        late: Number of them that had not arrived by then.
        waited_ns: Clock time for which the training waited for these, in nanoseconds.
        behind: Number of the late ones that steps train on and that come after twice as many
            batches of their epoch as the workers keep ready: all workers begin with an epoch.
    """

    workers: Count
    batches: Count
    late: Count
    waited_ns: Count
    behind: Count = 0


@public
@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """Memory of the process in the course of a training, in bytes.

    Attributes:
        first_bytes: Resident memory after the first steps.
        last_bytes: Resident memory at the end.
        per_step_bytes: By how much it grows from step to step; 0 where it does not keep growing.
    """

    first_bytes: Count
    last_bytes: Count
    per_step_bytes: Measure


@public
@dataclass(frozen=True, slots=True)
class Training:
    """All steps of a training, noted without a profiler.

    A step is from the end of one optimizer step to the end of the next one. All times are integer
    nanoseconds of the host's clock. The four parts sum to ``step_ns`` exactly.

    Attributes:
        steps: Number of optimizer steps that ended.
        counted: Number of steps that the mean is of.
        step_ns: Mean clock time of a step.
        data_ns: Part of it in loaders: while they begin an epoch, and in ``next``.
        forward_ns: What lies between the other parts: the forward, the loss, and all else.
        backward_ns: Part of it in the outermost backward.
        optimizer_ns: Part of it in ``step`` of the optimizers. One that calls the forward itself,
            as LBFGS does, counts as forward.
        typical_ns: Mean of the steps alone that have no rare work and were not held up.
        longest_ns: The longest step.
        held_up_ns: By how much a step is longer in the mean as the machine held up some of them.
        held_up: Number of these steps.
        rare: Work that happens in some of the steps only, the most time first.
        change: By how much steps became slower in the course of the training, as a share: 0.1 for
            a tenth; 0 where they did not.
        stretches: The training in pieces, at most 64.
        loaders: The loaders with workers, most batches first. Where there are many, as a script
            makes a new one for each epoch, those of few batches are one of them.
        memory: The process's memory; ``None`` where it is not known.
        apart: What is no step, and what comes once; the longest first.
    """

    steps: Count
    counted: Count
    step_ns: Count
    data_ns: Count
    forward_ns: Count
    backward_ns: Count
    optimizer_ns: Count
    typical_ns: Count
    longest_ns: Count
    held_up_ns: Count = 0
    held_up: Count = 0
    rare: tuple[RareWork, ...] = ()
    change: Measure = 0.0
    stretches: tuple[Stretch, ...] = ()
    loaders: tuple[LoaderUse, ...] = ()
    memory: MemoryGrowth | None = None
    apart: tuple[Apart, ...] = ()

    def __repr__(self) -> str:
        return f"<Training: {counted(self.steps, 'step')} of {self.step_ns / 1e6:.3f} ms>"


@dataclass(frozen=True, kw_only=True)
class InReport:
    """What each report has.

    Attributes:
        training: All steps of the training, noted without a profiler; ``None`` where they were not.
    """

    __slots__ = ()

    training: Training | None = field(default=None, metadata=SELDOM)
