"""A whole training in words: its steps, what they wait for, and what changed in its course."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backspot.formatting import counted, duration, percent, size
from backspot.render._rare import name_of
from backspot.render._sections import Saying, Section
from backspot.render.view import View
from backspot.results.rare import RareWork
from backspot.results.report import Report
from backspot.results.training import LoaderUse, Training

_NOTABLE = 0.02
"""Share of the time from which a part is named."""
_NEARLY_ALL = 0.9
"""Share of the steps from which a mean is said to be of all: the first, and those that Backspot
recorded, are in none."""
_LATE = 0.02
"""Share of a loader's batches from which it is said that they were late."""
_EVEN = 0.1
"""By how much the period of the same rare work can differ between all steps and recorded ones."""


def to_json(training: Training) -> bytes:
    """All steps of a training as JSON in UTF-8, for a training that ends before its report."""
    from backspot.render.json import plain

    return b'{"schema":"backspot.training/1",' + plain(training)[1:] + b"\n"


def training_line(training: Training, *, has_gpu: bool = False) -> str:
    """Return how long the steps of a training took, and what they are made of, in one sentence.

    Args:
        has_gpu: whether a GPU works on while the host, whose time this is, goes on or waits for it.
    """
    steps = counted(training.counted, "step")
    if training.counted < _NEARLY_ALL * training.steps:
        steps = f"{training.counted:,} of {counted(training.steps, 'step')}"
    facts = [
        f"{percent(nanoseconds / training.step_ns)} {name}"
        for name, nanoseconds in (
            ("waiting for data", training.data_ns),
            ("forward and all else", training.forward_ns),
            ("backward", training.backward_ns),
            ("optimizer", training.optimizer_ns),
        )
        if nanoseconds >= _NOTABLE * training.step_ns
    ]
    whose = "the host: " * has_gpu
    return f"The training: {steps} of {duration(training.step_ns)} ({whose}{', '.join(facts)})."


def rescaled(printed: Report, completed: Report) -> str:
    """Return that the times of a report that was printed before are others now; or ``""``."""
    before, now = duration(printed.step_ns), duration(completed.step_ns)
    if printed.clock != "real" or completed.clock != "real" or before == now:
        return ""
    return f", and its times: those that were printed are of a step of {before}, not {now}"


def training_facts(training: Training, recorded: Sequence[RareWork] = ()) -> Iterator[str]:
    """Iterate over what else is worth a sentence, what costs most time first.

    Args:
        recorded: rare work of the recorded steps, which say what it is, and are shown elsewhere.
    """
    for work in training.rare:
        if any(
            name_of(other) == work.name or abs(other.period - work.period) <= _EVEN * work.period
            for other in recorded
        ):
            continue
        yield (
            f"Once in {work.period:.3g} steps: {work.name}, {duration(work.wall_ns)}, "
            f"{duration(work.per_step_ns)} a step."
        )
    for workers, uses in _late(training).items():
        late = sum(use.late for use in uses)
        whose = "loader" if len(uses) == 1 else "loaders"
        yield (
            f"{late:,} of {sum(use.batches for use in uses):,} batches were late: the "
            f"{counted(workers, 'worker')} of their {whose} cannot keep up, by "
            f"{duration(sum(use.waited_ns for use in uses) / late)} each time."
        )
    if training.held_up_ns >= _NOTABLE * training.step_ns:
        yield (
            f"The machine held up {counted(training.held_up, 'step')}: "
            f"{duration(training.held_up_ns)} a step in the mean."
        )
    if training.change:
        yield f"Steps became {percent(training.change)} slower in the course of the training."
    growth = training.memory
    if growth is not None and growth.per_step_bytes:
        yield (
            f"The memory of the process grew from {size(growth.first_bytes)} to "
            f"{size(growth.last_bytes)}: {size(round(1000 * growth.per_step_bytes))} in 1,000 "
            "steps."
        )
    yield from not_counted(training)


def not_counted(training: Training) -> list[str]:
    """Return what is no step of the training, in a sentence; nothing if that is little."""
    apart = [
        f"{duration(time.wall_ns)} {_APART.get(time.name, time.name)}"
        + (f" ({counted(time.steps, 'step')})" if time.steps else "")
        for time in training.apart
        if time.wall_ns >= _NOTABLE * training.step_ns * training.counted
    ]
    return [f"Not counted: {', '.join(apart)}."] if apart else []


def _late(training: Training) -> dict[int, list[LoaderUse]]:
    """Return the loaders whose batches were late, by their number of workers.

    A script may make a new loader for each epoch, with the same number of workers.
    """
    late: dict[int, list[LoaderUse]] = {}
    for use in training.loaders:
        if use.late > _LATE * use.batches and use.waited_ns:
            late.setdefault(use.workers, []).append(use)
    return late


_APART = {
    "start": "in slow first steps",
    "compilation": "in steps that compiled code",
    "backspot": "for Backspot's own recording",
}


def _sections(report: Report, _: View) -> list[Section]:
    """All steps of the training, and what else is known of them."""
    training = report.training
    if training is None:
        return []
    first = training_line(training, has_gpu=report.has_gpu)
    sentences = [first, *training_facts(training, report.rare)]
    brief = min(2, len(sentences) - len(not_counted(training)))
    return [Section("sentences", "training", sentences, brief=brief, gives_way=1)]


SAYING = Saying(_sections)
