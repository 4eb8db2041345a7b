"""Classify the host's time into the phases of a step, such as data, forward, loss and optimizer.

Marks decide where there are any: module labels, and the annotations of PyTorch's optimizers and
DataLoader and of Lightning's actions. Without a mark, the position decides: between the model's
calls, the backward passes and the optimizer's steps. Without labels either, what comes before a
pass is the forward if the pass runs nodes that it made, and no phase at all otherwise.

What has no mark is known by what it does, where it does it: changes in place of as many tensors as
parameters have gradients, behind an optimizer's step, are an average of the weights; values that
the host reads outside of all modules are metrics. What calls of a model are for that make no node,
while others of the same model do, ``forwards`` tells apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import get_args

import msgspec
import numpy as np

from backspot.analysis.accounting.forwards import Forwards, find_forwards
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.updates import make_nodes, optimizer_steps
from backspot.analysis.timeline import (
    EMPTY,
    FAR,
    NOTHING,
    Timeline,
    distinct,
    enclosing,
    first_started,
    grouped,
    is_in,
    layered,
    merged,
)
from backspot.results.costs import WITHOUT_GRADIENTS, PhaseName
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

NAMES: tuple[PhaseName, ...] = get_args(PhaseName)
"""The phases in the order of a step. The timelines of an activity have their indices as values."""
DATA = NAMES.index("data")
HOST = NAMES.index("host")
COPY = NAMES.index("copy")
FORWARD = NAMES.index("forward")
LOSS = NAMES.index("loss")
METRICS = NAMES.index("metrics")
BACKWARD = NAMES.index("backward")
SCALER = NAMES.index("scaler")
CLIPPING = NAMES.index("clipping")
OPTIMIZER = NAMES.index("optimizer")
ZERO_GRAD = NAMES.index("zero_grad")
AVERAGING = NAMES.index("averaging")
SAVING = NAMES.index("saving")
TRAINER = NAMES.index("trainer")
OTHER = NAMES.index("other")
IDLE = NAMES.index("idle")
USES = tuple(map(NAMES.index, WITHOUT_GRADIENTS))
"""What models run for without gradients, as ``forwards`` tells it apart."""

_OF_VALUE = 20
"""Operators that compute one value, at most: who reads the result of more runs a model."""
_MANY = 0.5
"""Share of the parameters that an average of the weights, or a copy of them, has to change."""
_PYTHON = 1_000_000  # nanoseconds: any loop spends less than this in Python between two steps
_MARKS: dict[int, Callable[[str], bool]] = {
    DATA: names.is_fetch_mark,
    COPY: names.is_copy_mark,
    CLIPPING: names.is_clipping_mark,
    ZERO_GRAD: names.is_zero_grad_mark,
    OPTIMIZER: names.is_optimizer_mark,
    FORWARD: names.is_forward_mark,
    SAVING: names.is_saving_mark,
    TRAINER: names.is_trainer_mark,
}
_NO_EVENTS = np.empty(0, np.int64)


def to_device(events: Events, name: Ints) -> Mask:
    """Whether each name is that of a copy from the host to a device."""
    found: Mask = events.prefix_mask(*names.TO_DEVICE)[name]
    return found


class Activity(msgspec.Struct, frozen=True):
    """The phase that the host works for at each moment; ``NOTHING`` where nothing is recorded.

    Attributes:
        host: the threads that run the training program as one, gaps between operators included.
        threads: the phase on each thread, as far as the thread's own events decide it.
        beside: the phase for launches that the events of their thread do not decide.
    """

    host: Timeline
    threads: dict[int, Timeline]
    beside: Timeline

    def of_launches(self, threads: Ints, times: Ints) -> Ints:
        """Return the phase of launches on threads at times; unknown threads count as the host."""
        phases, beside = self.host.at(times), self.beside.at(times)
        for thread, members in grouped(threads):
            if thread in self.threads:
                own = self.threads[thread].at(times[members])
                phases[members] = np.where(own >= 0, own, beside[members])
        return phases


class _Sections(msgspec.Struct, frozen=True):
    """What comes before each pass; arrays with one entry a pass.

    Attributes:
        begin: when the pass before ended, or the optimizer's step after that pass.
        forward: when the model's first call begins, ``FAR`` if there is none.
        done: when the model's last call ends, ``NOTHING`` if there is none.
        backward: when the pass starts.
    """

    begin: Ints
    forward: Ints
    done: Ints
    backward: Ints

    def of(self, times: Ints) -> tuple[Ints, Mask]:
        """Return the section of each time, and whether the time lies in one."""
        section = np.searchsorted(self.backward, times, side="right")
        inside = section < len(self.backward)
        section = np.minimum(section, len(self.backward) - 1)
        return section, inside & (times >= self.begin[section])


def find_activity(events: Events, ownership: Ownership) -> Activity:
    """Classify the host's time."""
    context = _Context(events, ownership)
    own = {
        thread: layered(*(layer(context, thread) for layer in _LAYERS))
        for thread in context.threads
    }
    behind = [_marked(FORWARD)(context, thread) for thread in context.threads]
    beside = layered(*reversed(context.between.values()), *behind)
    program = [own[thread] for thread in context.program if thread in own]
    trainer = [_marked(TRAINER)(context, thread) for thread in context.threads]
    return Activity(layered(*program, beside, *trainer, _before(context)), own, beside)


class _Context:
    """What the layers look at. Each part is computed once, when it is first needed."""

    def __init__(self, events: Events, ownership: Ownership) -> None:
        self.events, self.o, self.passes = events, ownership, ownership.passes

    # Marks and calls -----------------------------------------------------------------------------

    @cached_property
    def marks(self) -> dict[int, Ints]:
        """What marks each phase: annotations, and compiled steps of optimizers."""
        marks = {
            phase: self.events.chosen(self.events.names_where(is_mark), Category.ANNOTATION)
            for phase, is_mark in _MARKS.items()
        }
        return marks | {OPTIMIZER: merged(marks[OPTIMIZER], self.updates)}

    @cached_property
    def marks_of(self) -> dict[int, dict[int, Ints]]:
        """The annotations that mark each phase, on each thread."""
        thread = self.events.thread
        return {phase: dict(grouped(thread, marks)) for phase, marks in self.marks.items()}

    @cached_property
    def updates(self) -> Ints:
        """The optimizer's steps, by start."""
        return optimizer_steps(self.events)

    def _in_updates(self, threads: Ints, times: Ints) -> Mask:
        """Whether each moment lies in an optimizer's step, behind any closure."""
        start, end = self.events.start[self.updates], self.events.end[self.updates]
        begin = self.passes.after(start, end)
        in_updates: Mask = enclosing(self.events, self.updates, threads, times, start=begin) >= 0
        return in_updates

    @cached_property
    def _outer_calls(self) -> tuple[Ints, Ints]:
        """The outermost calls of models, and those of losses outside of models; spans."""
        spans = self.o.spans
        outer = np.flatnonzero((spans.module >= 0) & (self.passes.of_span < 0) & (spans.parent < 0))
        outer = outer[~self._in_updates(spans.thread[outer], spans.start[outer])]
        named = [
            module.class_name.endswith("Loss")
            or module.path in ("loss", "loss_fn", "criterion")
            or (module.is_function and "loss" in module.path.lower())
            for module in spans.modules
        ]
        loss = np.array([*named, False], bool)[spans.module[outer]]
        # If all are named like losses, they are the model.
        return (outer[~loss], outer[loss]) if not loss.all() else (outer, outer[:0])

    @cached_property
    def forwards(self) -> Forwards:
        """What the outermost calls of models are for."""
        marks = self.marks[DATA], self.marks[ZERO_GRAD]
        return find_forwards(self.events, self.o, self._outer_calls[0], *marks)

    @property
    def calls(self) -> Ints:
        """The outermost calls of models but those without gradients that tell a use; spans."""
        return self._calls_and_functions[0]

    @property
    def functions(self) -> Ints:
        """The outermost calls of compiled functions, and of no model, that make no node; spans."""
        return self._calls_and_functions[1]

    @cached_property
    def _calls_and_functions(self) -> tuple[Ints, Ints]:
        calls, spans = self.forwards.training, self.o.spans
        is_function = np.array([module.is_function for module in spans.modules] + [False], bool)
        apart = is_function[spans.module[calls]]
        if apart.any():
            intervals = (column[calls] for column in (spans.thread, spans.start, spans.end))
            apart &= ~make_nodes(self.events, *intervals)
        return calls[~apart], calls[apart]

    @property
    def losses(self) -> Ints:
        """The calls of losses outside of models; spans."""
        return self._outer_calls[1]

    @property
    def labelled(self) -> bool:
        """Whether labels show where the model is called."""
        return len(self.calls) > 0

    @cached_property
    def called(self) -> dict[int, Timeline]:
        """The calls of models, losses and compiled functions on each thread."""
        spans, forwards = self.o.spans, self.forwards
        spans_of = {FORWARD: self.calls, LOSS: self.losses, OTHER: self.functions}
        called = np.concatenate([*spans_of.values(), forwards.bare])
        uses = [NAMES.index(name) for name in forwards.phase]
        phase = np.repeat([*spans_of], [*map(len, spans_of.values())])
        phase = np.concatenate([phase, np.array(uses, np.int64)])
        return {
            thread: first_started(
                spans.start[called[members]], spans.end[called[members]], phase[members]
            )
            for thread, members in grouped(spans.thread[called])
        }

    # What runs outside of spans ------------------------------------------------------------------

    @cached_property
    def tops(self) -> dict[int, tuple[Ints, Timeline]]:
        """On each thread what runs outside all calls and nodes: operators and runtime calls."""
        events = self.events
        index = events.of(Category.OPERATOR, Category.RUNTIME)
        tops = {}
        for thread, members in grouped(events.thread, index):
            outside = members[self.o.spans.of(events, members) < 0]
            line = first_started(events.start[outside], events.end[outside], outside)
            tops[thread] = (line.values[line.values >= 0], line)
        return tops

    @cached_property
    def copies_of(self) -> dict[int, Ints]:
        """The launches of copies to a device on each thread."""
        work = self.o.work
        copies = np.flatnonzero(to_device(self.events, work.name))
        return {thread: work.launch[copied] for thread, copied in grouped(work.thread, copies)}

    @cached_property
    def on_gradients(self) -> Mask:
        """For each name whether it is that of an operator on all gradients at once."""
        return self.events.names_where(names.is_gradient_operator)

    @cached_property
    def pins(self) -> Mask:
        """For each name whether it is that of an operator that pins memory."""
        return self.events.names_where(names.is_pin_memory)

    # Threads -------------------------------------------------------------------------------------

    @cached_property
    def threads(self) -> list[int]:
        """All threads with marks or operators."""
        marks = np.concatenate([*self.marks.values()])
        return sorted({*distinct(self.events.thread[marks]), *self.tops})

    @cached_property
    def program(self) -> list[int]:
        """The threads that run the training program; the one with most calls of models first."""
        events, spans = self.events, self.o.spans
        marks = events.prefixed(Category.ANNOTATION, names.PROFILER_STEP)
        threads_of = [
            np.repeat(spans.thread[self.calls], 2),
            *(events.thread[marked] for marked in (marks, *self.marks.values())),
        ]
        if not self.labelled:
            threads_of += [
                events.thread[top[(events.sequence[top] >= 0)]] for top, _ in self.tops.values()
            ]
        threads, votes = np.unique(np.concatenate(threads_of), return_counts=True)
        return [int(thread) for thread in threads[np.argsort(-votes, kind="stable")]]

    # What comes before each pass -----------------------------------------------------------------

    @cached_property
    def sections(self) -> _Sections:
        """What comes before each pass."""
        events, passes, spans = self.events, self.passes, self.o.spans
        begin = np.append(NOTHING, np.maximum.accumulate(passes.end)[:-1])
        ended = np.append(NOTHING, np.sort(events.end[self.updates]))
        begin = np.maximum(begin, ended[np.searchsorted(ended, passes.start, side="right") - 1])
        count = len(passes.start)
        forward, finished = np.full(count, FAR), np.full(count, NOTHING)
        sections = _Sections(begin, forward, finished, passes.start)
        if self.labelled:
            start, end = spans.start[self.calls], spans.end[self.calls]
        else:
            start, end = self._unlabelled_forward()
        section, inside = sections.of(start)
        np.minimum.at(forward, section[inside], start[inside])
        np.maximum.at(finished, section[inside], end[inside])
        np.minimum(finished, passes.start, out=finished)
        if not self.labelled:
            self._keep_joined(sections)
            self._cut_losses(sections)
        return sections

    def _unlabelled_forward(self) -> tuple[Ints, Ints]:
        """Without labels, the model is what makes nodes and has no mark of another phase."""
        events = self.events
        makers = [
            top[(events.sequence[top] >= 0) & (events.forward_thread[top] <= 0)]
            for top, _ in self.tops.values()
        ]
        index = np.concatenate([_NO_EVENTS, *makers])
        for phase in (DATA, COPY, CLIPPING, ZERO_GRAD, OPTIMIZER):
            thread, start = events.thread[index], events.start[index]
            index = index[enclosing(events, self.marks[phase], thread, start) < 0]
        # The last of them ends with the start of the pass, because the engine is called first.
        return events.start[index], np.full(len(index), FAR)

    def _keep_joined(self, sections: _Sections) -> None:
        """Leave out each forward of which the pass after it runs no node.

        In a pipeline a pass comes after the forward of other data.
        """
        join, of_span = self.o.join, self.passes.of_span
        node = np.flatnonzero((join.operator >= 0) & (of_span >= 0))
        section, inside = sections.of(self.events.start[join.operator[node]])
        other = np.ones(len(sections.begin), bool)
        other[section[inside & (section == of_span[node])]] = False
        sections.forward[other], sections.done[other] = FAR, NOTHING

    @cached_property
    def _last_use(self) -> Ints:
        """When the last operator begins that uses a parameter of which a pass has the gradient."""
        join, of_span = self.o.join, self.passes.of_span
        feeder = join.feeder[join.feeder >= 0]
        feeder = feeder[(join.operator[feeder] >= 0) & (of_span[feeder] >= 0)]
        last = np.full(len(self.passes.start), NOTHING)
        np.maximum.at(last, of_span[feeder], self.events.start[join.operator[feeder]])
        return last

    def _cut_losses(self, sections: _Sections) -> None:
        """End the model where the last operator with "loss" in its name begins.

        It is part of the model if an operator after it uses a parameter.
        """
        events = self.events
        is_loss = events.names_where(lambda name: "loss" in name.lower())
        for top, _ in self.tops.values():
            top = top[is_loss[events.name[top]]]
            top = top[np.argsort(events.start[top], kind="stable")]
            start = events.start[top]
            section, inside = sections.of(start)
            inside &= (start > sections.forward[section]) & (
                events.end[top] >= self._last_use[section]
            )
            sections.done[section[inside]] = start[
                inside
            ]  # the last assignment stays: the last loss

    # What lies between marks ---------------------------------------------------------------------

    @cached_property
    def between(self) -> dict[int, Timeline]:
        """Phases by their position: forwards of several calls, losses, clipping."""
        sections, passes = self.sections, self.passes
        finished = sections.done.copy()
        if self.labelled:
            # A pass after one of the same step, without a call between: a loss made of gradients.
            step, ended = self.o.steps.of_pass, np.append(NOTHING, passes.end[:-1])
            again = (
                (finished < 0) & (np.append(NOTHING, step[:-1]) == step) & (sections.begin == ended)
            )
            finished = np.where(again, sections.begin, finished)
        several = sections.forward < sections.done
        loss = self._working(finished[finished >= 0], passes.start[finished >= 0])
        return {
            FORWARD: _constant(sections.forward[several], sections.done[several], FORWARD),
            LOSS: _constant(*loss, LOSS),
            SCALER: _constant(*self._before_updates(self.scaling), SCALER),
            CLIPPING: _constant(*self._clips, CLIPPING),
            **self._on_parameters,
        }

    @cached_property
    def uses(self) -> Timeline:
        """What models run for without gradients, with the work between the calls."""
        uses = self.forwards.uses
        start, end = (np.array([use[column] for use in uses], np.int64) for column in (1, 2))
        return first_started(start, end, np.array([NAMES.index(use[0]) for use in uses], np.int64))

    @cached_property
    def scaling(self) -> Mask:
        """For each name whether it is that of a gradient scaler's operator."""
        return self.events.names_where(names.is_scaling)

    @cached_property
    def clipping(self) -> Mask:
        """For each name whether it is that of an operator that begins to clip gradients."""
        return (self.on_gradients & ~self.scaling) | self.events.names_where(names.is_norm)

    @cached_property
    def _clips(self) -> tuple[Ints, Ints]:
        """From the first operator that clips to the optimizer's step.

        A norm alone is one that the program logs: clipping changes the gradients afterwards.
        """
        events = self.events
        start, end = self._before_updates(self.clipping)
        changes = self.on_gradients & ~self.scaling & ~events.prefix_mask(names.NORMS_AT_ONCE)
        changes |= events.names_where(names.is_rescaling)
        times = np.sort(events.start[events.chosen(changes, Category.OPERATOR)])
        clips = np.searchsorted(times, end) > np.searchsorted(times, start)
        return start[clips], end[clips]

    def _before_updates(self, named: Mask) -> tuple[Ints, Ints]:
        """From the first operator of these names after a pass to the optimizer's step."""
        events, passes = self.events, self.passes
        step = events.start[self.updates]
        last = np.searchsorted(passes.start, step, side="left") - 1
        step, last = step[last >= 0], last[last >= 0]
        ended = np.maximum.accumulate(passes.end)[last]
        calls = np.sort(self.o.spans.start[self.calls])
        none = np.searchsorted(calls, ended, side="left") == np.searchsorted(calls, step)
        return self._working(ended[none], step[none], named)

    @cached_property
    def _on_parameters(self) -> dict[int, Timeline]:
        """What goes over all parameters after a pass: an average of the weights, or a copy of them.

        An average comes after the optimizer's step. Where no step is marked, it is the step.
        """
        events = self.events
        ends, stop = self._stretches_behind()
        stepped = is_in(ends, events.end[self.updates])
        least = self._many_parameters()
        index = np.concatenate([_NO_EVENTS, *(top for top, _ in self.tops.values())])
        index = index[np.argsort(events.start[index], kind="stable")]
        averages = events.names_where(names.is_averaging)[events.name[index]]
        saves = self._read_by_host(index)
        at_once = events.prefix_mask(names.FOREACH)[events.name[index]]
        timelines: dict[int, Timeline] = {}
        for phase, chosen, after in (
            (AVERAGING, averages & ~saves, stepped),
            (OPTIMIZER, averages & ~saves, ~stepped & (not len(self.updates))),
            (SAVING, saves, stepped),
        ):
            updates, weight = index[chosen], np.where(at_once[chosen], least, 1)
            first, last = (np.searchsorted(events.start[updates], times) for times in (ends, stop))
            number = np.diff(np.append(0, np.cumsum(weight))[np.stack([first, last])], axis=0)[0]
            is_update = after & (last > first) & (number >= least)
            start, end = events.start[updates], np.maximum.accumulate(events.end[updates])
            timelines[phase] = _constant(start[first[is_update]], end[last[is_update] - 1], phase)
        return timelines

    def _stretches_behind(self) -> tuple[Ints, Ints]:
        """When each pass or optimizer's step ends, and when what comes next begins."""
        events, spans = self.events, self.o.spans
        ends = np.sort(np.concatenate([self.passes.end, events.end[self.updates]]))
        begun = spans.start[self.calls], events.start[self.updates], self.sections.forward
        calls = np.sort(np.concatenate(begun))
        stop = np.append(calls, FAR)[np.searchsorted(calls, ends)]
        return ends, np.minimum(stop, np.append(ends[1:], FAR)) if len(ends) else stop

    def _many_parameters(self) -> float:
        """How many operators go over all parameters, at least."""
        spans, passes = self.o.spans, self.passes
        node = np.array([*map(names.is_accumulate_grad, spans.node_names), False], bool)
        gradients = np.count_nonzero(node[spans.node] & (passes.of_span >= 0))
        return max(2, _MANY * gradients / max(1, len(passes.start)))

    def _read_by_host(self, index: Ints) -> Mask:
        """Whether each of these operators launches a copy to the host."""
        work = self.o.work
        read = self.events.prefix_mask(names.TO_HOST)[work.name]
        saves = np.zeros(len(index), bool)
        for thread, launches in grouped(work.thread, np.flatnonzero(read)):
            if thread in self.tops:
                saves |= is_in(index, self.tops[thread][1].at(work.launch[launches]))
        return saves

    def _working(self, after: Ints, before: Ints, named: Mask | None = None) -> tuple[Ints, Ints]:
        """Between two times each: from the first operator to the end of the last.

        Args:
            named: of which names the first operator is; any where left out.
        """
        events, spans = self.events, self.o.spans
        index = np.concatenate([_NO_EVENTS, *(top for top, _ in self.tops.values())])
        start = np.append(events.start[index], spans.start[self.losses])
        end = np.append(events.end[index], spans.end[self.losses])
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        if named is None:
            first = np.append(start, FAR)
        else:
            first = np.append(np.sort(events.start[index[named[events.name[index]]]]), FAR)
        begin = first[np.searchsorted(first, after, side="left")]
        latest = np.append(NOTHING, np.maximum.accumulate(end))
        finish = np.minimum(latest[np.searchsorted(start, before, side="left")], before)
        is_long = begin < finish
        return begin[is_long], finish[is_long]


# Layers: the phases on one thread, each by one kind of evidence ----------------------------------

_Layer = Callable[[_Context, int], Timeline]


def _marked(phase: int) -> _Layer:
    """Make the layer of the marks of a phase."""

    def layer(context: _Context, thread: int) -> Timeline:
        events, marks = context.events, context.marks_of[phase].get(thread, _NO_EVENTS)
        return _constant(events.start[marks], events.end[marks], phase)

    return layer


def _used(context: _Context, thread: int) -> Timeline:
    """What models run for without gradients: all of it, its batches and its results too."""
    spans, bare = context.o.spans, context.forwards.bare
    return context.uses if thread in spans.thread[bare] else EMPTY


def _called(context: _Context, thread: int) -> Timeline:
    """The calls of models and losses."""
    return context.called.get(thread, EMPTY)


def _optimizing(context: _Context, thread: int) -> Timeline:
    """The optimizer's marks. A step with a closure runs passes; it updates after the last pass."""
    events, marks = context.events, context.marks_of[OPTIMIZER].get(thread, _NO_EVENTS)
    start, end = events.start[marks], events.end[marks]
    return _constant(context.passes.after(start, end), end, OPTIMIZER)


def _operators(context: _Context, thread: int) -> Timeline:
    """What runs outside all calls and marks, by its name and its position."""
    if thread not in context.tops:
        return EMPTY
    events, (top, line) = context.events, context.tops[thread]
    start, name = events.start[top], events.name[top]
    phase = np.full(len(top), OTHER)
    applied = context.on_gradients
    if len(context.updates):  # then what the optimizer does is marked, and this may be an average
        applied = applied & ~events.prefix_mask(names.FOREACH)
    phase[applied[name]] = OPTIMIZER
    phase[events.names_where(names.is_zeroing)[name]] = ZERO_GRAD
    for number, times in context.between.items():
        phase[times.at(start) >= 0] = number
    phase[context.scaling[name]] = SCALER
    phase[_reading(context, thread, phase)] = METRICS
    # Between the closures of an optimizer's step, what is nothing else is the optimizer's.
    updating = enclosing(events, context.updates, events.thread[top], start) >= 0
    phase[updating & is_in(phase, (METRICS, OTHER))] = OPTIMIZER
    launching = line.at(context.copies_of.get(thread, _NO_EVENTS))
    phase[context.pins[name] | is_in(top, launching)] = COPY
    values = line.values.copy()
    values[values >= 0] = phase  # ``top`` has the operators in the order of the line
    return Timeline(line.edges, values)


def _reading(context: _Context, thread: int, phase: Ints) -> Mask:
    """Whether each of a thread's operators reads a value for the host, or computes such a value.

    These are the operators directly before one that reads, as far back as none makes a node.
    """
    events, (top, line) = context.events, context.tops[thread]
    reads = events.names_where(names.is_reading)[events.name[top]]
    makers = context.o.join.operator[context.o.join.operator >= 0]
    makers = events.start[makers[events.thread[makers] == thread]]
    free = is_in(phase, (LOSS, OTHER)) & ~is_in(top, line.at(makers))
    spans = np.sort(context.o.spans.start)
    # A run ends behind an operator that reads, where another phase begins, or a module's call.
    run = np.cumsum(np.diff(np.searchsorted(spans, events.start[top]), prepend=0) > 0)
    run += np.cumsum(~free) + np.cumsum(np.append(0, np.diff(phase)) != 0)
    last = np.full(int(run.max(initial=0)) + 1, NOTHING)
    place = np.flatnonzero(reads & free)
    np.maximum.at(last, run[place], place)
    place = np.arange(len(top))
    is_reading: Mask = free & (place <= last[run]) & (place > last[run] - _OF_VALUE)
    return is_reading


_LAYERS: tuple[_Layer, ...] = (
    _used,
    _marked(DATA),
    _called,
    _marked(COPY),
    _marked(SAVING),
    _marked(CLIPPING),
    _marked(ZERO_GRAD),
    _optimizing,
    _operators,
)
"""What decides the phase on a thread, the surest first."""


def _before(context: _Context) -> Timeline:
    """The host before the first operator: nothing runs until the batch is copied or used.

    It may load data, which nothing shows without a loader's marks. If the trace has device work,
    only a copy shows that a batch has arrived.
    """
    sections, work, events = context.sections, context.o.work, context.events
    if not len(sections.begin):
        return EMPTY
    steps = events.start[events.prefixed(Category.ANNOTATION, names.PROFILER_STEP)]
    # What is known to go on after the step before.
    ends = [context.between[phase].edges for phase in (AVERAGING, SAVING)]
    ends.append(context.uses.edges)
    ends += [events.end[context.marks[phase_name]] for phase_name in (DATA, SAVING)]
    marks = np.append(NOTHING, np.sort(np.concatenate([steps, *ends])))
    begin = np.maximum(sections.begin, 0)
    has_forward = sections.forward < FAR
    if len(work.start):
        copied = to_device(events, work.name) & (work.span < 0) & (work.launch >= 0)
        times = np.append(NOTHING, np.sort(work.launch[copied]))
        end = times[np.searchsorted(times, sections.forward, side="left") - 1]
    else:
        step = context.o.steps.of_pass
        has_forward &= np.append(NOTHING, step[:-1]) != step
        end = sections.forward
    begin = np.maximum(begin, marks[np.searchsorted(marks, end, side="right") - 1])
    has_forward &= end > begin + _PYTHON
    return _constant(begin[has_forward], end[has_forward], HOST)


def _constant(start: Ints, end: Ints, value: int) -> Timeline:
    """``value`` where any of these holds."""
    return first_started(start, end, np.full(len(start), value))
