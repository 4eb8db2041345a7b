"""What the host is at, moment by moment: fetching a batch, in the model, at the loss, optimizing.

Marks say so where there are any: module labels, PyTorch's optimizers and DataLoader, Lightning's
actions. What no mark stands around is told by its place between the model's calls, the backward
passes and the optimizer's steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.timeline import NOTHING, Timeline, distinct, first_started, grouped, layered
from backspot.results.costs import PhaseName
from backspot.trace import Category, Events
from backspot.trace.events import Ints
from backspot.trace.names import OPTIMIZER_STEP
from backspot.trace.names import PROFILER_STEP as STEP_MARK

__all__ = [
    "BACKWARD",
    "COPY",
    "DATA",
    "FORWARD",
    "IDLE",
    "LOSS",
    "NAMES",
    "OPTIMIZER",
    "OTHER",
    "Activity",
    "find_activity",
    "to_device",
]

NAMES: tuple[PhaseName, ...] = get_args(PhaseName)
"""The phases in the order of a step; the values of an activity's timelines are their places."""
_PYTHON = 1_000_000  # nanoseconds: less than this is what any loop does between two steps
DATA, COPY, FORWARD, LOSS, BACKWARD, OPTIMIZER, OTHER, IDLE = range(len(NAMES))

_LIGHTNING = r"\[pl\]\[profile\].*"
_MARKS: tuple[tuple[int, re.Pattern[str]], ...] = (
    (DATA, re.compile(r"enumerate\(DataLoader\)|" + _LIGHTNING + r"(dataloader_next|val_next)$")),
    (COPY, re.compile(_LIGHTNING + "batch_to_device$")),
    (
        OPTIMIZER,
        re.compile("Optimizer[.#]|" + _LIGHTNING + "(zero_grad|configure_gradient_clipping)$"),
    ),
    (
        FORWARD,
        re.compile(r"DistributedDataParallel\.forward|FSDP::|" + _LIGHTNING + "training_step$"),
    ),
)
# What works on all gradients at once, outside the model: clipping, unscaling, zeroing, updating.
_ON_GRADIENTS = re.compile(r"aten::(_foreach_|_fused_(adam|sgd|adagrad)|_amp_|zero_$)")
_NORMS = re.compile(r"aten::(linalg_vector_)?norm$")
_PINS = re.compile(r"aten::_?pin_memory$")
_TO_DEVICE = ("Memcpy HtoD", "CopyHostToDevice")
_FAR = np.iinfo(np.int64).max


def to_device(events: Events, name: Ints) -> np.ndarray:
    """Whether each name is that of a copy from the host to a device."""
    found: np.ndarray = events.name_mask(*_TO_DEVICE)[name]
    return found


@dataclass(frozen=True, slots=True)
class Activity:
    """What the host is at; ``NOTHING`` where nothing is recorded.

    Attributes:
        host: the threads that run the training program, as one, gaps between operators included.
        threads: what launches on each thread are for, as far as it tells by itself.
        beside: what they are for where it does not.
    """

    host: Timeline
    threads: dict[int, Timeline]
    beside: Timeline

    def of_launches(self, threads: Ints, times: Ints) -> Ints:
        """What was launched at each of ``times`` is for; of no known thread, by the program's."""
        found, beside = self.host.at(times), self.beside.at(times)
        for thread, here in grouped(threads):
            if thread in self.threads:
                own = self.threads[thread].at(times[here])
                found[here] = np.where(own >= 0, own, beside[here])
        return found


@dataclass(frozen=True, slots=True)
class _Sections:
    """What leads up to each pass; arrays with one entry a pass.

    Attributes:
        begin: when the pass before, or the optimizer's step after that, ended.
        forward: when the model's first call begins, ``_FAR`` where there is none.
        done: when its last call ends, ``NOTHING`` where there is none.
        backward: when the pass starts.
    """

    begin: Ints
    forward: Ints
    done: Ints
    backward: Ints

    def of(self, times: Ints) -> tuple[Ints, np.ndarray]:
        """The section that each time lies in, and whether it lies in any."""
        at = np.searchsorted(self.backward, times, side="right")
        inside = at < len(self.backward)
        at = np.minimum(at, len(self.backward) - 1)
        return at, inside & (times >= self.begin[at])


def find_activity(events: Events, ownership: Ownership) -> Activity:
    """Tell what the host is at.

    Args:
        events: the trace.
        ownership: its owners.
    """
    return _Finder(events, ownership).find()


class _Finder:
    def __init__(self, events: Events, ownership: Ownership) -> None:
        self.events, self.o = events, ownership
        self.passes = ownership.passes
        self.marks = {
            phase: events.chosen(_mask(events, pattern), Category.ANNOTATION)
            for phase, pattern in _MARKS
        }
        self.marks_of = {
            phase: dict(grouped(events.thread, marks)) for phase, marks in self.marks.items()
        }
        steps = self.marks[OPTIMIZER]
        steps = steps[events.name_mask(OPTIMIZER_STEP)[events.name[steps]]]
        self.steps = steps[np.argsort(events.start[steps], kind="stable")]
        self.calls, self.losses = self._calls()
        self.labelled = len(self.calls) > 0
        self.tops = self._outermost()
        self.sections = self._sections()
        work = ownership.work
        copies = np.flatnonzero(to_device(events, work.name))
        self.copies_of = {
            thread: work.launch[mine] for thread, mine in grouped(work.thread, copies)
        }
        self.on_gradients, self.pins = _mask(events, _ON_GRADIENTS), _mask(events, _PINS)
        self.phase_of = np.full(len(events.start) + 1, NOTHING)  # of each event outside all spans

    def _calls(self) -> tuple[Ints, Ints]:
        """The outermost calls of models, and those of losses outside of them; spans."""
        spans = self.o.spans
        outer = np.flatnonzero((spans.module >= 0) & (self.passes.of_span < 0) & (spans.parent < 0))
        named = [
            module.class_name.endswith("Loss") or module.path in ("loss", "loss_fn", "criterion")
            for module in spans.modules
        ]
        loss = np.array([*named, False], bool)[spans.module[outer]]
        # A model may be called a loss, where there is no other.
        return (outer[~loss], outer[loss]) if not loss.all() else (outer, outer[:0])

    def _outermost(self) -> dict[int, tuple[Ints, Timeline]]:
        """On each thread what runs outside all calls and nodes: operators, runtime calls."""
        events = self.events
        index = events.of(Category.OPERATOR, Category.RUNTIME)
        tops = {}
        for thread, mine in grouped(events.thread, index):
            mine = mine[self.o.spans.of(events, mine) < 0]
            line = first_started(events.start[mine], events.end[mine], mine)
            tops[thread] = (line.values[line.values >= 0], line)
        return tops

    def _sections(self) -> _Sections:
        events, passes, spans = self.events, self.passes, self.o.spans
        begin = np.append(NOTHING, np.maximum.accumulate(passes.end)[:-1])
        ended = np.append(NOTHING, np.sort(events.end[self.steps]))
        begin = np.maximum(begin, ended[np.searchsorted(ended, passes.start, side="right") - 1])
        count = len(passes.start)
        forward, done = np.full(count, _FAR), np.full(count, NOTHING)
        sections = _Sections(begin, forward, done, passes.start)
        if self.labelled:
            start, end = spans.start[self.calls], spans.end[self.calls]
        else:
            start, end = self._unlabelled()
        at, inside = sections.of(start)
        np.minimum.at(forward, at[inside], start[inside])
        np.maximum.at(done, at[inside], end[inside])
        np.minimum(done, passes.start, out=done)
        if not self.labelled:
            self._cut_losses(sections)
        return sections

    def _unlabelled(self) -> tuple[Ints, Ints]:
        """Without labels the model is what builds nodes, and no mark says to be something else."""
        events = self.events
        made = [
            top[(events.sequence[top] >= 0) & (events.forward_thread[top] <= 0)]
            for top, _ in self.tops.values()
        ]
        index = np.concatenate([np.empty(0, np.int64), *made])
        for phase in (DATA, COPY, OPTIMIZER):
            index = index[self._in_marks(self.marks[phase], index) < 0]
        # The pass begins as the last of them ends: what it calls first is the engine's own.
        return events.start[index], np.full(len(index), _FAR)

    def _cut_losses(self, sections: _Sections) -> None:
        """Where an operator of that name says where the loss begins, the model ends there."""
        events = self.events
        is_loss = np.array(["loss" in name.lower() for name in events.names], bool)
        for top, _ in self.tops.values():
            start = np.sort(events.start[top[is_loss[events.name[top]]]])
            at, inside = sections.of(start)
            inside &= start > sections.forward[at]
            sections.done[at[inside]] = start[inside]  # the last assignment stays: the last loss

    def _in_marks(self, marks: Ints, index: Ints) -> Ints:
        """The mark around each event, ``NOTHING`` for none."""
        events = self.events
        found = np.full(len(index), NOTHING, np.int64)
        asked = dict(grouped(events.thread[index]))
        for thread, mine in grouped(events.thread, marks):
            here = asked.get(thread, mine[:0])
            line = first_started(events.start[mine], events.end[mine], mine)
            found[here] = line.at(events.start[index[here]])
        return found

    # Timelines -----------------------------------------------------------------------------------

    def find(self) -> Activity:
        """Lay what is known over each other, the surest first."""
        marks = np.concatenate([*self.marks.values()])
        threads = sorted({*distinct(self.events.thread[marks]), *self.tops})
        between = {phase: _constant(*times, phase) for phase, times in self._between().items()}
        behind = [self._marked(FORWARD, thread) for thread in threads]
        called = self._called()
        own = {
            thread: self._of_thread(thread, called.get(thread, _NONE), between)
            for thread in threads
        }
        host = [own[thread] for thread in self._program() if thread in own]
        beside = layered(_NONE, *between.values(), *behind)
        return Activity(layered(_NONE, *host, beside, self._waiting()), own, beside)

    def _program(self) -> list[int]:
        """The threads that run the training program, the one that calls the model most first."""
        events, spans = self.events, self.o.spans
        marks = events.named(Category.ANNOTATION, STEP_MARK)
        where = [
            np.repeat(spans.thread[self.calls], 2),
            *(events.thread[found] for found in (marks, *self.marks.values())),
        ]
        if not self.labelled:
            where += [
                events.thread[top[(events.sequence[top] >= 0)]] for top, _ in self.tops.values()
            ]
        threads, votes = np.unique(np.concatenate(where), return_counts=True)
        return [int(thread) for thread in threads[np.argsort(-votes, kind="stable")]]

    def _called(self) -> dict[int, Timeline]:
        """The calls of models and losses on each thread."""
        spans = self.o.spans
        called = np.concatenate([self.calls, self.losses])
        kind = np.repeat([FORWARD, LOSS], [len(self.calls), len(self.losses)])
        return {
            thread: first_started(spans.start[called[here]], spans.end[called[here]], kind[here])
            for thread, here in grouped(spans.thread[called])
        }

    def _of_thread(self, thread: int, called: Timeline, between: dict[int, Timeline]) -> Timeline:
        return layered(
            self._marked(DATA, thread),
            called,
            self._marked(COPY, thread),
            self._optimizing(thread),
            self._operators(thread, between),
        )

    def _marked(self, phase: int, thread: int) -> Timeline:
        events, marks = self.events, self.marks_of[phase].get(thread, _NOBODY)
        return _constant(events.start[marks], events.end[marks], phase)

    def _optimizing(self, thread: int) -> Timeline:
        """The optimizer's marks: of a step that runs its own passes, what follows the last."""
        events, marks = self.events, self.marks_of[OPTIMIZER].get(thread, _NOBODY)
        start, end = events.start[marks], events.end[marks]
        return _constant(self.passes.after(start, end), end, OPTIMIZER)

    def _operators(self, thread: int, between: dict[int, Timeline]) -> Timeline:
        """What stands in no call and under no mark, by its name and its place."""
        if thread not in self.tops:
            return _NONE
        events, (top, line) = self.events, self.tops[thread]
        start, name = events.start[top], events.name[top]
        phase = np.full(len(top), OTHER)
        phase[self.on_gradients[name]] = OPTIMIZER
        for kind, times in between.items():
            phase[times.at(start) >= 0] = kind
        launching = line.at(self.copies_of.get(thread, _NOBODY))
        phase[self.pins[name] | np.isin(top, launching)] = COPY
        self.phase_of[top] = phase
        return Timeline(line.edges, self.phase_of[line.values])

    def _between(self) -> dict[int, tuple[Ints, Ints]]:
        """What has its place between marks: forwards of several calls, losses, clipping."""
        sections, passes = self.sections, self.passes
        done = sections.done.copy()
        if self.labelled:
            # A pass after one of the same step, without a call between: a loss made of gradients.
            step, ended = self.o.steps.of_pass, np.append(NOTHING, passes.end[:-1])
            again = (done < 0) & (np.append(NOTHING, step[:-1]) == step) & (sections.begin == ended)
            done = np.where(again, sections.begin, done)
        several = sections.forward < sections.done
        return {
            FORWARD: (sections.forward[several], sections.done[several]),
            LOSS: self._working(done[done >= 0], passes.start[done >= 0]),
            OPTIMIZER: self._clipping(),
        }

    def _clipping(self) -> tuple[Ints, Ints]:
        """From the first operator on all gradients after a pass to the optimizer's step."""
        events, passes = self.events, self.passes
        step = events.start[self.steps]
        last = np.searchsorted(passes.start, step, side="left") - 1
        step, last = step[last >= 0], last[last >= 0]
        ended = np.maximum.accumulate(passes.end)[last]
        calls = np.sort(self.o.spans.start[self.calls])
        none = np.searchsorted(calls, ended, side="left") == np.searchsorted(calls, step)
        return self._working(
            ended[none], step[none], _mask(events, _ON_GRADIENTS) | _mask(events, _NORMS)
        )

    def _working(
        self, after: Ints, before: Ints, names: np.ndarray | None = None
    ) -> tuple[Ints, Ints]:
        """Between two times each: from the first operator (of these names) to the last's end."""
        events, spans = self.events, self.o.spans
        index = np.concatenate([np.empty(0, np.int64), *(top for top, _ in self.tops.values())])
        start = np.append(events.start[index], spans.start[self.losses])
        end = np.append(events.end[index], spans.end[self.losses])
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        if names is None:
            first = np.append(start, _FAR)
        else:
            first = np.append(np.sort(events.start[index[names[events.name[index]]]]), _FAR)
        begin = first[np.searchsorted(first, after, side="left")]
        latest = np.append(NOTHING, np.maximum.accumulate(end))
        finish = np.minimum(latest[np.searchsorted(start, before, side="left")], before)
        kept = begin < finish
        return begin[kept], finish[kept]

    def _waiting(self) -> Timeline:
        """Without a loader's marks: nothing recorded before the batch is copied, or is used.

        With devices in the trace only a copy tells that a batch came.
        """
        sections, work = self.sections, self.o.work
        if len(self.marks[DATA]) or not len(sections.begin):
            return _NONE
        marks = np.append(
            NOTHING, np.sort(self.events.start[self.events.named(Category.ANNOTATION, STEP_MARK)])
        )
        at = np.searchsorted(marks, sections.backward, side="right") - 1
        begin = np.maximum(np.maximum(sections.begin, marks[at]), 0)
        known = sections.forward < _FAR
        if len(work.start):
            copied = to_device(self.events, work.name) & (work.span < 0) & (work.launch >= 0)
            times = np.append(NOTHING, np.sort(work.launch[copied]))
            end = times[np.searchsorted(times, sections.forward, side="left") - 1]
        else:
            first = np.append(NOTHING, self.o.steps.of_pass[:-1]) != self.o.steps.of_pass
            known, end = known & first, sections.forward
        known &= end > begin + _PYTHON
        return _constant(begin[known], end[known], DATA)


_NOBODY = np.empty(0, np.int64)
_NONE = Timeline(_NOBODY, _NOBODY)


def _constant(start: Ints, end: Ints, value: int) -> Timeline:
    """``value`` where any of these holds."""
    return first_started(start, end, np.full(len(start), value))


def _mask(events: Events, pattern: re.Pattern[str]) -> np.ndarray:
    """For each distinct name, whether it starts as the pattern says."""
    return np.fromiter((pattern.match(name) is not None for name in events.names), bool)
