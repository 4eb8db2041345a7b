"""The passes and steps that were recorded in part, and the trace without them.

A recording can begin between a forward and its backward, and end anywhere. Lightning's profiler
does both in each recording, because it steps after the forward. What such passes and steps cost is
not in the trace, so they are left out of all numbers, as if the recording had begun after them or
had ended before them. So is an evaluation after the last step, which is no part of any.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from backspot.analysis.attribution.cutting import Cut, cut
from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.passes import top_nodes
from backspot.analysis.attribution.updates import optimizer_steps
from backspot.analysis.timeline import FAR, grouped, is_in, take
from backspot.formatting import counted
from backspot.trace import Category, Events
from backspot.trace.events import Ints
from backspot.trace.names import NEXT_BATCH, PROFILER_STEP


def without_partial(events: Events, ownership: Ownership) -> Cut | None:
    """Return the trace without the passes and steps that were recorded in part.

    - A pass was recorded without its forward if it is among the first of the trace and has more
      nodes from before the recording than the pass with the fewest. A node is from before the
      recording if its sequence number is below all numbers of the recorded forward on the thread
      that built the node. Old graphs that every pass goes through, and forwards that were recorded
      but have no label, do not count.
    - The last pass was cut off if no operator follows, and its nodes are the first nodes of
      another, longer pass, but not all nodes of any other pass; or if the kernels of its last
      launches are missing, while another pass with the same nodes has them all.
    - The first or the last step was recorded in part if it has one of these passes and, without
      them, fewer passes than the next step. The last step was also cut off if it has fewer passes
      than the step before and no optimizer step.
    - The last forward was recorded without its backward if it follows the last pass and runs in a
      profiler's mark without a pass, or if the profiler's marks begin between forward and backward.
    - Calls of modules behind the last step are those of an evaluation.

    Returns:
        The trace, with a warning that says what is left out, but for an evaluation. ``None`` where
        all was recorded, where no pass would be left, and where the file is cut short.
    """
    count = len(ownership.passes.start)
    if events.truncated:
        return None
    head = _without_forward(events, ownership)
    tail = int(_is_cut_off(events, ownership))
    if head + tail >= count:
        return None
    between = _Between(events, ownership)
    passes_kept = _in_whole_steps(ownership, between, head, count - tail)
    if passes_kept is None:
        return None
    first, last = passes_kept
    lone = last == count - 1 and between.forward_follows()
    is_ended = last < count - 1 or lone
    evaluated = not is_ended and between.evaluation_follows()
    if not (first or is_ended or evaluated):
        return None
    begin = between.begin(first) if first else -1
    end = between.end(last) if is_ended or evaluated else FAR
    starts = ownership.passes.start
    if not ((starts >= begin) & (starts < end)).any():
        return None
    part_left = cut(events, ownership, begin, end)
    if not (first or is_ended):
        return part_left
    sentence = _sentence(count, head, tail, first + count - 1 - last, lone)
    with_warning = replace(part_left.events, warnings=(*events.warnings, sentence))
    return replace(part_left, events=with_warning)


def only_steps(events: Events, ownership: Ownership, first: int, last: int) -> Cut:
    """Return the trace as if only these steps had been recorded.

    Args:
        first: the first step to keep.
        last: the last step to keep.
    """
    runs = np.flatnonzero((ownership.steps.of_pass >= first) & (ownership.steps.of_pass <= last))
    between = _Between(events, ownership)
    begin = between.begin(int(runs[0])) if first else -1
    end = between.end(int(runs[-1])) if last < ownership.steps.count - 1 else FAR
    return cut(events, ownership, begin, end)


def is_between_forwards(events: Events, ownership: Ownership) -> bool:
    """Whether the profiler's mark of the last pass ends after the next forward.

    If the forward of the pass is missing, the profiler steps after each forward, and only more
    steps in one recording show a forward with its backward.
    """
    starts, ended = ownership.steps.start, int(ownership.passes.end[-1])
    if not len(starts):
        return False
    forward = _next(_Between(events, ownership).made, ended)
    return bool(starts[-1] < ended and forward < ownership.steps.end[-1])


# Which passes ------------------------------------------------------------------------------------


def _without_forward(events: Events, ownership: Ownership) -> int:
    """Return how many of the first passes were recorded without their forward, or with a part."""
    join, passes = ownership.join, ownership.passes
    operators = events.of(Category.OPERATOR)
    makers = operators[(events.forward_thread[operators] == 0) & (events.sequence[operators] >= 0)]
    lowest = np.full(len(events.threads) + 1, -1)
    for thread, members in grouped(events.thread, makers):
        lowest[thread] = events.sequence[members].min()
    old = (join.sequence >= 0) & (join.sequence < lowest[join.builder]) & (passes.of_span >= 0)
    number = np.bincount(passes.of_span[old], minlength=len(passes.start))
    unbroken = np.flatnonzero(number == number.min())
    return int(unbroken[0])


def _is_cut_off(events: Events, ownership: Ownership) -> bool:
    """Whether the recording's end cuts off the last pass."""
    spans, passes = ownership.spans, ownership.passes
    top = top_nodes(spans)
    roots = np.flatnonzero((top == np.arange(len(top))) & (passes.of_span >= 0))
    roots = roots[np.argsort(spans.start[roots], kind="stable")]
    nodes = dict(grouped(passes.of_span[roots]))
    names = [spans.node[roots[nodes[run]]].tolist() for run in range(len(passes.start))]
    *others, last_names = names
    alike = [run for run, other in enumerate(others) if other == last_names]
    if alike:
        return _lacks_kernels(events, ownership, alike)
    operators = events.of(Category.OPERATOR)
    ends = int(events.start[operators].max()) < passes.end[-1]
    return ends and any(other[: len(last_names)] == last_names for other in others)


def _lacks_kernels(events: Events, ownership: Ownership, alike: list[int]) -> bool:
    """Whether the last launches of the last pass have no kernels, while passes alike have all."""
    work, passes = ownership.work, ownership.passes
    work_count = np.bincount(work.run[work.run >= 0], minlength=len(passes.start))
    missing = int(work_count[alike].min() - work_count[-1])
    if missing <= 0 or len({*work_count[alike].tolist()}) > 1:
        return False
    calls = events.of(Category.RUNTIME)
    in_last = (events.start[calls] >= passes.start[-1]) & (events.start[calls] < passes.end[-1])
    calls = calls[in_last & (events.correlation[calls] > 0)]
    has_kernel = is_in(events.correlation[calls], events.correlation[work.event])
    kinds = events.correlation[events.of(Category.RUNTIME)]
    launching = events.of(Category.RUNTIME)[is_in(kinds, events.correlation[work.event])]
    launches = is_in(events.name[calls], events.name[launching])
    latest = events.start[calls[has_kernel]].max(initial=-1)
    lost = launches & ~has_kernel & (events.start[calls] > latest)
    return int(lost.sum()) >= missing


def _in_whole_steps(
    ownership: Ownership, between: _Between, first: int, stop: int
) -> tuple[int, int] | None:
    """Return the first and the last pass of the whole steps.

    Args:
        first: the first pass that was recorded whole.
        stop: the pass after the last that was recorded whole.

    Returns:
        ``None`` if no whole step is left.
    """
    steps, passes = ownership.steps, ownership.passes
    count = len(passes.start)
    step = steps.of_pass
    number = np.bincount(step[first:stop], minlength=steps.count)
    if first:
        begun = len(steps.start) and steps.start[step[first]] < passes.end[first - 1]
        following = number[step[first] + 1 : step[stop - 1]]
        if step[first] == step[first - 1] and (
            begun or (len(following) and number[step[first]] < following[0])
        ):
            first += int(number[step[first]])
    if first >= stop:
        return None
    last = step[stop - 1]
    before = number[step[first] : last]
    partial = stop < count and step[stop] == last
    if not partial and steps.unit == "optimizer step":
        partial = not between.updates(stop - 1)
    if partial and len(before) and number[last] < before[-1]:
        stop -= int(number[last])
    return (first, stop - 1) if first < stop else None


# Where to begin and to end -----------------------------------------------------------------------


class _Between:
    """What runs between the passes: forwards and optimizer steps."""

    def __init__(self, events: Events, ownership: Ownership) -> None:
        self.events, self.o = events, ownership
        spans, passes = ownership.spans, ownership.passes
        self.called = called = (spans.module >= 0) & (passes.of_span < 0)
        self.calls = np.sort(spans.start[called])
        makers = _made(events)
        span = spans.of(events, makers)
        is_outside = take(called, span, False) if called.any() else take(passes.of_span, span) < 0
        self.made = np.sort(events.start[makers[is_outside]])
        updates = optimizer_steps(events)
        self.update_starts = np.sort(events.start[updates])
        self.update_ends = np.sort(events.end[updates])
        self.marks = events.prefixed(Category.ANNOTATION, PROFILER_STEP)

    def forward_follows(self) -> bool:
        """Whether a forward follows the last pass in a mark that has no pass of its own."""
        last = int(self.o.passes.end[-1])
        forward = _next(self.made, last)
        if forward == FAR or not len(self.marks):
            return False
        if not len(self.o.steps.start):
            return True
        begun = self.events.start[self.marks]
        return bool(((begun >= last) & (begun <= forward)).any())

    def evaluation_follows(self) -> bool:
        """Whether modules are called behind the last step, as for an evaluation.

        Without marks, only modules that the passes train tell: each step can call others behind its
        update, as metrics.
        """
        spans, passes, owner = self.o.spans, self.o.passes, self.o.owner
        end = self.end(len(passes.start) - 1)
        if end < passes.end[-1]:
            return False  # a pass outside of all marks
        if len(self.o.steps.start):
            return _next(self.calls, end) < FAR
        trained = owner[spans.is_node & (passes.of_span >= 0)]
        return bool(is_in(owner[self.called & (spans.start >= end)], trained).any())

    def updates(self, run: int) -> bool:
        """Whether an optimizer step ends after this pass and before the next forward."""
        ended = int(self.o.passes.end[run])
        return self._updated(ended) > ended

    def begin(self, first: int) -> int:
        """Return when the step of the first pass that is kept begins."""
        steps, passes = self.o.steps, self.o.passes
        if len(steps.start):
            return int(steps.start[steps.of_pass[first]])
        before = int(passes.end[first - 1])
        updated = self._updated(before)
        if updated > before:
            return updated
        # The optimizer's step began before the recording, so no mark has its end.
        batches = np.sort(self.events.start[self.events.prefixed(Category.ANNOTATION, NEXT_BATCH)])
        begun = min(_next(t, before) for t in (batches, self.update_starts, self.calls))
        return begun if begun < passes.start[first] else before

    def end(self, last: int) -> int:
        """Return when the step of the last pass that is kept ends."""
        steps, passes = self.o.steps, self.o.passes
        if len(steps.start):
            return int(steps.end[steps.of_pass[last]])
        return self._updated(int(passes.end[last]))

    def _updated(self, after: int) -> int:
        """Return the end of the last optimizer step between a pass's end and the next forward.

        Without one, return the end of the pass.
        """
        forward = _next(self.calls if len(self.calls) else self.made, after)
        update = np.searchsorted(self.update_ends, forward, side="right") - 1
        return max(after, int(self.update_ends[update])) if update >= 0 else after


def _made(events: Events) -> Ints:
    """Return the operators after which autograd's number is higher: some of those that made nodes.

    All operators have the number that is next, whether they make a node or not.
    """
    operators = events.of(Category.OPERATOR)
    operators = operators[
        (events.forward_thread[operators] == 0) & (events.sequence[operators] >= 0)
    ]
    operators = operators[np.lexsort((events.start[operators], events.thread[operators]))]
    operator_before, following = operators[:-1], operators[1:]
    same = events.thread[operator_before] == events.thread[following]
    makers: Ints = operator_before[
        same & (events.sequence[following] > events.sequence[operator_before])
    ]
    return makers


def _next(times: Ints, after: int) -> int:
    """Return the first of these sorted times that is not before another."""
    index = np.searchsorted(times, after, side="left")
    return int(times[index]) if index < len(times) else FAR


def _sentence(count: int, head: int, tail: int, out: int, lone: bool) -> str:
    """Say what is left out.

    Args:
        count: how many passes the trace has.
        head: how many of them have no forward.
        tail: how many are cut off.
        out: how many are left out, with all others of their steps.
        lone: whether the last forward has no backward.
    """
    of_all = f"of {counted(count, 'backward pass', 'backward passes')}"
    rest = out - head - tail
    clauses = []
    if head:
        verb_phrase = "was recorded without its" if head == 1 else "were recorded without their"
        clauses.append(f"{head} {of_all} {verb_phrase} forward")
    if tail:
        clauses.append(f"{tail} {of_all} was cut off by the end of the recording")
    if rest:
        belongs = "belongs to a step" if rest == 1 else "belong to steps"
        clauses.append(f"{rest} {of_all} {belongs} recorded in part")
    if lone:
        clauses.append("the last forward was recorded without its backward")
    text = ", ".join(clauses)
    if len(clauses) > 1:
        return f"{text}: all of these are left out."
    return f"{text[0].upper()}{text[1:]} and {'is' if out + lone == 1 else 'are'} left out."
